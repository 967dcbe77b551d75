//! The meeting at a socket: whoever comes first is the host, all others are guests.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;

use super::deadline::Deadline;
use super::group::Probe;
use super::mesh::{Mesh, Message, last_words, os, unreadable, wait_readable};
use super::socket::{Address, Door, Listener, MESSAGE, Received, Socket};
use crate::error::{Error, Result, Step};

/// Changes whenever ranks of different builds would misunderstand each other.
pub(crate) const VERSION: u32 = 1;

/// Pause before a rank that found neither a host nor a free name looks again.
const PAUSE: Duration = Duration::from_millis(5);

/// How long a host that knows of a fault stays to tell it to ranks that have yet to come.
const LINGER: Duration = Duration::from_secs(10);

/// Callers that have not said who they are. The one that has been silent longest makes room for the next.
const STRANGERS: usize = 16;

/// Who comes to a meeting, and when it ends.
#[derive(Debug)]
pub(crate) struct Meeting<'a> {
    pub(crate) address: &'a Address,
    /// What tells this group from all others.
    pub(crate) group: &'a str,
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) deadline: Deadline,
    pub(crate) probe: &'a Probe,
}

impl Meeting<'_> {
    /// Connects all ranks with each other.
    pub(crate) fn attend(&self) -> Result<Mesh> {
        loop {
            self.before(Step::Find)?;
            let mesh = match self.address.open().map_err(|errno| os(self.rank, Step::Find, errno))? {
                Door::Ours(listener) => Some(Host::new(self, listener).receive_all()?),
                Door::Theirs(host) => self.visit(host)?,
                Door::Later => None,
            };
            if let Some(mesh) = mesh {
                return Ok(mesh);
            }
            let Some(left) = self.deadline.left() else { return Err(self.missing(&[self.rank])) };
            std::thread::sleep(PAUSE.min(left));
        }
    }

    /// The guest's part. `None` when there turned out to be no host behind the connection.
    fn visit(&self, host: Socket) -> Result<Option<Mesh>> {
        let expected = rustix::process::geteuid().as_raw();
        let found = host.peer_user().map_err(|errno| os(self.rank, Step::Find, errno))?;
        if found != expected {
            return Err(Error::ForeignPeer { expected, found });
        }
        let group = self.group.to_owned();
        let hello = Message::Hello { version: VERSION, group, world: self.world, rank: self.rank };
        if hello.send(&host, None).is_err() {
            return Ok(None);
        }
        let peers = (0..self.world).map(|_| None).collect();
        let mut guest = Guest { meeting: self, host, host_rank: None, present: vec![self.rank], peers, fault: None };
        match guest.wait() {
            Ok(true) => guest.into_mesh().map(Some),
            Ok(false) => Ok(None),
            Err(fault) => {
                let farewell = Message::Fault(fault.clone());
                for rank in guest.peers.iter().flatten().chain([&guest.host]) {
                    let _ = farewell.send(rank, None);
                }
                Err(fault)
            }
        }
    }

    fn before(&self, step: Step) -> Result<()> {
        self.probe.before(step).map_err(|source| Error::Os { rank: self.rank, step, source })
    }

    fn missing(&self, present: &[usize]) -> Error {
        let ranks = (0..self.world).filter(|rank| !present.contains(rank)).collect();
        Error::Missing { step: Step::Meet, waited: self.deadline.limit(), ranks }
    }
}

/// A rank that came to another one's meeting.
struct Guest<'a> {
    meeting: &'a Meeting<'a>,
    host: Socket,
    /// Known once the host has answered.
    host_rank: Option<usize>,
    present: Vec<usize>,
    peers: Vec<Option<Socket>>,
    /// Why this rank will not begin.
    fault: Option<Error>,
}

impl Guest<'_> {
    /// Waits for the connections to all other ranks; false when there is no host after all.
    fn wait(&mut self) -> Result<bool> {
        let Meeting { rank, world, deadline, .. } = *self.meeting;
        let mut buffer = vec![0; MESSAGE];
        self.refuse_if(self.meeting.before(Step::Meet));
        loop {
            let (message, descriptor) = match self.host.receive(&mut buffer) {
                Ok(Received::Message { len, descriptor }) => (Message::parse(&buffer[..len]), descriptor),
                Ok(Received::Nothing) => {
                    let Some(left) = deadline.left() else {
                        // If all have come it is the host that is late.
                        let all = self.present.len() == world;
                        self.present.retain(|&rank| !all || Some(rank) != self.host_rank);
                        return Err(self.or_fault(self.meeting.missing(&self.present)));
                    };
                    wait_readable(&[&self.host], left).map_err(|errno| os(rank, Step::Meet, errno))?;
                    continue;
                }
                Ok(Received::End) => return self.no_host(|rank| Error::Lost { rank, step: Step::Meet }),
                Err(Errno::MSGSIZE) => (None, None),
                // No descriptor is free for a connection that the host passed.
                Err(errno @ Errno::MFILE) => {
                    self.refuse_if(Err(os(rank, Step::Connect, errno)));
                    continue;
                }
                Err(errno) => return Err(os(rank, Step::Meet, errno)),
            };
            match (message, descriptor) {
                (Some(Message::Come { host, ranks }), None) if host < world && host != rank => {
                    self.host_rank = Some(host);
                    self.present = ranks;
                }
                (Some(Message::Peer { rank: peer }), Some(descriptor)) if peer < world && peer != rank => {
                    self.refuse_if(self.meeting.before(Step::Connect));
                    let socket = Socket::from_descriptor(descriptor).map_err(|errno| os(rank, Step::Connect, errno))?;
                    self.peers[peer] = Some(socket);
                }
                (Some(Message::Begin), None) => return self.fault.take().map_or(Ok(true), Err),
                (Some(Message::Fault(fault)), None) => return Err(self.or_fault(fault)),
                _ => return self.no_host(|rank| unreadable(rank, Step::Meet, "not what a host says")),
            }
        }
    }

    /// Has this rank not begin, if `outcome` is an error. The host hears it at once. If the meeting is complete by then
    /// this rank goes on until it is connected with all ranks, and tells them.
    fn refuse_if(&mut self, outcome: Result<()>) {
        if let Err(fault) = outcome {
            let fault = self.fault.get_or_insert(fault);
            let _ = Message::Fault(fault.clone()).send(&self.host, None);
        }
    }

    fn or_fault(&mut self, other: Error) -> Error {
        self.fault.take().unwrap_or(other)
    }

    /// What it means that the other end is gone or talks differently: a host of the group has told its rank before, and
    /// whoever has not is none.
    fn no_host(&mut self, fault: impl FnOnce(usize) -> Error) -> Result<bool> {
        match (self.fault.take(), self.host_rank) {
            (Some(own), _) => Err(own),
            (None, Some(host)) => Err(fault(host)),
            (None, None) => Ok(false),
        }
    }

    fn into_mesh(mut self) -> Result<Mesh> {
        let Meeting { rank, .. } = *self.meeting;
        let host = self.host_rank.unwrap_or(rank);
        self.peers[host] = Some(self.host);
        match self.peers.iter().enumerate().all(|(peer, socket)| socket.is_some() == (peer != rank)) {
            true => Ok(Mesh::new(rank, self.peers)),
            false => Err(unreadable(host, Step::Connect, "fewer connections than ranks")),
        }
    }
}

/// The rank that listens.
struct Host<'a> {
    meeting: &'a Meeting<'a>,
    listener: Listener,
    /// Callers who have not said who they are, in the order they came.
    strangers: VecDeque<Socket>,
    /// By rank.
    guests: Vec<Option<Socket>>,
    /// The caller who was turned away, for whom the meeting has failed.
    turned_away: Option<usize>,
    /// Ranks that all agree to be part of the group.
    certain: usize,
    buffer: Vec<u8>,
}

/// What a caller says of itself.
struct Hello {
    version: u32,
    world: usize,
    rank: usize,
}

impl<'a> Host<'a> {
    fn new(meeting: &'a Meeting<'a>, listener: Listener) -> Self {
        let guests = (0..meeting.world).map(|_| None).collect();
        Self {
            meeting,
            listener,
            strangers: VecDeque::new(),
            guests,
            turned_away: None,
            certain: meeting.world,
            buffer: vec![0; MESSAGE],
        }
    }

    fn receive_all(mut self) -> Result<Mesh> {
        match self.meet().and_then(|()| self.connect()) {
            Ok(()) => Ok(Mesh::new(self.meeting.rank, self.guests)),
            Err(fault) => {
                self.dismiss(&fault);
                Err(fault)
            }
        }
    }

    /// Waits until every rank has come.
    fn meet(&mut self) -> Result<()> {
        let rank = self.meeting.rank;
        self.meeting.before(Step::Meet)?;
        loop {
            let present = self.present();
            if present.len() == self.meeting.world {
                return Ok(());
            }
            let Some(left) = self.meeting.deadline.left() else { return Err(self.meeting.missing(&present)) };
            self.listen(left).map_err(|errno| os(rank, Step::Meet, errno))?;
            for (rank, guest) in self.guests.iter().enumerate() {
                let Some(guest) = guest else { continue };
                match guest.receive(&mut self.buffer) {
                    Ok(Received::Nothing) => {}
                    Ok(Received::End) => return Err(Error::Lost { rank, step: Step::Meet }),
                    Ok(Received::Message { len, .. }) => {
                        return Err(match Message::parse(&self.buffer[..len]) {
                            Some(Message::Fault(fault)) => fault,
                            _ => unreadable(rank, Step::Meet, "no guest's words"),
                        });
                    }
                    Err(_) => return Err(unreadable(rank, Step::Meet, "no guest's words")),
                }
            }
            for (caller, hello) in self.callers().map_err(|errno| os(rank, Step::Meet, errno))? {
                if let Err(fault) = self.judge(&hello) {
                    let _ = Message::Fault(fault.clone()).send(&caller, None);
                    self.turned_away = Some(hello.rank);
                    return Err(fault);
                }
                self.guests[hello.rank] = Some(caller);
                let come = Message::Come { host: rank, ranks: self.present() };
                for guest in self.guests.iter().flatten() {
                    // A guest that is gone is noticed when it is read.
                    let _ = come.send(guest, None);
                }
            }
        }
    }

    fn present(&self) -> Vec<usize> {
        let came = |&rank: &usize| rank == self.meeting.rank || self.guests[rank].is_some();
        (0..self.meeting.world).filter(came).collect()
    }

    /// Waits until somebody calls or speaks.
    fn listen(&self, limit: Duration) -> Result<(), Errno> {
        let sockets = self.strangers.iter().chain(self.guests.iter().flatten()).map(AsFd::as_fd);
        wait_readable(&sockets.chain([self.listener.as_fd()]).collect::<Vec<_>>(), limit)
    }

    /// Those who have called and said that they are ranks of this group. Everybody else is sent away without a word.
    fn callers(&mut self) -> Result<Vec<(Socket, Hello)>, Errno> {
        let user = rustix::process::geteuid().as_raw();
        // Others may call faster than they can be sent away.
        for _ in 0..STRANGERS {
            let Some(caller) = self.listener.accept()? else { break };
            if caller.peer_user() == Ok(user) {
                self.strangers.push_back(caller);
                if self.strangers.len() > STRANGERS {
                    self.strangers.pop_front();
                }
            }
        }
        let mut callers = Vec::new();
        for _ in 0..self.strangers.len() {
            let Some(stranger) = self.strangers.pop_front() else { break };
            match stranger.receive(&mut self.buffer) {
                Ok(Received::Nothing) => self.strangers.push_back(stranger),
                Ok(Received::Message { len, .. }) => match Message::parse(&self.buffer[..len]) {
                    Some(Message::Hello { version, group, world, rank }) if group == self.meeting.group => {
                        callers.push((stranger, Hello { version, world, rank }));
                    }
                    _ => {}
                },
                Ok(Received::End) | Err(_) => {}
            }
        }
        Ok(callers)
    }

    /// Whether a caller fits into this group.
    fn judge(&mut self, hello: &Hello) -> Result<()> {
        let Meeting { rank, world, .. } = *self.meeting;
        let differ = |what: &str, ours: String, theirs: String| {
            Err(Error::disagreement(what, (rank, ours), (hello.rank, theirs)))
        };
        if hello.version != VERSION {
            return differ("the version of the bootstrap", VERSION.to_string(), hello.version.to_string());
        }
        if hello.world != world {
            self.certain = world.min(hello.world);
            return differ("the world size", world.to_string(), hello.world.to_string());
        }
        match self.guests.get(hello.rank) {
            None => Err(unreadable(hello.rank, Step::Meet, "a rank outside the group")),
            Some(guest) if guest.is_some() || hello.rank == rank => Err(Error::DuplicateRank { rank: hello.rank }),
            Some(_) => Ok(()),
        }
    }

    /// Gives each pair of guests a connection, then lets everybody begin. The guests' own connections to the host serve
    /// from then on as the ones between these ranks.
    fn connect(&mut self) -> Result<()> {
        let Meeting { rank, world, .. } = *self.meeting;
        self.meeting.before(Step::Connect)?;
        let guests = || (0..world).filter(|&guest| guest != rank);
        for low in guests() {
            for high in guests().filter(|&high| high > low) {
                let (to_high, to_low) = Socket::pair().map_err(|errno| os(rank, Step::Connect, errno))?;
                self.tell(low, &Message::Peer { rank: high }, Some(to_high))?;
                self.tell(high, &Message::Peer { rank: low }, Some(to_low))?;
            }
        }
        guests().try_for_each(|guest| self.tell(guest, &Message::Begin, None))
    }

    fn tell(&self, rank: usize, message: &Message, descriptor: Option<Socket>) -> Result<()> {
        let Some(guest) = &self.guests[rank] else { return Err(Error::Lost { rank, step: Step::Connect }) };
        loop {
            match message.send(guest, descriptor.as_ref().map(AsFd::as_fd)) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) if self.meeting.deadline.left().is_some() => std::thread::sleep(PAUSE),
                Err(Errno::AGAIN) => {
                    let waited = self.meeting.deadline.limit();
                    return Err(Error::Missing { step: Step::Connect, waited, ranks: vec![rank] });
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(last_words(guest, rank, Step::Connect)),
                Err(errno) => return Err(os(self.meeting.rank, Step::Connect, errno)),
            }
        }
    }

    /// Tells `fault` to every rank, also to those that come a little later: without that they would wait in vain.
    fn dismiss(&mut self, fault: &Error) {
        let farewell = Message::Fault(fault.clone());
        let mut told = self.present();
        told.extend(self.turned_away);
        if let Error::Lost { rank, .. } = fault {
            told.push(*rank);
        }
        for guest in self.guests.iter().flatten() {
            let _ = farewell.send(guest, None);
        }
        self.guests.fill_with(|| None);
        let end = self.meeting.deadline.at_most(LINGER);
        while let Some(left) = end.left()
            && !(0..self.certain).all(|rank| told.contains(&rank))
        {
            let Ok(callers) = self.listen(left).and_then(|()| self.callers()) else { return };
            for (caller, hello) in callers {
                // A rank that was told and comes again wants a new meeting: its connection ends without a word.
                if !told.contains(&hello.rank) {
                    let _ = farewell.send(&caller, None);
                    told.push(hello.rank);
                }
            }
        }
    }
}
