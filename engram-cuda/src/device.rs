//! A CUDA device, through its primary context.

use std::fmt;
use std::marker::PhantomData;
use std::os::raw::{c_int, c_uint};
use std::sync::Arc;

use crate::driver;
use crate::error::{DriverError, Error};
use crate::kernels;
use crate::launch::Kernels;
use crate::sys;
use crate::vmm::{HandleKind, Physical};

/// The kernels of this crate.
const EMBEDDED: [kernels::Ptx; 4] = [kernels::HASH, kernels::ROWS, kernels::FLOATS, kernels::STAGE];

/// A CUDA device with every kernel of this crate loaded.
///
/// It works in the device's primary context, which it shares with the CUDA runtime, and so with PyTorch and other frameworks of the process.
/// Clones are handles to the same device. Calls make the context current for their own duration and restore what was current before.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    ordinal: c_int,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    compute_capability: (c_int, c_int),
    multiprocessors: u32,
    kernels: Option<Kernels>,
}

// SAFETY: the driver's handles may be used from any thread (the driver locks inside), and the rest is immutable after construction.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`.
unsafe impl Sync for Inner {}

/// Device attributes that the bindings' closed enum may lack, as integers.
#[derive(Clone, Copy)]
pub(crate) enum Attribute {
    Multiprocessors = 16,
    CanMapHostMemory = 19,
    UnifiedAddressing = 41,
    MajorComputeCapability = 75,
    MinorComputeCapability = 76,
    VirtualMemory = 102,
    DescriptorHandles = 103,
    FabricHandles = 128,
}

impl Device {
    /// Opens the device with this ordinal, retains its primary context, and loads and resolves every kernel.
    ///
    /// # Errors
    /// [`Error::DriverTooOld`] below CUDA 12.4; [`Error::Unsupported`] below compute capability 8.0; [`Error::Driver`] without a driver or device.
    pub fn new(ordinal: u32) -> Result<Self, Error> {
        driver::init()?;
        driver::version()?.check()?;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let handle = driver::device(ordinal)?;
        let attribute = |attribute: Attribute| driver::device_attribute(attribute as c_int, handle);
        let compute_capability =
            (attribute(Attribute::MajorComputeCapability)?, attribute(Attribute::MinorComputeCapability)?);
        if compute_capability < (8, 0) {
            return Err(Error::Unsupported { ordinal, missing: "is older than compute capability 8.0" });
        }
        let multiprocessors = u32::try_from(attribute(Attribute::Multiprocessors)?).unwrap_or(1).max(1);
        let name = driver::device_name(handle)?;
        // SAFETY: `Inner` releases the context once, when its last user is gone.
        let context = unsafe { driver::retain_primary_context(handle) }?;
        // From here on an early return releases the context through `Inner`'s drop.
        let mut inner = Inner { ordinal, handle, context, name, compute_capability, multiprocessors, kernels: None };
        let kernels = {
            let _bound = Bound::new(inner.context)?;
            Kernels::load(&EMBEDDED, compute_capability)?
        };
        inner.kernels = Some(kernels);
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How many devices the driver shows to this process.
    ///
    /// # Errors
    /// [`Error::Driver`] when there is no driver.
    pub fn count() -> Result<u32, Error> {
        driver::init()?;
        Ok(u32::try_from(driver::device_count()?).unwrap_or(0))
    }

    /// The ordinal of the device with this UUID, if the driver shows it to this process.
    ///
    /// # Errors
    /// [`Error::Driver`] when there is no driver.
    pub fn find(uuid: [u8; 16]) -> Result<Option<u32>, Error> {
        for ordinal in 0..Self::count()? {
            let handle = driver::device(c_int::try_from(ordinal).unwrap_or(c_int::MAX))?;
            if driver::device_uuid(handle)? == uuid {
                return Ok(Some(ordinal));
            }
        }
        Ok(None)
    }

    /// The device's UUID, the same in all processes; of a slice of a device, the slice's.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn uuid(&self) -> Result<[u8; 16], Error> {
        Ok(driver::device_uuid(self.inner.handle)?)
    }

    /// Whether this device can map the memory of the one with that ordinal. Its own it can.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn can_access_peer(&self, ordinal: u32) -> Result<bool, Error> {
        let peer = driver::device(c_int::try_from(ordinal).unwrap_or(c_int::MAX))?;
        Ok(peer == self.inner.handle || driver::can_access_peer(self.inner.handle, peer)?)
    }

    /// Whether the path from this device to the one with that ordinal carries atomic operations, as NVLink does and PCIe does not. To itself it
    /// has them.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn has_native_atomics(&self, ordinal: u32) -> Result<bool, Error> {
        const NATIVE_ATOMICS: c_int = 3;
        let peer = driver::device(c_int::try_from(ordinal).unwrap_or(c_int::MAX))?;
        Ok(peer == self.inner.handle || driver::peer_attribute(NATIVE_ATOMICS, self.inner.handle, peer)? != 0)
    }

    /// Whether memory of this device can be shared with other processes by descriptor. Tried out with a small allocation.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn shares_by_descriptor(&self) -> Result<bool, Error> {
        let offered = self.attribute(Attribute::DescriptorHandles)? != 0;
        Ok(offered && self.try_out(HandleKind::Descriptor, |memory| memory.to_descriptor().map(drop)))
    }

    /// Whether memory of this device can be shared by fabric handle. Tried out with a small allocation: a device may offer them where the
    /// process may not have them.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn shares_by_fabric(&self) -> Result<bool, Error> {
        let offered = self.attribute(Attribute::FabricHandles)? != 0;
        Ok(offered && self.try_out(HandleKind::Fabric, |memory| memory.to_fabric().map(drop)))
    }

    /// Whether memory that is to be shared in this way can be allocated, and exported.
    fn try_out(&self, kind: HandleKind, export: impl FnOnce(&Physical) -> Result<(), Error>) -> bool {
        Physical::new(self, 1, Some(kind)).and_then(|memory| export(&memory)).is_ok()
    }

    /// The device's ordinal.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.inner.ordinal
    }

    /// The device's name, as the driver gives it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Compute capability, major and minor.
    #[must_use]
    pub fn compute_capability(&self) -> (i32, i32) {
        self.inner.compute_capability
    }

    /// Number of multiprocessors (SMs).
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.inner.multiprocessors
    }

    /// Free and total device memory, in bytes.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn memory(&self) -> Result<(u64, u64), Error> {
        let _bound = self.bind()?;
        // SAFETY: the context is current.
        let (free, total) = unsafe { driver::memory_info() }?;
        Ok((free as u64, total as u64))
    }

    /// Waits for all work of the device's primary context.
    ///
    /// # Errors
    /// [`Error::Driver`], with the error of any earlier work that failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _bound = self.bind()?;
        // SAFETY: the context is current.
        Ok(unsafe { driver::synchronize_context() }?)
    }

    pub(crate) fn attribute(&self, attribute: Attribute) -> Result<c_int, DriverError> {
        driver::device_attribute(attribute as c_int, self.inner.handle)
    }

    /// Whether kernels can read pinned host memory through unified addresses.
    pub(crate) fn reads_host_memory(&self) -> Result<bool, DriverError> {
        Ok(self.attribute(Attribute::UnifiedAddressing)? != 0 && self.attribute(Attribute::CanMapHostMemory)? != 0)
    }

    pub(crate) fn context(&self) -> sys::CUcontext {
        self.inner.context
    }

    pub(crate) fn handle(&self) -> sys::CUdevice {
        self.inner.handle
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        self.inner.kernels.as_ref().expect("a constructed device has its kernels")
    }

    /// Makes the context current until the guard goes.
    pub(crate) fn bind(&self) -> Result<Bound, DriverError> {
        Bound::new(self.inner.context)
    }

    /// Runs `release` in the device's context, and tells whether it went well. For destructors: a capture of the calling thread neither refuses
    /// the calls nor is broken by them.
    pub(crate) fn release(&self, release: impl FnOnce() -> Result<(), DriverError>) -> bool {
        let Ok(_bound) = self.bind() else { return false };
        let _relaxed = Relaxed::new();
        // A destructor has nobody to report to; after a device fault every call here fails, and the process must survive that.
        release().is_ok()
    }

    /// Refuses memory that is not this device's (or, where `host` allows it, host memory that the device can read); `what` names it in the error.
    ///
    /// # Errors
    /// [`Error::WrongDevice`]; [`Error::Driver`].
    pub fn check_home(&self, what: &'static str, address: u64, host: bool) -> Result<(), Error> {
        const HOST: c_uint = 1;
        const DEVICE: c_uint = 2;
        let _bound = self.bind()?;
        let wrong = |found: String| Error::WrongDevice { what, found, expected: self.inner.ordinal };
        // SAFETY: the driver checks the address.
        match unsafe { driver::pointer_home(address) } {
            Ok((DEVICE, ordinal)) if ordinal == self.inner.ordinal => Ok(()),
            Ok((DEVICE, ordinal)) => Err(wrong(format!("device {ordinal}"))),
            Ok((HOST, _)) if host => Ok(()),
            Ok((HOST, _)) => Err(wrong("the host".to_owned())),
            Ok((kind, _)) => Err(wrong(format!("memory of kind {kind}"))),
            Err(error) if error.code.0 == 1 => Err(wrong(format!("no device ({address:#x} is unknown to the driver)"))),
            Err(error) => Err(error.into()),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.inner.ordinal == other.inner.ordinal
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.inner.ordinal).field("name", &self.inner.name).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let (Some(mut kernels), Ok(_bound)) = (self.kernels.take(), Bound::new(self.context)) {
            let _relaxed = Relaxed::new();
            kernels.unload();
        }
        // SAFETY: the one release of the constructor's retain; all that was made in the context held an `Arc` of this and is gone.
        let _ = unsafe { driver::release_primary_context(self.handle) };
    }
}

/// Restores the thread's current context when dropped.
pub(crate) struct Bound {
    pushed: bool,
    /// Contexts are current per thread, so the guard must end on the thread it began on.
    _not_send: PhantomData<*const ()>,
}

impl Bound {
    fn new(context: sys::CUcontext) -> Result<Self, DriverError> {
        let pushed = driver::current_context()? != context;
        if pushed {
            // SAFETY: the caller holds the device, which keeps the context live.
            unsafe { driver::push_context(context) }?;
        }
        Ok(Self { pushed, _not_send: PhantomData })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.pushed {
            // SAFETY: this guard pushed the context on this thread.
            let _ = unsafe { driver::pop_context() };
        }
    }
}

/// Lets the thread make calls that a stream capture would otherwise refuse, because they are not part of what it records.
pub(crate) struct Relaxed {
    before: c_uint,
    _not_send: PhantomData<*const ()>,
}

impl Relaxed {
    pub(crate) fn new() -> Self {
        const RELAXED: c_uint = 2;
        let mut before = RELAXED;
        // SAFETY: the mode is a local; failure leaves the mode as it was, and swaps the same value back later.
        let _ = unsafe { driver::exchange_capture_mode(&mut before) };
        Self { before, _not_send: PhantomData }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `new`, on the same thread.
        let _ = unsafe { driver::exchange_capture_mode(&mut self.before) };
    }
}
