//! Sequenced-packet UNIX sockets: whole messages, each with at most one descriptor. Nothing here blocks.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Most bytes of a message: a few of them fit the default send buffer.
pub(crate) const MESSAGE: usize = 32 << 10;

/// Connections that may wait to be accepted; more are refused for a moment and come again.
const BACKLOG: i32 = 128;

/// Close on exec, so that no child holds a group open; never block, so that every wait has its deadline.
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

/// What a read found.
#[derive(Debug)]
pub(crate) enum Received {
    /// A message is in the buffer.
    Message { len: usize, descriptor: Option<OwnedFd> },
    /// Nothing yet.
    Nothing,
    /// The peer is gone.
    End,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket {
    pub(crate) fn pair() -> Result<(Self, Self), Errno> {
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        Ok((Self(a), Self(b)))
    }

    /// Takes over a socket that a peer passed, once it is known to be one of this kind.
    pub(crate) fn from_descriptor(descriptor: OwnedFd) -> Result<Self, Errno> {
        match rustix::net::sockopt::socket_type(&descriptor)? {
            SocketType::SEQPACKET => Ok(Self(descriptor)),
            _ => Err(Errno::PROTOTYPE),
        }
    }

    fn new() -> Result<Self, Errno> {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None).map(Self)
    }

    /// The effective user id of the process at the other end: of the connecting process when it connected, of the
    /// listening one when it began to listen.
    pub(crate) fn peer_user(&self) -> Result<u32, Errno> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = libc::socklen_t::try_from(size_of_val(&peer)).expect("a few bytes");
        // SAFETY: `peer` and `len` are valid for writes for the call, and `len` is the size of `peer`.
        let status = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut len,
            )
        };
        if status == 0 {
            Ok(peer.uid)
        } else {
            Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
        }
    }

    /// Sends `head` and `body` as one message. `Err(AGAIN)` when the peer must read first.
    pub(crate) fn send(&self, head: &[u8], body: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        if head.len() + body.len() > MESSAGE {
            return Err(Errno::MSGSIZE);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(descriptor) = &descriptor {
            control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
        }
        let parts = [IoSlice::new(head), IoSlice::new(body)];
        match rustix::io::retry_on_intr(|| rustix::net::sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL)) {
            // The descriptors under way count against this user's limit until their receivers take them.
            Err(Errno::TOOMANYREFS | Errno::NOBUFS) => Err(Errno::AGAIN),
            sent => sent.map(drop),
        }
    }

    /// Reads one message into `buffer`, which holds [`MESSAGE`] bytes.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut read = || {
            rustix::io::retry_on_intr(|| {
                let mut parts = [IoSliceMut::new(buffer)];
                rustix::net::recvmsg(&self.0, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
            })
        };
        // A peer that closed with messages of ours unread resets the connection, and the system reports that once,
        // before what the peer had sent.
        let message = match read() {
            Err(Errno::CONNRESET) => read(),
            message => message,
        };
        match message {
            Err(Errno::AGAIN) => Ok(Received::Nothing),
            Err(Errno::CONNRESET | Errno::PIPE) => Ok(Received::End),
            Err(errno) => Err(errno),
            Ok(message) if message.bytes == 0 => Ok(Received::End),
            Ok(message) if message.flags.contains(ReturnFlags::TRUNC) => Err(Errno::MSGSIZE),
            // The system drops descriptors that do not fit this process's table.
            Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) => Err(Errno::MFILE),
            Ok(message) => {
                let descriptor = control.drain().find_map(|part| match part {
                    RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
                    _ => None,
                });
                Ok(Received::Message { len: message.bytes, descriptor })
            }
        }
    }
}

/// Where the ranks of a group meet.
#[derive(Debug, Clone)]
pub(crate) enum Address {
    /// A name that lives exactly as long as its socket, shared by all mount namespaces of a network namespace.
    Abstract(String),
    /// A socket file, for ranks in different network namespaces.
    File { directory: PathBuf, name: String },
}

/// What stood at an address.
#[derive(Debug)]
pub(crate) enum Door {
    /// Nobody: this process listens now.
    Ours(Listener),
    /// Somebody listens, and this is a connection to them.
    Theirs(Socket),
    /// Somebody is about to listen, or to leave, or has many callers.
    Later,
}

impl Address {
    /// Bytes of the longest path that a socket takes.
    pub(crate) const LONGEST: usize = 107;

    /// Listens at the address, or connects to whoever does.
    pub(crate) fn open(&self) -> Result<Door, Errno> {
        match self {
            Self::Abstract(name) => {
                let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
                match Listener::bind(&address, None) {
                    Ok(listener) => Ok(Door::Ours(listener)),
                    Err(Errno::ADDRINUSE) => match connect(&address) {
                        Ok(socket) => Ok(Door::Theirs(socket)),
                        Err(Errno::CONNREFUSED | Errno::AGAIN) => Ok(Door::Later),
                        Err(errno) => Err(errno),
                    },
                    Err(errno) => Err(errno),
                }
            }
            Self::File { directory, name } => {
                let path = directory.join(name);
                let address = SocketAddrUnix::new(&path)?;
                // A file outlives the process that made it. The lock on the directory, which leaves no trace, lets one
                // rank at a time find out that nobody listens, remove the file and listen itself.
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let lock = rustix::fs::open(directory, flags, Mode::empty())?;
                match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                    Err(Errno::AGAIN) => return Ok(Door::Later),
                    locked => locked?,
                }
                match connect(&address) {
                    Ok(socket) => return Ok(Door::Theirs(socket)),
                    Err(Errno::AGAIN) => return Ok(Door::Later),
                    Err(Errno::NOENT) => {}
                    // A file of another kind refuses as well: that one is not ours to remove.
                    Err(Errno::CONNREFUSED) if is_socket(&path)? => rustix::fs::unlink(&path)?,
                    Err(Errno::CONNREFUSED) => return Err(Errno::ADDRINUSE),
                    Err(errno) => return Err(errno),
                }
                Listener::bind(&address, Some(path)).map(Door::Ours)
            }
        }
    }
}

fn is_socket(path: &Path) -> Result<bool, Errno> {
    match rustix::fs::lstat(path) {
        Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode).is_socket()),
        // Its owner has just removed it, as one of this kind does.
        Err(Errno::NOENT) => Ok(true),
        Err(errno) => Err(errno),
    }
}

fn connect(address: &SocketAddrUnix) -> Result<Socket, Errno> {
    let socket = Socket::new()?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, address))?;
    Ok(socket)
}

/// A socket at an address, until it is dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Socket,
    file: Option<PathBuf>,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Listener {
    fn bind(address: &SocketAddrUnix, file: Option<PathBuf>) -> Result<Self, Errno> {
        let socket = Socket::new()?;
        rustix::net::bind(&socket, address)?;
        let listener = Self { socket, file };
        rustix::net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// The next connection, if one waits.
    pub(crate) fn accept(&self) -> Result<Option<Socket>, Errno> {
        match rustix::io::retry_on_intr(|| rustix::net::accept_with(&self.socket, FLAGS)) {
            Ok(descriptor) => Ok(Some(Socket(descriptor))),
            Err(Errno::AGAIN | Errno::CONNABORTED) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // While this socket still listens nobody takes the file for a dead one's, so it is this socket's.
        if let Some(file) = &self.file {
            let _ = rustix::fs::unlink(file);
        }
    }
}
