//! Memory that kernels reach: on the device, pinned on the host, registered.

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::device::Device;
use crate::driver;
use crate::error::Error;
use crate::plan;
use crate::stream::StreamRef;

/// Types whose every bit pattern is a value and that have no padding: what travels between host and device.
///
/// # Safety
/// The implementor has no padding, no invalid bit patterns and no pointers.
pub unsafe trait Plain: Copy + 'static {}

macro_rules! plain {
    ($($ty:ty),*) => { $(
        // SAFETY: a primitive number.
        unsafe impl Plain for $ty {}
    )* };
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// Copies `values` to a device address, and waits until they are there.
///
/// # Safety
/// So many bytes from the address on are mapped for this device, which can write them; nobody else uses them meanwhile.
///
/// # Errors
/// [`Error::Driver`].
pub unsafe fn write<T: Plain>(device: &Device, address: u64, values: &[T]) -> Result<(), Error> {
    let _bound = device.bind()?;
    let stream = ptr::null_mut();
    // SAFETY: the caller vouches for the range, and the source outlives the copy, which is waited for.
    unsafe { driver::copy_to_device(address, values.as_ptr().cast(), size_of_val(values), stream) }?;
    // SAFETY: the legacy default stream of the current context.
    Ok(unsafe { driver::synchronize_stream(stream) }?)
}

/// Reads `count` values from a device address on, after all work of the legacy default stream.
///
/// # Safety
/// So many bytes from the address on are mapped for this device, and initialised.
///
/// # Errors
/// [`Error::Driver`].
pub unsafe fn read<T: Plain>(device: &Device, address: u64, count: usize) -> Result<Vec<T>, Error> {
    let mut values: Vec<T> = Vec::with_capacity(count);
    let _bound = device.bind()?;
    let stream = ptr::null_mut();
    // SAFETY: the caller vouches for the range, the vector has the capacity, and the copy is waited for.
    unsafe { driver::copy_to_host(values.as_mut_ptr().cast(), address, count * size_of::<T>(), stream) }?;
    // SAFETY: the legacy default stream of the current context.
    unsafe { driver::synchronize_stream(stream) }?;
    // SAFETY: `count` values were written, and any bits are a `T`.
    unsafe { values.set_len(count) };
    Ok(values)
}

/// Fills memory at a device address with one byte value, and waits until it is filled.
///
/// # Safety
/// As [`write()`].
///
/// # Errors
/// [`Error::Driver`].
pub unsafe fn fill(device: &Device, address: u64, byte: u8, bytes: usize) -> Result<(), Error> {
    let _bound = device.bind()?;
    let stream = ptr::null_mut();
    // SAFETY: the caller vouches for the range.
    unsafe { driver::fill(address, byte, bytes, stream) }?;
    // SAFETY: the legacy default stream of the current context.
    Ok(unsafe { driver::synchronize_stream(stream) }?)
}

/// Device memory, uninitialised when new; freed on drop, which waits for the device.
pub struct DeviceBuffer {
    device: Device,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates exactly `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Driver`], with `CUDA_ERROR_OUT_OF_MEMORY` when they are not there.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, Error> {
        let _bound = device.bind()?;
        // SAFETY: the context is current. The driver refuses 0 bytes, so an empty buffer owns one.
        let address = unsafe { driver::alloc(bytes.max(1)) }?;
        Ok(Self { device: device.clone(), address, bytes })
    }

    /// Allocates and fills a buffer, and waits until it is filled.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn from_slice<T: Plain>(device: &Device, values: &[T]) -> Result<Self, Error> {
        let buffer = Self::new(device, size_of_val(values))?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Copies `values` to byte `offset`, and waits until they are there.
    ///
    /// # Errors
    /// [`Error::TooSmall`]; [`Error::Driver`].
    pub fn write<T: Plain>(&self, offset: usize, values: &[T]) -> Result<(), Error> {
        let bytes = size_of_val(values);
        self.check(offset, bytes)?;
        // SAFETY: the range lies inside this buffer.
        unsafe { write(&self.device, self.address + offset as u64, values) }
    }

    /// Reads `count` values from byte `offset` on, after all work of the legacy default stream.
    ///
    /// # Errors
    /// [`Error::TooSmall`]; [`Error::Driver`].
    pub fn read<T: Plain>(&self, offset: usize, count: usize) -> Result<Vec<T>, Error> {
        let bytes = count.saturating_mul(size_of::<T>());
        self.check(offset, bytes)?;
        // SAFETY: the range lies inside this buffer.
        unsafe { read(&self.device, self.address + offset as u64, count) }
    }

    /// Enqueues a fill of the whole buffer with one byte value.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fill(&self, byte: u8, stream: StreamRef<'_>) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        let _bound = self.device.bind()?;
        // SAFETY: the buffer is live; dropping it waits for the device.
        Ok(unsafe { driver::fill(self.address, byte, self.bytes, stream.handle()) }?)
    }

    /// Enqueues a copy of another buffer of the same size into this one.
    ///
    /// # Errors
    /// [`Error::TooSmall`] for another size; [`Error::Driver`].
    pub fn copy_from(&self, from: &Self, stream: StreamRef<'_>) -> Result<(), Error> {
        if from.bytes != self.bytes {
            let (found, needed) = (self.bytes as u64, from.bytes as u64);
            return Err(Error::TooSmall { what: "the device buffer", found, needed });
        }
        if self.bytes == 0 {
            return Ok(());
        }
        let _bound = self.device.bind()?;
        // SAFETY: both buffers are live and as large; dropping one waits for the device.
        Ok(unsafe { driver::copy_on_device(self.address, from.address, self.bytes, stream.handle()) }?)
    }

    /// The device it lies on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its address in the device's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<(), Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::TooSmall {
                what: "the device buffer",
                found: self.bytes as u64,
                needed: (offset as u64).saturating_add(bytes as u64),
            }),
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({} bytes at {:#x} on device {})", self.bytes, self.address, self.device.ordinal())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the allocation is this value's own, and the driver waits for work that may still use it.
        self.device.release(|| unsafe { driver::free(self.address) });
    }
}

/// Anonymous memory of the host, of exactly the size asked for (rounded to a page), in huge pages where the system has them.
pub(crate) struct HostMemory {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone, and is reached through raw pointers under the rules of whoever holds it.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Pages that one thread faults in at a time.
    const TOUCH: u64 = 64 << 20;

    pub(crate) fn new(bytes: usize) -> Result<Self, Error> {
        let failed = |source: rustix::io::Errno| Error::HostMemory { bytes, source: source.into() };
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new anonymous mapping, at an address of the kernel's choice, overlaps nothing.
        let address = unsafe { mmap_anonymous(ptr::null_mut(), bytes.max(1), access, flags) }.map_err(failed)?;
        let address = NonNull::new(address.cast()).ok_or_else(|| failed(rustix::io::Errno::NOMEM))?;
        let memory = Self { address, bytes };
        // SAFETY: the range is this mapping. Advice only: without huge pages everything works, slower.
        let _ = unsafe { madvise(memory.as_ptr().cast(), bytes.max(1), Advice::LinuxHugepage) };
        memory.populate().map_err(failed)?;
        Ok(memory)
    }

    /// Faults all pages in now, on several threads: later faults would hit gathers, and registration alone would fault on one thread.
    fn populate(&self) -> Result<(), rustix::io::Errno> {
        let parts: Vec<_> = plan::chunks(self.bytes as u64, Self::TOUCH).collect();
        if parts.is_empty() {
            return Ok(());
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(parts.len());
        let per_thread = parts.len().div_ceil(threads);
        std::thread::scope(|scope| {
            let workers: Vec<_> = parts.chunks(per_thread).map(|parts| scope.spawn(|| self.touch(parts))).collect();
            workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Err(rustix::io::Errno::FAULT)))
        })
    }

    fn touch(&self, parts: &[std::ops::Range<u64>]) -> Result<(), rustix::io::Errno> {
        for part in parts {
            let (start, len) = (to_usize(part.start), to_usize(part.end - part.start));
            // SAFETY: the part lies inside the mapping.
            let at = unsafe { self.as_ptr().add(start) };
            // SAFETY: as above; the call only faults pages in.
            match unsafe { madvise(at.cast(), len, Advice::LinuxPopulateWrite) } {
                // Kernels before 5.14 lack the call: a write to every page does the same.
                Err(rustix::io::Errno::INVAL) => {
                    for offset in (0..len).step_by(4096) {
                        // SAFETY: inside the part, which no one else uses yet; fresh anonymous pages are zero, and stay so.
                        unsafe { at.wrapping_add(offset).write_volatile(0) };
                    }
                }
                result => result?,
            }
        }
        Ok(())
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives the pages back and keeps the addresses: the range reads as zeros until it is written again.
    pub(crate) fn give_back(&self) {
        // SAFETY: the range is this mapping, which nobody reads or writes now. Failure leaves the pages in place, which is no fault.
        let _ = unsafe { madvise(self.as_ptr().cast(), self.bytes.max(1), Advice::LinuxDontNeed) };
    }

    /// Takes pages again after [`HostMemory::give_back`].
    pub(crate) fn take_back(&self) -> Result<(), Error> {
        self.populate().map_err(|source| Error::HostMemory { bytes: self.bytes, source: source.into() })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and its last user is gone.
        let _ = unsafe { munmap(self.as_ptr().cast(), self.bytes.max(1)) };
    }
}

/// The driver's knowledge of a range of host memory, undone on drop.
struct Registration {
    device: Device,
    /// Registered pieces.
    parts: Vec<*mut c_void>,
    /// Where the device sees the first byte.
    address: u64,
}

// SAFETY: the pointers are names of registrations, never read through.
unsafe impl Send for Registration {}
// SAFETY: as for `Send`.
unsafe impl Sync for Registration {}

impl Registration {
    /// One call of the driver is refused from 512 GiB on, whatever is free.
    const LARGEST: u64 = 128 << 30;

    /// # Safety
    /// The range is mapped and stays so until the result is dropped.
    unsafe fn new(device: &Device, start: *mut u8, bytes: usize) -> Result<Self, Error> {
        if !device.reads_host_memory()? {
            return Err(Error::Unsupported {
                ordinal: device.ordinal(),
                missing: "cannot read host memory through unified addresses",
            });
        }
        let _bound = device.bind()?;
        let parts = plan::all_or_nothing(
            plan::chunks(bytes.max(1) as u64, Self::LARGEST).map(|part| {
                (start.wrapping_add(to_usize(part.start)).cast::<c_void>(), to_usize(part.end - part.start))
            }),
            // SAFETY: the caller keeps the range mapped; the part lies inside it.
            |&(at, len)| unsafe { driver::register_host(at, len) },
            |&(at, _)| {
                // SAFETY: this part was registered above.
                let _ = unsafe { driver::unregister_host(at) };
            },
        )?;
        // From here on drop unregisters.
        let mut registration =
            Self { device: device.clone(), parts: parts.iter().map(|&(at, _)| at).collect(), address: 0 };
        let mut expected = None;
        for &(at, len) in &parts {
            // SAFETY: the part is registered and mapped into the device's address space.
            let address = unsafe { driver::host_device_address(at) }?;
            if *expected.get_or_insert(address) != address {
                return Err(Error::Unsupported {
                    ordinal: device.ordinal(),
                    missing: "sees pieces of registered host memory at addresses that do not continue each other",
                });
            }
            if registration.address == 0 {
                registration.address = address;
            }
            expected = Some(address + len as u64);
        }
        Ok(registration)
    }
}

impl Registration {
    /// Unregisters all pieces, and tells whether the driver has let go of them.
    fn undo(&mut self) -> bool {
        let mut undone = true;
        let parts = std::mem::take(&mut self.parts);
        if parts.is_empty() {
            return true;
        }
        let released = self.device.release(|| {
            for part in parts {
                // The driver waits for kernels that read the range, as it does when device memory is freed.
                // SAFETY: the part was registered by the constructor and not undone since.
                undone &= unsafe { driver::unregister_host(part) }.is_ok();
            }
            Ok(())
        });
        released && undone
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.undo();
    }
}

/// Pinned host memory of exactly the size asked for, in huge pages where the system has them; kernels read it at [`PinnedBuffer::address`].
pub struct PinnedBuffer {
    registration: Registration,
    memory: ManuallyDrop<HostMemory>,
}

impl PinnedBuffer {
    /// Allocates, faults in and registers `bytes` bytes, zeroed.
    ///
    /// # Errors
    /// [`Error::HostMemory`] where the system has no memory; [`Error::Unsupported`] where the device cannot read host memory;
    /// [`Error::Driver`] when registration fails. A failure leaves nothing behind.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, Error> {
        let memory = HostMemory::new(bytes)?;
        // SAFETY: the memory lives as long as this value, and is dropped after the registration.
        let registration = unsafe { Registration::new(device, memory.as_ptr(), bytes) }?;
        Ok(Self { registration, memory: ManuallyDrop::new(memory) })
    }

    /// Where the device sees it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.registration.address
    }

    /// Where the host sees it. The device may write it at any time, so no reference to it is ever formed.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Copies `values` to byte `offset`.
    ///
    /// # Errors
    /// [`Error::TooSmall`].
    pub fn write<T: Plain>(&self, offset: usize, values: &[T]) -> Result<(), Error> {
        let bytes = size_of_val(values);
        self.check(offset, bytes)?;
        // SAFETY: the range was checked.
        let at = unsafe { self.as_ptr().add(offset) };
        // SAFETY: both ranges are valid, and a fresh slice of the caller's cannot overlap this mapping.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), at, bytes) };
        Ok(())
    }

    /// Copies `count` values out from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::TooSmall`].
    pub fn read<T: Plain>(&self, offset: usize, count: usize) -> Result<Vec<T>, Error> {
        let bytes = count.saturating_mul(size_of::<T>());
        self.check(offset, bytes)?;
        let mut values: Vec<T> = Vec::with_capacity(count);
        // SAFETY: the range was checked.
        let at = unsafe { self.as_ptr().add(offset) };
        // SAFETY: as above; the vector has the capacity.
        unsafe { ptr::copy_nonoverlapping(at, values.as_mut_ptr().cast::<u8>(), bytes) };
        // SAFETY: `count` values were written, and any bits are a `T`.
        unsafe { values.set_len(count) };
        Ok(values)
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<(), Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes() => Ok(()),
            _ => Err(Error::TooSmall {
                what: "the pinned buffer",
                found: self.bytes() as u64,
                needed: (offset as u64).saturating_add(bytes as u64),
            }),
        }
    }

    /// Gives the pages back to the system and keeps the addresses.
    pub(crate) fn give_back(&mut self) {
        if self.registration.undo() {
            self.memory.give_back();
        }
    }

    /// Takes pages again after [`PinnedBuffer::give_back`], at the same addresses.
    pub(crate) fn take_back(&mut self) -> Result<(), Error> {
        // A wake that failed half way may have registered it already.
        self.registration.undo();
        self.memory.take_back()?;
        // SAFETY: as in `new`.
        let registration =
            unsafe { Registration::new(&self.registration.device, self.memory.as_ptr(), self.memory.bytes()) }?;
        self.registration = registration;
        Ok(())
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // Memory that the driver still knows must not be mapped anew for somebody else: it is kept instead.
        if self.registration.undo() {
            // SAFETY: the value is not used again.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({} bytes at {:#x})", self.bytes(), self.address())
    }
}

/// Host memory of the caller's, registered with the driver: all of it or nothing.
///
/// Registration goes in pieces below the driver's limit for one call. When a piece fails, the earlier ones are undone, and the error is
/// returned and nowhere else visible.
pub struct RegisteredMemory {
    registration: Registration,
    bytes: usize,
}

impl RegisteredMemory {
    /// Registers `bytes` bytes from `start` on.
    ///
    /// # Safety
    /// The range is mapped, readable and writable, and stays so until the result is dropped.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device cannot read host memory; [`Error::Driver`] when the system refuses the range.
    pub unsafe fn new(device: &Device, start: NonNull<u8>, bytes: usize) -> Result<Self, Error> {
        // SAFETY: the caller's promise.
        let registration = unsafe { Registration::new(device, start.as_ptr(), bytes) }?;
        Ok(Self { registration, bytes })
    }

    /// Where the device sees the first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.registration.address
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for RegisteredMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegisteredMemory({} bytes at {:#x})", self.bytes, self.address())
    }
}

/// Sizes and offsets on the one platform that CUDA servers have.
pub(crate) fn to_usize(value: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    #[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits, as asserted")]
    {
        value as usize
    }
}
