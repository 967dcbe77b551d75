//! A [`Store`] over TCP: a small server, and clients that give up in time. For tests and trusted networks: whoever can
//! connect can read and write.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::deadline::Deadline;
use super::store::Store;

/// Most bytes of a key, and of a value.
const KEY: usize = 4 << 10;
const VALUE: usize = 2 << 20;

/// Clients that a server serves at once.
const CLIENTS: usize = 4096;

/// Request: what to do, length of the key, length of the value, key, value. Reply: whether there is a value, its
/// length, the value. Lengths are four bytes, the lowest first.
const SET: u8 = b's';
const GET: u8 = b'g';

/// Serves a [`TcpStore`] until it is dropped.
#[derive(Debug)]
pub struct TcpStoreServer {
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
    /// The server's thread ends when this is closed.
    life: Option<UnixStream>,
}

impl TcpStoreServer {
    /// Listens at `address`; port 0 takes a free one.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (life, end) = UnixStream::pair()?;
        let server = Server { listener, end, clients: Vec::new(), values: HashMap::new() };
        let thread = std::thread::Builder::new().name("engram-store".to_owned()).spawn(move || server.serve())?;
        Ok(Self { address, thread: Some(thread), life: Some(life) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.life = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Server {
    listener: TcpListener,
    end: UnixStream,
    clients: Vec<Client>,
    values: HashMap<String, Vec<u8>>,
}

/// A connection as the server sees it. A client that is slow keeps only itself waiting.
#[derive(Debug)]
struct Client {
    stream: TcpStream,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl Server {
    fn serve(mut self) {
        loop {
            let listener = PollFd::new(&self.listener, PollFlags::IN);
            let end = PollFd::new(&self.end, PollFlags::IN);
            let clients = self.clients.iter().map(|client| {
                let event = if client.reply.is_empty() { PollFlags::IN } else { PollFlags::OUT };
                PollFd::new(&client.stream, event)
            });
            let mut polled: Vec<_> = [listener, end].into_iter().chain(clients).collect();
            if rustix::event::poll(&mut polled, None).is_err_and(|errno| errno != rustix::io::Errno::INTR) {
                return;
            }
            let ready: Vec<bool> = polled.iter().map(|socket| !socket.revents().is_empty()).collect();
            if ready[1] {
                return;
            }
            let mut ready = ready[2..].iter();
            let values = &mut self.values;
            self.clients.retain_mut(|client| !ready.next().is_some_and(|&ready| ready) || client.serve(values).is_ok());
            match self.listener.accept() {
                Ok((stream, _)) if self.clients.len() < CLIENTS && stream.set_nonblocking(true).is_ok() => {
                    self.clients.push(Client { stream, request: Vec::new(), reply: Vec::new() });
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // Out of descriptors, say: the caller waits until some client has left.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Client {
    /// Moves this client's traffic on. An error ends the connection.
    fn serve(&mut self, values: &mut HashMap<String, Vec<u8>>) -> io::Result<()> {
        let patient = |error: io::Error| if error.kind() == ErrorKind::WouldBlock { Ok(0) } else { Err(error) };
        if !self.reply.is_empty() {
            let sent = self.stream.write(&self.reply).or_else(patient)?;
            self.reply.drain(..sent);
            return Ok(());
        }
        let mut piece = [0; 16 << 10];
        match self.stream.read(&mut piece) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            read => self.request.extend_from_slice(&piece[..read.or_else(patient)?]),
        }
        let Some((&[action, ref lengths @ ..], body)) = self.request.split_first_chunk::<9>() else { return Ok(()) };
        let length = |at: usize| u32::from_le_bytes([lengths[at], lengths[at + 1], lengths[at + 2], lengths[at + 3]]);
        let (key, value) = (length(0) as usize, length(4) as usize);
        if key > KEY || value > VALUE || body.len() > key + value {
            return Err(ErrorKind::InvalidData.into());
        }
        if body.len() < key + value {
            return Ok(());
        }
        let (key, value) = body.split_at(key);
        let key = std::str::from_utf8(key).map_err(|_| ErrorKind::InvalidData)?;
        match action {
            SET => {
                values.insert(key.to_owned(), value.to_owned());
                self.reply = reply(Some(&[]));
            }
            GET => self.reply = reply(values.get(key).map(Vec::as_slice)),
            _ => return Err(ErrorKind::InvalidData.into()),
        }
        self.request.clear();
        Ok(())
    }
}

fn reply(value: Option<&[u8]>) -> Vec<u8> {
    let mut reply = vec![u8::from(value.is_some())];
    let value = value.unwrap_or_default();
    reply.extend_from_slice(&length(value.len()));
    reply.extend_from_slice(value);
    reply
}

fn length(bytes: usize) -> [u8; 4] {
    u32::try_from(bytes).expect("keys and values are far shorter").to_le_bytes()
}

/// A client of a [`TcpStoreServer`].
#[derive(Debug)]
pub struct TcpStore {
    address: SocketAddr,
    /// None after a failure: what a broken connection has still to say belongs to an earlier request.
    connection: Mutex<Option<TcpStream>>,
}

impl TcpStore {
    /// A client of the server at `address`, to which it connects at its first use.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self { address, connection: Mutex::new(None) }
    }

    fn request(&self, action: u8, key: &str, value: &[u8], timeout: Duration) -> io::Result<Option<Vec<u8>>> {
        let deadline = Deadline::after(timeout);
        if key.len() > KEY || value.len() > VALUE {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a key or value too long for the store"));
        }
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stream = match connection.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect_timeout(&self.address, left(deadline)?)?;
                stream.set_nodelay(true)?;
                stream
            }
        };
        let mut request = vec![action];
        request.extend_from_slice(&length(key.len()));
        request.extend_from_slice(&length(value.len()));
        request.extend_from_slice(key.as_bytes());
        request.extend_from_slice(value);
        let mut unsent = request.as_slice();
        while !unsent.is_empty() {
            stream.set_write_timeout(Some(left(deadline)?))?;
            let sent = interrupted_as_none(stream.write(unsent))?;
            unsent = &unsent[sent..];
        }
        let head = read(&mut stream, 5, deadline)?;
        let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if len > VALUE {
            return Err(io::Error::new(ErrorKind::InvalidData, "a value too long for the store"));
        }
        let value = read(&mut stream, len, deadline)?;
        *connection = Some(stream);
        Ok((head[0] != 0).then_some(value))
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> io::Result<()> {
        self.request(SET, key, value, timeout).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> io::Result<Option<Vec<u8>>> {
        self.request(GET, key, &[], timeout)
    }
}

fn left(deadline: Deadline) -> io::Result<Duration> {
    deadline.left().ok_or_else(|| io::Error::new(ErrorKind::TimedOut, "the store did not answer in time"))
}

/// Reads exactly `len` bytes, however slowly they come, before the deadline.
fn read(stream: &mut TcpStream, len: usize, deadline: Deadline) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    while filled < len {
        stream.set_read_timeout(Some(left(deadline)?))?;
        let read = stream.read(&mut bytes[filled..]);
        filled += interrupted_as_none(read.and_then(|read| match read {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            read => Ok(read),
        }))?;
    }
    Ok(bytes)
}

/// A timeout of the system or a signal is no failure: the deadline decides.
fn interrupted_as_none(done: io::Result<usize>) -> io::Result<usize> {
    match done {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
            Ok(0)
        }
        done => done,
    }
}
