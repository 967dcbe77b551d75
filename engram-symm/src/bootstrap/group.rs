use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use serde::{Serialize, de::DeserializeOwned};

use super::deadline::Deadline;
use super::mesh::{Mesh, Part, os, unreadable};
use super::store;
use crate::error::{Error, OsError, Result, Step};

/// How long ranks wait for each other unless told otherwise. Some compile kernels first, for minutes.
pub(crate) const RENDEZVOUS: Duration = Duration::from_secs(300);

/// Called before each [`Step`]; an error stands for the step's failure.
#[derive(Clone, Default)]
pub(crate) struct Probe(Option<Arc<dyn Fn(Step) -> io::Result<()> + Send + Sync>>);

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Probe" } else { "no probe" })
    }
}

impl Probe {
    pub(crate) fn new(probe: impl Fn(Step) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(probe)))
    }

    pub(crate) fn before(&self, step: Step) -> Result<(), OsError> {
        self.0.as_ref().map_or(Ok(()), |probe| probe(step).map_err(|error| OsError::from_io(&error)))
    }
}

/// One rank's place in a group of ranks that act together.
///
/// All calls that take `&mut self` are collective: every rank of the group makes the same ones in the same order, and
/// each waits for the others at most as long as the group's deadline. A call that fails because a rank is gone, late
/// or out of step ends the group: its error is told to all ranks, and each later call returns it again.
///
/// Dropping a group is local and silent; the others notice at their next collective call. [`close`](Self::close)
/// leaves together. A rank that dies is noticed at once, unless a child that it forked without `exec` lives on with its
/// connections: then at the deadline.
#[derive(Debug)]
pub struct Group {
    rank: usize,
    world: usize,
    one_node: bool,
    link: Link,
    limit: Duration,
    probe: Probe,
}

#[derive(Debug)]
enum Link {
    /// A group of one.
    Alone,
    /// Ranks of one node.
    Mesh(Mesh),
    /// Ranks that may be on different nodes.
    Store(store::Link),
    /// The connections are gone, for this reason.
    Failed(Error),
}

impl Group {
    /// The group of one rank. It has no sockets and no threads, and never waits.
    #[must_use]
    pub fn alone() -> Self {
        Self { rank: 0, world: 1, one_node: true, link: Link::Alone, limit: RENDEZVOUS, probe: Probe::default() }
    }

    /// A group whose ranks are threads of this process, in the order of their ranks. Apart from the rendezvous it works
    /// as one of processes does.
    ///
    /// # Errors
    /// [`Error::Os`] when the system gives no sockets, [`Error::Invalid`] for no ranks at all.
    pub fn threads(world: usize) -> Result<Vec<Self>> {
        match world {
            0 => Err(Error::Invalid {
                what: "the world size".to_owned(),
                found: "0".to_owned(),
                expected: "at least 1".to_owned(),
            }),
            1 => Ok(vec![Self::alone()]),
            _ => {
                let meshes = Mesh::within_process(world)?.into_iter().enumerate();
                Ok(meshes.map(|(rank, mesh)| Self::of_mesh(rank, world, mesh)).collect())
            }
        }
    }

    pub(crate) fn of_store(rank: usize, world: usize, link: store::Link) -> Self {
        Self { rank, world, one_node: false, link: Link::Store(link), ..Self::alone() }
    }

    pub(crate) fn of_mesh(rank: usize, world: usize, mesh: Mesh) -> Self {
        Self { rank, world, link: Link::Mesh(mesh), ..Self::alone() }
    }

    /// Sets how long each collective call waits for the other ranks. Equal on all ranks, if they are to agree on
    /// who is late.
    pub fn set_timeout(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Has `probe` called before each step of this rank. An error that it returns is taken for that step's failure:
    /// this is how tests make a rank fail, hang or die at a step of their choice.
    pub fn set_probe(&mut self, probe: impl Fn(Step) -> io::Result<()> + Send + Sync + 'static) {
        self.probe = Probe::new(probe);
    }

    /// This rank, `0..world()`.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks, at least 1.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// Gives `own` to all ranks; returns what each of them gave, by rank. At most 1 MiB.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Lost`], [`Error::Disagreement`] for ranks that are late, gone or make another call.
    pub fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather(Step::Gather, own)
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn barrier(&mut self) -> Result<()> {
        self.gather(Step::Gather, &[]).map(drop)
    }

    /// Turns each rank's own outcome into the group's: every rank gets its value if all succeeded, else all get the
    /// error of the lowest rank that failed. The group stays usable after such a failure.
    ///
    /// # Errors
    /// That error, or as [`all_gather`](Self::all_gather).
    pub fn agree<T>(&mut self, step: Step, outcome: Result<T>) -> Result<T> {
        let report = serde_json::to_vec(&outcome.as_ref().err()).expect("plain data has a JSON form");
        for (rank, report) in self.gather(step, &report)?.iter().enumerate() {
            match serde_json::from_slice::<Option<Error>>(report) {
                Ok(None) => {}
                Ok(Some(error)) => return Err(error),
                Err(_) => return Err(unreadable(rank, step, "not an outcome")),
            }
        }
        outcome
    }

    /// Passes a descriptor to every other rank and returns theirs, by rank; a copy of the own one in its place. All of
    /// them are closed on exec.
    ///
    /// # Errors
    /// [`Error::AcrossNodes`] for a group that meets through a store; else as [`all_gather`](Self::all_gather).
    pub fn share(&mut self, own: BorrowedFd<'_>) -> Result<Vec<OwnedFd>> {
        let step = Step::Share;
        if !self.one_node {
            return Err(Error::AcrossNodes { step });
        }
        let mut copy = match rustix::io::fcntl_dupfd_cloexec(own, 0) {
            Ok(copy) => Some(copy),
            Err(errno) => return self.give_up(os(self.rank, step, errno)),
        };
        let parts = self.exchange(step, &[], Some(own), None)?;
        let own_rank = self.rank;
        let shared = parts.into_iter().enumerate().map(|(rank, part)| {
            let descriptor = if rank == own_rank { copy.take() } else { part.descriptor };
            descriptor.ok_or_else(|| unreadable(rank, step, "no descriptor"))
        });
        shared.collect::<Result<_>>().or_else(|fault| self.give_up(fault))
    }

    /// Leaves the group together with all other ranks: none of them uses it any more once this returns.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather). The group is gone either way.
    pub fn close(mut self) -> Result<()> {
        self.gather(Step::Close, &[]).map(drop)
    }

    /// The last step of a rendezvous, and the first in which every rank hears from every other.
    pub(crate) fn confirm(&mut self, deadline: Deadline) -> Result<()> {
        self.exchange(Step::Confirm, &[], None, Some(deadline)).map(drop)
    }

    pub(crate) fn replace_probe(&mut self, probe: Probe) {
        self.probe = probe;
    }

    pub(crate) fn probe(&self) -> &Probe {
        &self.probe
    }

    /// Fails on every rank unless all of them bring the same `value` of `what`, naming the first two that differ.
    pub(crate) fn agree_on_value(&mut self, step: Step, what: &str, value: &str) -> Result<()> {
        let values = self.gather(step, value.as_bytes())?;
        let text = |rank: usize| String::from_utf8_lossy(&values[rank]).into_owned();
        match values.iter().position(|value| *value != values[0]) {
            Some(rank) => Err(Error::disagreement(what, (0, text(0)), (rank, text(rank)))),
            None => Ok(()),
        }
    }

    /// Whether all ranks are certainly on one node, where descriptors can be passed; the same on all of them.
    #[must_use]
    pub fn one_node(&self) -> bool {
        self.one_node
    }

    /// Gathers a value of the same type from every rank.
    pub(crate) fn gather_values<T: Serialize + DeserializeOwned>(&mut self, step: Step, own: &T) -> Result<Vec<T>> {
        let own = serde_json::to_vec(own).expect("plain data has a JSON form");
        let parse = |(rank, value): (usize, Vec<u8>)| {
            serde_json::from_slice(&value).map_err(|_| unreadable(rank, step, "not a value of this step"))
        };
        self.gather(step, &own)?.into_iter().enumerate().map(parse).collect()
    }

    pub(crate) fn gather(&mut self, step: Step, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(self.exchange(step, own, None, None)?.into_iter().map(|part| part.bytes).collect())
    }

    fn exchange(
        &mut self,
        step: Step,
        own: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        deadline: Option<Deadline>,
    ) -> Result<Vec<Part>> {
        if let Err(source) = self.probe.before(step) {
            return self.give_up(Error::Os { rank: self.rank, step, source });
        }
        let deadline = deadline.unwrap_or_else(|| Deadline::after(self.limit));
        let alone = |bytes| Part { bytes, descriptor: None };
        let gathered = match &mut self.link {
            Link::Alone => Ok(vec![alone(own.to_vec())]),
            Link::Mesh(mesh) => mesh.gather(step, own, descriptor, deadline),
            Link::Store(link) => link.gather(step, own, deadline).map(|parts| parts.into_iter().map(alone).collect()),
            Link::Failed(fault) => return Err(fault.clone()),
        };
        gathered.or_else(|fault| self.give_up(fault))
    }

    /// Ends the group: all ranks that can still hear it are told why.
    fn give_up<T>(&mut self, fault: Error) -> Result<T> {
        match &self.link {
            Link::Alone => {}
            Link::Mesh(mesh) => mesh.tell(&fault),
            Link::Store(link) => link.tell(&fault),
            Link::Failed(first) => return Err(first.clone()),
        }
        self.link = Link::Failed(fault.clone());
        Err(fault)
    }
}
