//! Whether every rank reaches the memory of every other, decided together and before anything is allocated.

use std::fmt;
use std::fs;

use serde::{Deserialize, Serialize};

use super::group::Group;
use crate::error::{Error, Result, Step};

/// A rank's memory and what it reaches, as its backend knows it.
pub trait Reach {
    /// The memory that this rank would share.
    fn device(&self) -> Device;

    /// Asks whether this rank's device reaches the memory of another rank's.
    ///
    /// # Errors
    /// Why it does not.
    fn reaches(&self, peer: &Peer) -> Result<(), Refusal>;
}

/// The memory that a rank shares with the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Device {
    /// Memory of the host.
    Host,
    /// Memory of a GPU.
    Gpu {
        /// The device's UUID.
        uuid: [u8; 16],
        /// Its memory can be shared by descriptor.
        descriptors: bool,
        /// Its memory can be shared by fabric handle.
        fabric: bool,
    },
}

/// Another rank's GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The rank.
    pub rank: usize,
    /// Its device's UUID.
    pub uuid: [u8; 16],
    /// Whether it is on the same node as the one that asks.
    pub same_node: bool,
}

/// Why a device does not reach another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// The driver says that there is no path between them.
    NoPath,
    /// The caller does not want it.
    Disabled,
    /// The process does not see the other device.
    NotVisible,
    /// The driver failed with this code.
    Driver(i32),
}

/// What all ranks of a group use between them, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerAccess {
    /// Every rank maps every other rank's device memory.
    Direct(Handle),
    /// The ranks share host memory.
    Host(Reason),
    /// No memory is within reach of all ranks.
    None(Reason),
}

/// How device memory is passed between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handle {
    /// As a descriptor, within a node.
    Descriptor,
    /// As a fabric handle, between nodes too.
    Fabric,
}

/// Why ranks do not use each other's device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The backend has host memory only.
    HostBackend,
    /// A device does not reach another one; of several, the first in the order of ranks.
    Refused {
        /// Whose device it is.
        rank: usize,
        /// The rank whose device it does not reach.
        peer: usize,
        /// Why.
        refusal: Refusal,
    },
    /// A device's memory can be shared in no way that all others offer too.
    NoHandle {
        /// The first rank that lacks the way which this group needs.
        rank: usize,
    },
}

impl fmt::Display for PeerAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct(Handle::Descriptor) => f.write_str("device memory, shared by descriptor"),
            Self::Direct(Handle::Fabric) => f.write_str("device memory, shared by fabric handle"),
            Self::Host(reason) => write!(f, "host memory: {reason}"),
            Self::None(reason) => write!(f, "no common memory: {reason}"),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostBackend => f.write_str("the backend has no other"),
            Self::Refused { rank, peer, refusal } => {
                write!(f, "the device of rank {rank} does not reach the one of rank {peer}: {refusal}")
            }
            Self::NoHandle { rank } => write!(f, "the device of rank {rank} cannot share its memory with all others"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPath => f.write_str("there is no path between them"),
            Self::Disabled => f.write_str("disabled by the caller"),
            Self::NotVisible => f.write_str("the process does not see that one"),
            Self::Driver(code) => write!(f, "driver error {code}"),
        }
    }
}

/// The host backend's answer: all ranks of a node reach host memory.
#[derive(Debug, Clone, Copy)]
pub struct HostReach;

impl Reach for HostReach {
    fn device(&self) -> Device {
        Device::Host
    }

    fn reaches(&self, _: &Peer) -> Result<(), Refusal> {
        Ok(())
    }
}

/// What ranks tell each other before any of them asks its driver about the others.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Place {
    device: Device,
    /// The same on all processes of a node, in whatever containers they run.
    node: String,
}

impl Group {
    /// Decides whether every rank is to map every other rank's device memory, from what all ranks' backends say. All
    /// ranks get the same answer. Collective; nothing is allocated before or by it.
    ///
    /// # Errors
    /// [`Error::Disagreement`] on every rank when some of them share host memory and some device memory. Else as
    /// [`Group::all_gather`].
    pub fn peer_access(&mut self, reach: &dyn Reach) -> Result<PeerAccess> {
        let node = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let places: Vec<Place> = self.gather_values(Step::PeerAccess, &Place { device: reach.device(), node })?;
        let refusals: Vec<Option<Refusal>> = places
            .iter()
            .enumerate()
            .map(|(rank, place)| match place.device {
                Device::Gpu { uuid, .. } if rank != self.rank() => {
                    let same_node = place.node == places[self.rank()].node;
                    reach.reaches(&Peer { rank, uuid, same_node }).err()
                }
                _ => None,
            })
            .collect();
        let refusals: Vec<Vec<Option<Refusal>>> = self.gather_values(Step::PeerAccess, &refusals)?;
        let devices: Vec<Device> = places.iter().map(|place| place.device).collect();
        decide(&devices, &refusals, self.one_node())
    }
}

/// The decision, a pure function of what all ranks said.
fn decide(devices: &[Device], refusals: &[Vec<Option<Refusal>>], one_node: bool) -> Result<PeerAccess> {
    let otherwise = |reason| if one_node { PeerAccess::Host(reason) } else { PeerAccess::None(reason) };
    let kind = |device: &Device| match device {
        Device::Host => "host memory",
        Device::Gpu { .. } => "device memory",
    };
    if let Some(rank) = devices.iter().position(|device| kind(device) != kind(&devices[0])) {
        let say = |rank: usize| (rank, kind(&devices[rank]).to_owned());
        return Err(Error::disagreement("the memory to share", say(0), say(rank)));
    }
    if devices[0] == Device::Host {
        return Ok(otherwise(Reason::HostBackend));
    }
    let refused = refusals
        .iter()
        .enumerate()
        .find_map(|(rank, row)| row.iter().enumerate().find_map(|(peer, refusal)| Some((rank, peer, (*refusal)?))));
    if let Some((rank, peer, refusal)) = refused {
        return Ok(otherwise(Reason::Refused { rank, peer, refusal }));
    }
    // The first rank without a way, if there is one.
    let lacks = |handle| {
        devices.iter().position(|device| match (handle, device) {
            (Handle::Descriptor, Device::Gpu { descriptors, .. }) => !descriptors,
            (Handle::Fabric, Device::Gpu { fabric, .. }) => !fabric,
            (_, Device::Host) => true,
        })
    };
    Ok(match (one_node.then(|| lacks(Handle::Descriptor)), lacks(Handle::Fabric)) {
        (Some(None), _) => PeerAccess::Direct(Handle::Descriptor),
        (_, None) => PeerAccess::Direct(Handle::Fabric),
        (_, Some(rank)) => otherwise(Reason::NoHandle { rank }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn gpu(uuid: u8, descriptors: bool, fabric: bool) -> Device {
        Device::Gpu { uuid: [uuid; 16], descriptors, fabric }
    }

    fn none(world: usize) -> Vec<Vec<Option<Refusal>>> {
        vec![vec![None; world]; world]
    }

    #[test]
    fn descriptors_within_a_node_and_fabric_between_nodes() {
        let both = [gpu(0, true, true), gpu(1, true, true)];
        assert_eq!(decide(&both, &none(2), true), Ok(PeerAccess::Direct(Handle::Descriptor)));
        assert_eq!(decide(&both, &none(2), false), Ok(PeerAccess::Direct(Handle::Fabric)));
        let mixed = [gpu(0, true, true), gpu(1, false, true)];
        assert_eq!(decide(&mixed, &none(2), true), Ok(PeerAccess::Direct(Handle::Fabric)));
        let neither = [gpu(0, true, false), gpu(1, false, true)];
        assert_eq!(decide(&neither, &none(2), true), Ok(PeerAccess::Host(Reason::NoHandle { rank: 0 })));
        assert_eq!(decide(&neither, &none(2), false), Ok(PeerAccess::None(Reason::NoHandle { rank: 0 })));
    }

    #[test]
    fn one_refusal_decides_for_all() {
        let devices = [gpu(0, true, true), gpu(1, true, true), gpu(2, true, true)];
        let mut refusals = none(3);
        refusals[2][0] = Some(Refusal::Driver(201));
        let reason = Reason::Refused { rank: 2, peer: 0, refusal: Refusal::Driver(201) };
        assert_eq!(decide(&devices, &refusals, true), Ok(PeerAccess::Host(reason)));
        refusals[1][2] = Some(Refusal::NoPath);
        let reason = Reason::Refused { rank: 1, peer: 2, refusal: Refusal::NoPath };
        assert_eq!(decide(&devices, &refusals, true), Ok(PeerAccess::Host(reason)));
    }

    #[test]
    fn host_memory_is_for_all_or_none() {
        assert_eq!(decide(&[Device::Host; 2], &none(2), true), Ok(PeerAccess::Host(Reason::HostBackend)));
        assert_eq!(decide(&[Device::Host; 2], &none(2), false), Ok(PeerAccess::None(Reason::HostBackend)));
        let error = decide(&[Device::Host, gpu(1, true, true)], &none(2), true).unwrap_err();
        let expected = "ranks disagree on the memory to share: rank 0 says host memory, rank 1 says device memory";
        assert_eq!(error.to_string(), expected);
    }
}
