//! How ranks find each other, agree, and share descriptors.
//!
//! Ranks of one node meet at an abstract UNIX socket whose name follows from what the launcher told every process, the
//! group's key and a count of earlier groups of that key. Whoever comes first listens, the others connect; once all are
//! there, each pair of ranks gets a connection of its own and the socket is gone. From then on no rank is special: a
//! dead rank is noticed by all at once, and an expired deadline knows exactly who is missing.
//!
//! Peers are the processes of the same user (`SO_PEERCRED`); descriptors travel as `SCM_RIGHTS`, which needs no
//! ptrace rights.

pub mod access;
mod deadline;
mod group;
mod join;
mod launch;
mod mesh;
mod register;
mod rendezvous;
mod socket;
mod store;
mod tcp;

pub use access::PeerAccess;
pub use group::Group;
pub(crate) use group::Probe;
pub use join::Rendezvous;
pub use launch::Launch;
pub use register::Registration;
pub use store::{MemoryStore, Store};
pub use tcp::{TcpStore, TcpStoreServer};
