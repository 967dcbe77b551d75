use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use engram_cuda::raw::vmm::{HandleKind, Physical, Reserved};
use engram_cuda::{Device, RegisteredMemory, raw};

use crate::access::Handle;
use crate::bootstrap::Probe;
use crate::host::HostMemory;
use crate::memory::Memory;
use crate::{Error, Group, PeerAccess, Result, Step};

/// Memory of a group, mapped for the GPUs of all its ranks: a segment a rank, in two parts. Signals stay; data can be given back and taken again
/// under addresses that do not change.
///
/// It lies on the GPUs, or in host memory where these do not reach each other; kernels do the same with either. A peer's segment stays readable
/// and writable here when the peer's process ends. Dropping it waits for this rank's device and touches nothing but this process.
#[derive(Debug)]
pub struct Segments {
    rank: usize,
    device: Device,
    data_fill: u8,
    memory: Place,
}

#[derive(Debug)]
enum Place {
    Devices { handle: Handle, signals: Part, data: Part },
    Host(Host),
}

impl Segments {
    /// Allocates at least so many bytes of signals, all zero, and of data, all `data_fill`, for every rank of the group, and maps them all for this
    /// rank's device. `access` is what the group has decided ([`peer_access`](super::peer_access)). Collective.
    ///
    /// No rank has another's memory before it is filled.
    ///
    /// # Errors
    /// On every rank when one of them fails, naming it and the step: [`Error::Cuda`] for the driver's refusals, [`Error::Memory`] for the system's.
    /// Nothing stays allocated then, and the group stays usable. [`Error::Disagreement`] when ranks ask for different segments,
    /// [`Error::Invalid`] for ranks that have no memory in common, [`Error::AcrossNodes`] where it would be of one node and the group is not. Else as
    /// [`Group::all_gather`].
    pub fn allocate(
        group: &mut Group,
        device: &Device,
        access: PeerAccess,
        signal_bytes: usize,
        data_bytes: usize,
        data_fill: u8,
    ) -> Result<Self> {
        let wanted = format!("{signal_bytes} and {data_bytes} bytes of {data_fill:#04x} in {access}");
        group.agree_on_value(Step::Register, "the parts of a segment", &wanted)?;
        let memory = match access {
            PeerAccess::Direct(handle) => {
                if handle == Handle::Descriptor && !group.one_node() {
                    return Err(Error::AcrossNodes { step: Step::Allocate });
                }
                let [signals, data] = [signal_bytes, data_bytes].map(|bytes| Part::reserve(group, device, bytes));
                let (mut signals, mut data) =
                    group.agree(Step::Allocate, signals.and_then(|part| Ok((part, data?))))?;
                signals.provide(group, device, handle, 0)?;
                data.provide(group, device, handle, data_fill)?;
                Place::Devices { handle, signals, data }
            }
            PeerAccess::Host(_) => Place::Host(Host::allocate(group, device, [signal_bytes, data_bytes], data_fill)?),
            PeerAccess::None(reason) => {
                return Err(Error::Invalid {
                    what: "the ranks' peer access".to_owned(),
                    found: format!("none: {reason}"),
                    expected: "memory that all of them reach".to_owned(),
                });
            }
        };
        Ok(Self { rank: group.rank(), device: device.clone(), data_fill, memory })
    }

    /// Where this rank's kernels find the signals of `rank`.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn signals(&self, rank: usize) -> u64 {
        match &self.memory {
            Place::Devices { signals, .. } => signals.by_rank[rank].address(),
            Place::Host(host) => host.signals[rank].address(),
        }
    }

    /// Where this rank's kernels find the data of `rank`; nothing is there between [`discard`](Self::discard) and [`reserve`](Self::reserve).
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn data(&self, rank: usize) -> u64 {
        match &self.memory {
            Place::Devices { data, .. } => data.by_rank[rank].address(),
            Place::Host(host) => host.addresses[rank],
        }
    }

    /// Bytes of each rank's data: what was asked for, rounded up to whole pieces of the memory.
    #[must_use]
    pub fn data_bytes(&self) -> usize {
        match &self.memory {
            Place::Devices { data, .. } => data.by_rank[self.rank].bytes(),
            Place::Host(host) => host.data_range.len(),
        }
    }

    /// Takes the data of all ranks out of this rank's sight and gives its own back. The addresses stay reserved. Local; waits for the device, and
    /// no kernel of this rank's touches the data until [`reserve`](Self::reserve).
    ///
    /// # Errors
    /// [`Error::Cuda`] and [`Error::Memory`]; some of the memory is still there then.
    pub fn discard(&mut self) -> Result<()> {
        match &mut self.memory {
            Place::Devices { data, .. } => {
                let given_back = data.give_back();
                given_back.map_err(|error| Error::cuda(self.rank, Step::Discard.to_string(), &error))
            }
            Place::Host(host) => {
                let waited = self.device.synchronize();
                waited.map_err(|error| Error::cuda(self.rank, Step::Discard.to_string(), &error))?;
                host.discard()
            }
        }
    }

    /// Takes memory for the data of all ranks again, filled as at first, at the same addresses in all ranks. Collective, after every rank has
    /// called [`discard`](Self::discard).
    ///
    /// # Errors
    /// [`Error::Awake`] when a rank has not; else as [`allocate`](Self::allocate). The data is still discarded then, on all ranks that had discarded it.
    pub fn reserve(&mut self, group: &mut Group) -> Result<()> {
        let asleep = match &self.memory {
            Place::Devices { data, .. } => data.by_rank.iter().all(|addresses| !addresses.is_mapped()),
            Place::Host(host) => host.data.is_empty(),
        };
        group.agree(Step::Gather, if asleep { Ok(()) } else { Err(Error::Awake) })?;
        match &mut self.memory {
            Place::Devices { handle, data, .. } => data.provide(group, &self.device, *handle, self.data_fill),
            Place::Host(host) => host.reserve(group, &self.device, self.data_fill),
        }
    }
}

/// One rank's try to get memory; every step can fail.
struct Attempt {
    rank: usize,
    bytes: usize,
    probe: Probe,
}

impl Attempt {
    fn new(group: &Group, bytes: usize) -> Self {
        Self { rank: group.rank(), bytes, probe: group.probe().clone() }
    }

    fn step<T>(&self, step: Step, work: impl FnOnce() -> Result<T, engram_cuda::Error>) -> Result<T> {
        let Self { rank, bytes, .. } = *self;
        self.probe.before(step).map_err(|source| Error::Memory { rank, step, bytes: bytes as u64, source })?;
        work().map_err(|error| Error::cuda(rank, format!("{step} of {bytes} bytes"), &error))
    }
}

/// One part of the segments, in device memory: addresses for that of each rank, and memory in all of them or in none.
#[derive(Debug)]
struct Part {
    by_rank: Vec<Reserved>,
}

/// Memory as it is passed to other ranks.
enum Passed {
    Descriptor(OwnedFd),
    Fabric([u8; 64]),
}

impl Part {
    /// Local.
    fn reserve(group: &Group, device: &Device, bytes: usize) -> Result<Self> {
        let addresses = || (0..group.world()).map(|_| Reserved::new(device, bytes)).collect::<Result<_, _>>();
        Ok(Self { by_rank: Attempt::new(group, bytes).step(Step::Addresses, addresses)? })
    }

    /// Takes memory on all ranks, and maps it here. Collective; after an error there is none.
    fn provide(&mut self, group: &mut Group, device: &Device, handle: Handle, fill: u8) -> Result<()> {
        let provided = self.try_to_provide(group, device, handle, fill);
        if provided.is_err() {
            // The error that is told is the first one; memory that cannot even be unmapped is gone with its addresses.
            let _ = self.give_back();
        }
        provided
    }

    fn try_to_provide(&mut self, group: &mut Group, device: &Device, handle: Handle, fill: u8) -> Result<()> {
        let (rank, bytes) = (group.rank(), self.by_rank[group.rank()].bytes());
        let attempt = Attempt::new(group, bytes);
        let own = self.own(&attempt, device, (group.world() > 1).then_some(handle), fill);
        let passed = match group.agree(Step::Allocate, own)? {
            None => return Ok(()),
            Some(Passed::Descriptor(own)) => group.share(own.as_fd())?.into_iter().map(Passed::Descriptor).collect(),
            Some(Passed::Fabric(own)) => fabric_handles(group, &own)?,
        };
        let peers = self.by_rank.iter_mut().zip(passed).enumerate().filter(|(peer, _)| *peer != rank);
        // A descriptor is closed as soon as its memory is mapped.
        let mapped = peers.map(|(_, (addresses, passed))| {
            let memory = attempt.step(Step::Import, || match passed {
                Passed::Descriptor(descriptor) => Physical::from_descriptor(device, descriptor.as_fd(), bytes),
                Passed::Fabric(handle) => Physical::from_fabric(device, &handle, bytes),
            })?;
            attempt.step(Step::MapPeers, || addresses.map(&memory))
        });
        let mapped = mapped.collect::<Result<()>>();
        group.agree(Step::Publish, mapped)
    }

    /// Takes this rank's memory: filled, and only then exported for others, if there are any.
    fn own(&mut self, attempt: &Attempt, device: &Device, others: Option<Handle>, fill: u8) -> Result<Option<Passed>> {
        let addresses = &mut self.by_rank[attempt.rank];
        let kind = others.map(|handle| match handle {
            Handle::Descriptor => HandleKind::Descriptor,
            Handle::Fabric => HandleKind::Fabric,
        });
        let memory = attempt.step(Step::Create, || Physical::new(device, attempt.bytes, kind))?;
        attempt.step(Step::Map, || addresses.map(&memory))?;
        // SAFETY: the memory was just mapped there for this device, and nobody else has it yet.
        let filling = || unsafe { raw::fill(device, addresses.address(), fill, addresses.bytes()) };
        attempt.step(Step::Fill, filling)?;
        let export = |handle| match handle {
            Handle::Descriptor => memory.to_descriptor().map(Passed::Descriptor),
            Handle::Fabric => memory.to_fabric().map(Passed::Fabric),
        };
        others.map(|handle| attempt.step(Step::Export, || export(handle))).transpose()
    }

    /// Unmaps the memory of all ranks: their own they keep, and this rank's goes with its last mapping.
    fn give_back(&mut self) -> Result<(), engram_cuda::Error> {
        self.by_rank.iter_mut().try_for_each(Reserved::unmap)
    }
}

/// Passes a fabric handle to every other rank and returns theirs, by rank. Collective.
fn fabric_handles(group: &mut Group, own: &[u8; 64]) -> Result<Vec<Passed>> {
    let handles = group.gather(Step::Share, own)?.into_iter().enumerate().map(|(rank, handle)| {
        let unreadable =
            |_| Error::Unreadable { rank, step: Step::Share, found: "not the bytes of a fabric handle".to_owned() };
        handle.try_into().map(Passed::Fabric).map_err(unreadable)
    });
    let handles = handles.collect();
    // So that no rank waits for one that goes no further.
    group.agree(Step::Share, handles)
}

/// Both parts of the segments, in host memory that all ranks have mapped and each has registered with its driver.
#[derive(Debug)]
struct Host {
    signals: Vec<RegisteredMemory>,
    /// None while the data is discarded.
    data: Vec<RegisteredMemory>,
    /// Where the device sees the data of each rank.
    addresses: Vec<u64>,
    data_range: Range<usize>,
    /// After the registrations of it, which go first.
    memory: HostMemory,
}

impl Host {
    /// Parts begin at whole pages, of whatever size the system has them: a page is registered once.
    const PAGE: usize = 64 << 10;

    fn allocate(group: &mut Group, device: &Device, bytes: [usize; 2], data_fill: u8) -> Result<Self> {
        let parts = bytes.map(|bytes| bytes.max(1).checked_next_multiple_of(Self::PAGE));
        let ([Some(signals), Some(data)], Some(all)) =
            (parts, parts[0].and_then(|signals| signals.checked_add(parts[1]?)))
        else {
            return Err(Error::Invalid {
                what: "the parts of a segment".to_owned(),
                found: format!("{bytes:?} bytes"),
                expected: "sizes that can be addressed".to_owned(),
            });
        };
        let memory = HostMemory::allocate(group, all)?;
        let data_range = signals..signals + data;
        let attempt = Attempt::new(group, all);
        let own = fill(&attempt, &memory, &data_range, data_fill).and_then(|()| {
            Ok((pin(&attempt, device, &memory, &(0..signals))?, pin(&attempt, device, &memory, &data_range)?))
        });
        let (signals, data) = group.agree(Step::Publish, own)?;
        let addresses = data.iter().map(RegisteredMemory::address).collect();
        Ok(Self { signals, data, addresses, data_range, memory })
    }

    fn discard(&mut self) -> Result<()> {
        self.data.clear();
        self.memory.discard(self.data_range.clone())
    }

    fn reserve(&mut self, group: &mut Group, device: &Device, data_fill: u8) -> Result<()> {
        let attempt = Attempt::new(group, self.data_range.len());
        let own = attempt
            .step(Step::Reserve, || Ok(()))
            .and_then(|()| self.memory.reserve(self.data_range.clone()))
            .and_then(|()| fill(&attempt, &self.memory, &self.data_range, data_fill));
        // What a rank pins is what stays: all have taken their memory before any of them does.
        let reserved = group.agree(Step::Allocate, own).and_then(|()| {
            let pinned = pin(&attempt, device, &self.memory, &self.data_range).and_then(|data| self.in_place(data));
            group.agree(Step::Publish, pinned)
        });
        match reserved {
            Ok(data) => {
                self.data = data;
                Ok(())
            }
            Err(error) => {
                // The error that is told is the first one.
                let _ = self.discard();
                Err(error)
            }
        }
    }

    /// Refuses registrations at other addresses than before.
    fn in_place(&self, data: Vec<RegisteredMemory>) -> Result<Vec<RegisteredMemory>> {
        if data.iter().map(RegisteredMemory::address).eq(self.addresses.iter().copied()) {
            return Ok(data);
        }
        let reason = "the device sees the same memory at other addresses than before".to_owned();
        Err(Error::Cuda { rank: self.memory.rank(), doing: Step::Pin.to_string(), code: None, reason })
    }
}

/// Fills this rank's data.
fn fill(attempt: &Attempt, memory: &HostMemory, range: &Range<usize>, byte: u8) -> Result<()> {
    attempt.step(Step::Fill, || {
        // SAFETY: the range lies within the segment.
        let start = unsafe { memory.segment(attempt.rank).add(range.start) };
        // SAFETY: as above; no rank uses the data before all have filled theirs.
        unsafe { start.write_bytes(byte, range.len()) };
        Ok(())
    })
}

/// Registers a range of every segment with the device's driver.
fn pin(attempt: &Attempt, device: &Device, memory: &HostMemory, range: &Range<usize>) -> Result<Vec<RegisteredMemory>> {
    let register = |rank: usize| {
        // SAFETY: the range lies within the segment.
        let start = unsafe { memory.segment(rank).add(range.start) };
        // SAFETY: the segment is mapped as long as `memory` lives, and `Host` drops its registrations before.
        unsafe { RegisteredMemory::new(device, start, range.len()) }
    };
    attempt.step(Step::Pin, || (0..memory.world()).map(register).collect())
}
