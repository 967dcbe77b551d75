//! Every rank connected with every other: what all collective steps of a group within one node run over.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::deadline::{Deadline, timespec};
use super::socket::{MESSAGE, Received, Socket};
use crate::error::{Error, OsError, Result, Step};

/// Most bytes that a rank may bring to a step.
pub(crate) const CONTRIBUTION: usize = 1 << 20;

/// A message that is not part of a contribution.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// To the one that listens: who calls.
    Hello { version: u32, group: String, world: usize, rank: usize },
    /// From the one that listens: who it is, and who has come so far.
    Come { host: usize, ranks: Vec<usize> },
    /// From the one that listens, with a descriptor: the connection to another rank.
    Peer { rank: usize },
    /// From the one that listens: the connections are complete.
    Begin,
    /// The group has failed.
    Fault(Error),
}

impl Message {
    const TAG: u8 = b'{';

    pub(crate) fn send(&self, to: &Socket, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let body = serde_json::to_vec(self).expect("plain data has a JSON form");
        to.send(&[Self::TAG], &body, descriptor)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first() {
            Some((&Self::TAG, body)) => serde_json::from_slice(body).ok(),
            _ => None,
        }
    }
}

/// What one rank brought to a step.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptor: Option<OwnedFd>,
}

/// The head of each message of a contribution. A rank that makes another call than its peers is told so by it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) call: u32,
    pub(crate) step: String,
    pub(crate) last: bool,
}

impl Head {
    const TAG: u8 = b'p';

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![Self::TAG, u8::from(self.last)];
        bytes.extend_from_slice(&self.call.to_le_bytes());
        bytes.push(u8::try_from(self.step.len()).expect("names of steps are short"));
        bytes.extend_from_slice(self.step.as_bytes());
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let ([Self::TAG, last, call @ .., len], rest) = bytes.split_first_chunk::<7>()? else { return None };
        let (step, body) = rest.split_at_checked(usize::from(*len))?;
        let step = std::str::from_utf8(step).ok()?.to_owned();
        Some((Self { call: u32::from_le_bytes(*call), step, last: *last != 0 }, body))
    }

    /// What is wrong when `rank` is at this call and `other` at that one.
    pub(crate) fn unlike(&self, rank: usize, theirs: &Self, other: usize) -> Error {
        let name = |head: &Self| format!("{} (call {})", head.step, head.call);
        Error::disagreement("the collective call", (rank, name(self)), (other, name(theirs)))
    }
}

/// This rank's connections to all the others.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: usize,
    /// By rank; none to itself.
    peers: Vec<Option<Socket>>,
    calls: u32,
    buffer: Vec<u8>,
}

/// How far a step has come with one peer.
#[derive(Debug, Default)]
struct Progress {
    /// Bytes that were sent, once the first message was.
    sent: Option<usize>,
    part: Part,
    complete: bool,
}

impl Mesh {
    pub(crate) fn new(rank: usize, peers: Vec<Option<Socket>>) -> Self {
        Self { rank, peers, calls: 0, buffer: vec![0; MESSAGE] }
    }

    /// Connections between the ranks of this process.
    pub(crate) fn within_process(world: usize) -> Result<Vec<Self>> {
        let alone = |rank| Self::new(rank, (0..world).map(|_| None).collect());
        let mut meshes: Vec<Self> = (0..world).map(alone).collect();
        for high in 1..world {
            let (lower, rest) = meshes.split_at_mut(high);
            for (low, mesh) in lower.iter_mut().enumerate() {
                let (to_high, to_low) = Socket::pair().map_err(|errno| os(low, Step::Connect, errno))?;
                mesh.peers[high] = Some(to_high);
                rest[0].peers[low] = Some(to_low);
            }
        }
        Ok(meshes)
    }

    /// Tells `fault` to all ranks that can still hear it.
    pub(crate) fn tell(&self, fault: &Error) {
        let message = Message::Fault(fault.clone());
        for peer in self.peers.iter().flatten() {
            let _ = message.send(peer, None);
        }
    }

    /// Gives `own` to every other rank and returns what each of them gave, by rank; the own place holds `own` without
    /// the descriptor. After a failure the connections are of no use.
    pub(crate) fn gather(
        &mut self,
        step: Step,
        own: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        deadline: Deadline,
    ) -> Result<Vec<Part>> {
        if own.len() > CONTRIBUTION {
            return Err(Error::too_long(self.rank, step, own.len(), CONTRIBUTION));
        }
        let mut progress: Vec<Progress> = self.peers.iter().map(|_| Progress::default()).collect();
        loop {
            let mut blocked = false;
            let mut waiting = Vec::new();
            for (rank, state) in progress.iter_mut().enumerate() {
                let Some(peer) = &self.peers[rank] else { continue };
                while state.sent.is_none_or(|sent| sent < own.len()) {
                    let from = state.sent.unwrap_or(0);
                    match self.send_next(peer, step, &own[from..], descriptor.filter(|_| from == 0)) {
                        Ok(sent) => state.sent = Some(from + sent),
                        Err(Errno::AGAIN) => {
                            blocked = true;
                            break;
                        }
                        Err(Errno::PIPE | Errno::CONNRESET) => return Err(self.left(rank, step)),
                        Err(errno) => return Err(os(self.rank, step, errno)),
                    }
                }
                while !state.complete {
                    match peer.receive(&mut self.buffer) {
                        Ok(Received::Nothing) => break,
                        Ok(Received::End) => return Err(self.left(rank, step)),
                        Ok(Received::Message { len, descriptor }) => {
                            let expected = Head { call: self.calls, step: step.to_string(), last: true };
                            state.take(&self.buffer[..len], descriptor, &expected, [self.rank, rank], step)?;
                        }
                        Err(Errno::MSGSIZE) => return Err(unreadable(rank, step, "a message too long")),
                        Err(errno) => return Err(os(self.rank, step, errno)),
                    }
                }
                if !state.complete {
                    waiting.push(rank);
                }
            }
            if waiting.is_empty() && !blocked {
                break;
            }
            let Some(left) = deadline.left() else {
                // A rank that reads nothing is as absent as one that sends nothing.
                let absent = |(rank, state): (usize, &Progress)| {
                    let unsent = state.sent.is_none_or(|sent| sent < own.len());
                    (self.peers[rank].is_some() && (unsent || !state.complete)).then_some(rank)
                };
                let ranks = progress.iter().enumerate().filter_map(absent).collect();
                return Err(Error::Missing { step, waited: deadline.limit(), ranks });
            };
            // A blocked sender looks again soon: descriptors under way block it without any sign of their arrival.
            let wait = if blocked { left.min(std::time::Duration::from_millis(1)) } else { left };
            let sockets: Vec<_> = waiting.iter().filter_map(|&rank| self.peers[rank].as_ref()).collect();
            wait_readable(&sockets, wait).map_err(|errno| os(self.rank, step, errno))?;
        }
        self.calls = self.calls.wrapping_add(1);
        let mut parts: Vec<Part> = progress.into_iter().map(|state| state.part).collect();
        parts[self.rank].bytes = own.to_vec();
        Ok(parts)
    }

    /// Why `rank` left. It may have followed a fault that it had no room to pass on, so what the others say counts, too; whoever
    /// told it first is given a moment to tell this rank.
    fn left(&self, rank: usize, step: Step) -> Error {
        let moment = Deadline::after(std::time::Duration::from_millis(100));
        let mut open: Vec<&Socket> = self.peers.iter().flatten().collect();
        let mut buffer = vec![0; MESSAGE];
        loop {
            let mut fault: Option<Error> = None;
            open.retain(|peer| {
                loop {
                    match peer.receive(&mut buffer) {
                        Ok(Received::Nothing) => return true,
                        Ok(Received::Message { len, .. }) => {
                            if let Some(Message::Fault(told)) = Message::parse(&buffer[..len]) {
                                fault.get_or_insert(told);
                            }
                        }
                        Ok(Received::End) | Err(_) => return false,
                    }
                }
            });
            match (fault, moment.left()) {
                (Some(fault), _) => return fault,
                (None, Some(left)) if !open.is_empty() && wait_readable(&open, left).is_ok() => {}
                _ => return Error::Lost { rank, step },
            }
        }
    }

    /// Sends as much of `rest` as fits one message.
    fn send_next(
        &self,
        peer: &Socket,
        step: Step,
        rest: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<usize, Errno> {
        const BODY: usize = MESSAGE - 256;
        let len = rest.len().min(BODY);
        let head = Head { call: self.calls, step: step.to_string(), last: len == rest.len() };
        peer.send(&head.to_bytes(), &rest[..len], descriptor)?;
        Ok(len)
    }
}

impl Progress {
    /// Adds a message of the peer `between[1]` to its part.
    fn take(
        &mut self,
        message: &[u8],
        descriptor: Option<OwnedFd>,
        expected: &Head,
        between: [usize; 2],
        step: Step,
    ) -> Result<()> {
        let [rank, other] = between;
        let Some((head, body)) = Head::parse(message) else {
            return Err(match Message::parse(message) {
                Some(Message::Fault(fault)) => fault,
                _ => unreadable(other, step, "not a contribution"),
            });
        };
        if (head.call, &head.step) != (expected.call, &expected.step) {
            return Err(expected.unlike(rank, &head, other));
        }
        if self.part.bytes.len() + body.len() > CONTRIBUTION {
            return Err(unreadable(other, step, "a contribution too long"));
        }
        self.part.bytes.extend_from_slice(body);
        self.part.descriptor = self.part.descriptor.take().or(descriptor);
        self.complete = head.last;
        Ok(())
    }
}

/// Why a peer that takes no more messages left: what it said last, or nothing.
pub(crate) fn last_words(peer: &Socket, rank: usize, step: Step) -> Error {
    let mut buffer = vec![0; MESSAGE];
    while let Ok(Received::Message { len, .. }) = peer.receive(&mut buffer) {
        if let Some(Message::Fault(fault)) = Message::parse(&buffer[..len]) {
            return fault;
        }
    }
    Error::Lost { rank, step }
}

/// Waits until one of `sockets` can be read, or is closed, at most for `limit`.
pub(crate) fn wait_readable<S: AsFd>(sockets: &[S], limit: std::time::Duration) -> Result<(), Errno> {
    let mut polled: Vec<_> = sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    match rustix::event::poll(&mut polled, Some(&timespec(limit))) {
        // Whoever waits looks at its deadline before it waits again.
        Err(Errno::INTR) => Ok(()),
        polled => polled.map(drop),
    }
}

pub(crate) fn os(rank: usize, step: Step, errno: Errno) -> Error {
    Error::Os { rank, step, source: OsError::of(errno) }
}

pub(crate) fn unreadable(rank: usize, step: Step, found: &str) -> Error {
    Error::Unreadable { rank, step, found: found.to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn heads_survive(call: u32, last: bool, step in "[a-z ']{0,60}", body: Vec<u8>) {
            let head = Head { call, step, last };
            let mut bytes = head.to_bytes();
            bytes.extend_from_slice(&body);
            prop_assert_eq!(Head::parse(&bytes), Some((head, body.as_slice())));
            prop_assert!(Message::parse(&bytes).is_none());
        }

        #[test]
        fn anything_can_be_read(bytes: Vec<u8>, tag in prop::sample::select(vec![Head::TAG, Message::TAG])) {
            let bytes = [&[tag], bytes.as_slice()].concat();
            if let Some((head, body)) = Head::parse(&bytes) {
                prop_assert_eq!(bytes.len(), 7 + head.step.len() + body.len());
            }
            let message = Message::parse(&bytes).map(|message| format!("{message:?}"));
            prop_assert!(message.is_none_or(|text| !text.is_empty()));
        }
    }

    #[test]
    fn no_peer_floods_this_rank() {
        // More than a contribution may hold, in messages that are each all right.
        let expected = Head { call: 0, step: Step::Gather.to_string(), last: true };
        let mut message = Head { call: 0, step: Step::Gather.to_string(), last: false }.to_bytes();
        message.resize(MESSAGE, 0);
        let mut progress = Progress::default();
        let flood = (0..=CONTRIBUTION / (MESSAGE / 2))
            .try_for_each(|_| progress.take(&message, None, &expected, [0, 1], Step::Gather));
        assert!(matches!(flood, Err(Error::Unreadable { rank: 1, .. })));
        assert!(progress.part.bytes.len() <= CONTRIBUTION);
    }
}
