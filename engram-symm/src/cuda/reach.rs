use engram_cuda::Device;

use crate::access::{self, Peer, Reach, Refusal};
use crate::{Error, Group, PeerAccess, Result, Step};

/// A GPU as a rank's memory, and which others it reaches.
#[derive(Debug, Clone)]
pub struct DeviceReach {
    device: Device,
    uuid: [u8; 16],
    descriptors: bool,
    fabric: bool,
}

impl DeviceReach {
    /// Asks the driver who the device is, and tries out in which ways its memory can be shared. `rank` is whose device it is.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(rank: usize, device: &Device) -> Result<Self> {
        let ask = || {
            Ok(Self {
                device: device.clone(),
                uuid: device.uuid()?,
                descriptors: device.shares_by_descriptor()?,
                fabric: device.shares_by_fabric()?,
            })
        };
        ask().map_err(|error| Error::cuda(rank, Step::PeerAccess.to_string(), &error))
    }

    /// Whether the device can map the memory of that one.
    fn maps(&self, peer: [u8; 16]) -> Result<bool, Refusal> {
        let refusal = |error: engram_cuda::Error| match error {
            engram_cuda::Error::Driver(error) => Refusal::Driver(error.code.0),
            _ => Refusal::NoPath,
        };
        let ordinal = Device::find(peer).map_err(refusal)?.ok_or(Refusal::NotVisible)?;
        self.device.can_access_peer(ordinal).map_err(refusal)
    }
}

impl Reach for DeviceReach {
    fn device(&self) -> access::Device {
        access::Device::Gpu { uuid: self.uuid, descriptors: self.descriptors, fabric: self.fabric }
    }

    fn reaches(&self, peer: &Peer) -> Result<(), Refusal> {
        let reached = match peer.same_node {
            true if peer.uuid == self.uuid => true,
            true => self.maps(peer.uuid)?,
            // No process sees devices of other nodes, and all that leads there is the fabric.
            false => self.fabric,
        };
        if reached { Ok(()) } else { Err(Refusal::NoPath) }
    }
}

/// Decides which memory the ranks of a group, each with a GPU, use between them: [`Group::peer_access`] of a [`DeviceReach`]. Collective; small
/// allocations are tried out, and none stays.
///
/// # Errors
/// [`Error::Cuda`] on all ranks, when one's driver fails. Else as [`Group::peer_access`].
pub fn peer_access(group: &mut Group, device: &Device) -> Result<PeerAccess> {
    let reach = DeviceReach::new(group.rank(), device);
    let reach = group.agree(Step::PeerAccess, reach)?;
    group.peer_access(&reach)
}

/// The first two ranks, if there are such, between whose devices the driver knows no native atomics: what NVLink has and PCIe has not. Collective.
///
/// # Errors
/// [`Error::Cuda`] on all ranks, when one's driver fails.
pub(super) fn path_without_atomics(group: &mut Group, device: &Device) -> Result<Option<(usize, usize)>> {
    let (rank, step) = (group.rank(), Step::PeerAccess);
    let cuda = |error: engram_cuda::Error| Error::cuda(rank, step.to_string(), &error);
    let uuid = group.agree(step, device.uuid().map_err(cuda))?;
    let uuids: Vec<[u8; 16]> = group.gather_values(step, &uuid)?;
    let first_without = || {
        for (peer, &uuid) in uuids.iter().enumerate() {
            // Devices that the process does not see are on other nodes, and what leads there, the fabric, is NVLink.
            if let Some(ordinal) = Device::find(uuid)?
                && !device.has_native_atomics(ordinal)?
            {
                return Ok(Some(peer));
            }
        }
        Ok(None)
    };
    let own: Option<usize> = group.agree(step, first_without().map_err(cuda))?;
    let all = group.gather_values(step, &own)?;
    Ok(all.into_iter().enumerate().find_map(|(rank, peer)| Some((rank, peer?))))
}
