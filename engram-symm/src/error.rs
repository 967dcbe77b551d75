//! What can go wrong, for every part of the crate.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use engram_ple::SourceError;
use serde::{Deserialize, Serialize};

use crate::protocol::Fault;

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
///
/// Plain data: a rank that fails tells the others, so that one fault gives the same error on every rank of the group.
/// Ranks are numbered within the group, `0..world`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Error {
    /// A variable of the launcher is absent or does not say what it must.
    #[error("{variable} is {}, expected {expected}", found.as_deref().unwrap_or("not set"))]
    Launch {
        /// The environment variable.
        variable: String,
        /// Its value, if it is set.
        found: Option<String>,
        /// What it should be.
        expected: String,
    },

    /// An argument cannot be used.
    #[error("{what} is {found}, expected {expected}")]
    Invalid {
        /// The argument.
        what: String,
        /// What was given.
        found: String,
        /// What it should be.
        expected: String,
    },

    /// The deadline passed while ranks had not come to a step; `ranks` are exactly the ones that had not.
    #[error("ranks {ranks:?} are missing after {waited:?} of {step}")]
    Missing {
        /// The step that every rank must come to.
        step: Step,
        /// How long this rank waited.
        waited: Duration,
        /// The ranks that had not come, ascending.
        ranks: Vec<usize>,
    },

    /// A rank closed its connection or died.
    #[error("rank {rank} went away during {step}")]
    Lost {
        /// The rank that is gone.
        rank: usize,
        /// What the others were doing.
        step: Step,
    },

    /// Two processes say that they are the same rank.
    #[error("two processes say that they are rank {rank}")]
    DuplicateRank {
        /// The rank that came twice.
        rank: usize,
    },

    /// Two ranks contradict each other.
    #[error("ranks disagree on {what}: rank {rank} says {value}, rank {other} says {other_value}")]
    Disagreement {
        /// What they disagree on.
        what: String,
        /// One rank, the lower one.
        rank: usize,
        /// What it says.
        value: String,
        /// The other rank.
        other: usize,
        /// What that one says.
        other_value: String,
    },

    /// A rank did not get memory for the group.
    #[error("rank {rank}: {bytes} bytes of shared memory: {step}")]
    Memory {
        /// The rank that failed.
        rank: usize,
        /// What was tried.
        step: Step,
        /// Bytes of the segment.
        bytes: u64,
        /// The system's reason.
        source: OsError,
    },

    /// The driver of a rank's GPU refused something.
    #[error("rank {rank}: {doing}: {reason}")]
    Cuda {
        /// The rank that failed.
        rank: usize,
        /// What was tried.
        doing: String,
        /// The driver's result code, if it was the driver that refused.
        code: Option<i32>,
        /// The reason, as text.
        reason: String,
    },

    /// The system refused an operation of the bootstrap.
    #[error("rank {rank}: {step}")]
    Os {
        /// The rank that failed.
        rank: usize,
        /// What was tried.
        step: Step,
        /// The system's reason.
        source: OsError,
    },

    /// The socket of this group's name belongs to another user.
    #[error("the group's socket belongs to user {found}, expected {expected}")]
    ForeignPeer {
        /// This process's effective user id.
        expected: u32,
        /// The owner of the socket.
        found: u32,
    },

    /// A rank sent what this version of the crate cannot read.
    #[error("rank {rank} sent an unreadable message during {step}: {found}")]
    Unreadable {
        /// Who sent it.
        rank: usize,
        /// What was going on.
        step: Step,
        /// What is wrong with it.
        found: String,
    },

    /// The store between nodes failed.
    #[error("rank {rank}: {step}: store key {key}: {reason}")]
    Store {
        /// The rank whose access failed.
        rank: usize,
        /// What was going on.
        step: Step,
        /// The key that was read or written.
        key: String,
        /// The store's reason.
        reason: String,
    },

    /// The group has failed, on all of its ranks.
    #[error("the group has failed")]
    Fault(
        /// Why.
        #[from]
        #[source]
        Fault,
    ),

    /// This rank's table could not be read, by which its group has failed.
    #[error("the table of layer {layer} could not be read")]
    // Never sent: the others learn of it by a fault.
    #[serde(skip)]
    Table {
        /// Index of the layer in the exchange.
        layer: usize,
        /// The table's reason.
        source: TableError,
    },

    /// The exchange sleeps.
    #[error("the exchange is asleep")]
    Asleep,

    /// The exchange does not sleep.
    #[error("the exchange is awake")]
    Awake,

    /// A call that allocates or waits, inside a stream capture, which forbids both.
    #[error("rank {rank}: {what} cannot run while a stream is being captured: {remedy}")]
    Capturing {
        /// The rank that called it.
        rank: usize,
        /// The call.
        what: String,
        /// What to do instead.
        remedy: String,
    },

    /// Calls of a prefetcher in an order that cannot work.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    // Never sent: it concerns this rank alone.
    #[serde(skip)]
    Prefetch(#[from] engram_cuda::PrefetchError),

    /// Ranks that meet through a store cannot pass descriptors: they may be on different nodes.
    #[error("{step} needs a group within one node, this one meets through a store")]
    AcrossNodes {
        /// What was asked.
        step: Step,
    },
}

/// A step of creating, using or closing a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Step {
    /// Finding the other ranks: binding the group's socket or connecting to it.
    Find,
    /// Waiting until every rank has come.
    Meet,
    /// Connecting every rank with every other.
    Connect,
    /// Confirming that all connections stand.
    Confirm,
    /// Comparing the registered buffers.
    Register,
    /// Deciding whether peers reach each other's memory.
    PeerAccess,
    /// Asking whether there is room for a segment.
    Room,
    /// Reserving addresses for the segments on a GPU.
    Addresses,
    /// Creating a segment.
    Create,
    /// Giving a segment its size.
    Size,
    /// Sealing the size.
    Seal,
    /// Reserving the pages.
    Reserve,
    /// Mapping the own segment.
    Map,
    /// Giving the own segment its first contents.
    Fill,
    /// Exporting the own segment for other ranks.
    Export,
    /// Agreeing that every rank has its segment.
    Allocate,
    /// Passing descriptors.
    Share,
    /// Taking a segment that another rank has exported.
    Import,
    /// Mapping the segments of the peers.
    MapPeers,
    /// Registering segments in host memory with a GPU's driver.
    Pin,
    /// Agreeing that every rank has mapped all segments.
    Publish,
    /// Giving pages back to the system.
    Discard,
    /// A collective step of the caller's.
    Gather,
    /// Leaving the group together.
    Close,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Find => "finding the group's socket",
            Self::Meet => "rendezvous",
            Self::Connect => "connecting the ranks",
            Self::Confirm => "confirming the connections",
            Self::Register => "comparing the registered buffers",
            Self::PeerAccess => "deciding on peer access",
            Self::Room => "asking for room",
            Self::Addresses => "reserving addresses for the segments",
            Self::Create => "creating the segment",
            Self::Size => "sizing the segment",
            Self::Seal => "sealing the segment",
            Self::Reserve => "reserving the segment's pages",
            Self::Map => "mapping the segment",
            Self::Fill => "filling the segment",
            Self::Export => "exporting the segment",
            Self::Allocate => "agreeing on the allocation",
            Self::Share => "passing descriptors",
            Self::Import => "importing a peer's segment",
            Self::MapPeers => "mapping the peers' segments",
            Self::Pin => "registering the segments with the driver",
            Self::Publish => "agreeing on the mappings",
            Self::Discard => "giving pages back",
            Self::Gather => "a collective step",
            Self::Close => "closing the group",
        })
    }
}

/// A reason of the operating system: an `errno` value, kept whatever it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OsError(pub i32);

impl std::error::Error for OsError {}

impl fmt::Display for OsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl fmt::Debug for OsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OsError({self})")
    }
}

impl OsError {
    pub(crate) fn of(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }

    pub(crate) fn from_io(error: &std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()))
    }
}

/// A table's reason for not being read.
#[derive(Debug, Clone)]
pub struct TableError(Arc<SourceError>);

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for TableError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// Equal if it is the same failure.
impl PartialEq for TableError {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for TableError {}

impl Error {
    pub(crate) fn table(layer: usize, source: SourceError) -> Self {
        Self::Table { layer, source: TableError(Arc::new(source)) }
    }

    /// A disagreement, the lower rank first, so that both sides say the same.
    pub(crate) fn disagreement(what: impl Into<String>, a: (usize, String), b: (usize, String)) -> Self {
        let (low, high) = if a.0 <= b.0 { (a, b) } else { (b, a) };
        Self::Disagreement { what: what.into(), rank: low.0, value: low.1, other: high.0, other_value: high.1 }
    }

    /// A contribution to a collective step that is too long.
    pub(crate) fn too_long(rank: usize, step: Step, bytes: usize, most: usize) -> Self {
        Self::Invalid {
            what: format!("the contribution of rank {rank} to {step}"),
            found: format!("{bytes} bytes"),
            expected: format!("at most {most}"),
        }
    }
}
