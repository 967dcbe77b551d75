use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::room;
use crate::bootstrap::{Group, Probe};
use crate::error::{Error, OsError, Result, Step};
use crate::memory::{ALIGN, Memory};

/// Host memory that all ranks of a group have mapped: a segment a rank.
///
/// Each segment is an anonymous file (`memfd`): it has no name in any file system and is gone with its last user,
/// however that one ends. Its size is sealed before a peer sees it, and its pages are reserved before anyone touches
/// them, so that no access can fail later.
///
/// Dropping it unmaps this rank's views and does nothing else; peers keep theirs.
#[derive(Debug)]
pub struct HostMemory {
    rank: usize,
    /// Kept to give pages back and to reserve them again.
    own: OwnedFd,
    /// By rank, all of one length.
    views: Vec<View>,
}

impl HostMemory {
    /// Allocates `bytes`, rounded up to whole pieces of [`ALIGN`], on every rank of the group, all zero, and maps them
    /// all here. Collective.
    ///
    /// # Errors
    /// [`Error::Memory`] on every rank when one of them cannot allocate or map, naming it and the step; nothing stays
    /// allocated then, and the group stays usable. [`Error::Disagreement`] when ranks ask for different sizes,
    /// [`Error::AcrossNodes`] for a group that meets through a store. Else as [`Group::all_gather`].
    pub fn allocate(group: &mut Group, bytes: usize) -> Result<Self> {
        if !group.one_node() {
            return Err(Error::AcrossNodes { step: Step::Allocate });
        }
        group.agree_on_value(Step::Register, "the bytes of a segment", &bytes.to_string())?;
        let probe = group.probe().clone();
        let attempt = Attempt { rank: group.rank(), world: group.world(), bytes, probe: &probe };

        // All ask before the first of them takes: none may find too little for what the others have already taken.
        let len = group.agree(Step::Allocate, attempt.room())?;
        let (own, view) = group.agree(Step::Allocate, attempt.own_segment(len))?;
        let mut own_view = Some(view);
        // The descriptors of the peers are needed only until their segments are mapped.
        let views = group.share(own.as_fd())?.into_iter().enumerate().map(|(rank, peer)| {
            let own_view = own_view.take_if(|_| rank == attempt.rank);
            own_view.map_or_else(|| attempt.peer_segment(peer.as_fd(), len), Ok)
        });
        let views = group.agree(Step::Publish, views.collect())?;
        Ok(Self { rank: attempt.rank, own, views })
    }

    /// `range`, if it lies within a segment.
    fn within(&self, range: Range<usize>) -> Result<Range<usize>, Errno> {
        if range.start <= range.end && range.end <= self.bytes() { Ok(range) } else { Err(Errno::INVAL) }
    }
}

// SAFETY:
// * The views are mapped for as long as `self` lives, each `bytes()` long, and a mapping does not move.
// * Mappings start at a page boundary, and pages are of `ALIGN` bytes or a multiple of them.
// * View `r` maps the file that rank `r` created and passed to all others.
// * A `memfd` reads as zeros until it is written, and no rank writes before `allocate` has returned it its view.
unsafe impl Memory for HostMemory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.views.len()
    }

    fn bytes(&self) -> usize {
        self.views[self.rank].len
    }

    fn segment(&self, rank: usize) -> NonNull<u8> {
        self.views[rank].base
    }

    fn reserve(&self, range: Range<usize>) -> Result<()> {
        let attempt = Attempt { rank: self.rank, world: 1, bytes: range.len(), probe: &Probe::default() };
        attempt.step(Step::Room, || room::check(range.len(), 1))?;
        attempt.step(Step::Reserve, || reserve(&self.own, self.within(range)?))
    }

    fn discard(&self, range: Range<usize>) -> Result<()> {
        let attempt = Attempt { rank: self.rank, world: 1, bytes: range.len(), probe: &Probe::default() };
        attempt.step(Step::Discard, || {
            let (start, len) = (range.start as u64, range.len() as u64);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match self.within(range)?.is_empty() {
                true => Ok(()),
                false => rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.own, flags, start, len)),
            }
        })
    }
}

/// Reserves the pages of a segment in `range`, in pieces: a signal undoes the whole call that it interrupts, and a large
/// one would never end in a process with a fast timer.
fn reserve(file: &OwnedFd, range: Range<usize>) -> Result<(), Errno> {
    const PIECE: usize = 16 << 20;
    range.clone().step_by(PIECE).try_for_each(|start| {
        let (start, len) = (start as u64, PIECE.min(range.end - start) as u64);
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), start, len))
    })
}

/// A try to get one segment; every step can fail.
struct Attempt<'a> {
    rank: usize,
    world: usize,
    bytes: usize,
    probe: &'a Probe,
}

impl Attempt<'_> {
    fn step<T>(&self, step: Step, work: impl FnOnce() -> Result<T, Errno>) -> Result<T> {
        let outcome = self.probe.before(step).and_then(|()| work().map_err(OsError::of));
        outcome.map_err(|source| Error::Memory { rank: self.rank, step, bytes: self.bytes as u64, source })
    }

    /// The length of a segment, once there is room for those of all ranks: they are all on this node.
    fn room(&self) -> Result<usize> {
        self.step(Step::Room, || {
            let len = self.bytes.max(1).checked_next_multiple_of(ALIGN).ok_or(Errno::NOMEM)?;
            room::check(len, self.world)?;
            Ok(len)
        })
    }

    /// Creates this rank's segment. The size is sealed, so that no peer can pull memory away from under the others.
    fn own_segment(&self, len: usize) -> Result<(OwnedFd, View)> {
        let file = self.step(Step::Create, || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            match rustix::fs::memfd_create("engram-symm", flags | MemfdFlags::NOEXEC_SEAL) {
                // Linux before 6.3 does not know the flag, and has nothing that could be executed against.
                Err(Errno::INVAL) => rustix::fs::memfd_create("engram-symm", flags),
                created => created,
            }
        })?;
        self.step(Step::Size, || rustix::fs::ftruncate(&file, len as u64))?;
        self.step(Step::Seal, || rustix::fs::fcntl_add_seals(&file, SIZE_SEALS | SealFlags::SEAL))?;
        self.step(Step::Reserve, || reserve(&file, 0..len))?;
        let view = self.step(Step::Map, || View::map(file.as_fd(), len))?;
        Ok((file, view))
    }

    /// Maps a peer's segment, once it is certain that no access to it can fault.
    fn peer_segment(&self, file: BorrowedFd<'_>, len: usize) -> Result<View> {
        self.step(Step::MapPeers, || {
            let size = rustix::fs::fstat(file)?.st_size;
            let sealed = rustix::fs::fcntl_get_seals(file)?.contains(SIZE_SEALS);
            if !sealed || usize::try_from(size) != Ok(len) {
                return Err(Errno::INVAL);
            }
            View::map(file, len)
        })
    }
}

const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A mapping of a segment.
#[derive(Debug)]
struct View {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread, and a `View` itself never accesses the memory.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    fn map(file: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: with a null address and without `FIXED` the system picks a range that nothing else uses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, len })
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: `map` made exactly this mapping, and whoever took its address did so for at most the life of `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
