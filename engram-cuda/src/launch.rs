//! Kernels, loaded into a context.

use std::ffi::{CStr, CString, c_void};

use std::fmt;

use crate::device::Device;
use crate::driver::{self, EarlyLaunch};
use crate::error::{DriverError, Error};
use crate::kernels::Ptx;
use crate::stream::StreamRef;
use crate::sys;

/// All kernels of some PTX texts, compiled for the device and resolved.
pub(crate) struct Kernels {
    modules: Vec<sys::CUmodule>,
    functions: Vec<Function>,
}

/// An entry.
struct Function {
    name: &'static str,
    handle: sys::CUfunction,
    /// Of a kernel that starts early.
    early: Option<EarlyLaunch>,
}

// SAFETY: the driver lets any thread use modules and functions.
unsafe impl Send for Kernels {}
// SAFETY: as for `Send`.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads and resolves all of them now: a first launch would otherwise load its kernel lazily, and could stall behind one that spins.
    /// A context is current.
    pub(crate) fn load(texts: &[Ptx], (major, _): (i32, i32)) -> Result<Self, DriverError> {
        let mut kernels = Self { modules: Vec::new(), functions: Vec::new() };
        for ptx in texts {
            if let Err(error) = kernels.add(ptx, major) {
                kernels.unload();
                return Err(error);
            }
        }
        Ok(kernels)
    }

    fn add(&mut self, ptx: &Ptx, major: i32) -> Result<(), DriverError> {
        let text = CStr::from_bytes_until_nul(ptx.text(major).as_bytes()).expect("`Ptx::new` has seen the NUL");
        // SAFETY: the caller has made a context current, and the text is PTX.
        let module = unsafe { driver::load_module(text) }?;
        self.modules.push(module);
        let early = ptx.starts_early(major).then(EarlyLaunch::find).transpose()?;
        for &name in ptx.entries {
            let symbol = CString::new(name).expect("entry names have no NUL");
            // SAFETY: the module is live.
            let handle = unsafe { driver::function(module, &symbol) }?;
            // SAFETY: the function is live.
            unsafe { driver::load_function(handle) }?;
            self.functions.push(Function { name, handle, early });
        }
        Ok(())
    }

    /// Enqueues an entry with its one parameter, a struct by value.
    ///
    /// # Safety
    /// `P` is the entry's parameter struct, and its addresses are valid for what the entry does with them. The context is current.
    pub(crate) unsafe fn launch<P>(
        &self,
        name: &'static str,
        grid: [u32; 3],
        block: [u32; 3],
        stream: sys::CUstream,
        param: &P,
    ) -> Result<(), DriverError> {
        let function = self.functions.iter().find(|function| function.name == name);
        let function = function.expect("the text has an entry of this name");
        let mut params = [(&raw const *param).cast_mut().cast::<c_void>()];
        // SAFETY: one parameter of the right type, by the caller's promise; the driver copies it during the call. What starts early waits as
        // `Ptx::starting_early` says.
        unsafe { driver::launch(name, function.handle, function.early, [grid, block], stream, &mut params) }
    }

    /// Unloads everything. The context is current.
    pub(crate) fn unload(&mut self) {
        self.functions.clear();
        for module in self.modules.drain(..) {
            // SAFETY: the module is this value's own, and its functions go with it.
            let _ = unsafe { driver::unload_module(module) };
        }
    }
}

/// Kernels of another crate, compiled for a device and resolved. Dropping it unloads them.
pub struct Module {
    device: Device,
    kernels: Kernels,
}

impl Module {
    /// Compiles the text for the device, and loads and resolves all of its entries now, so that no launch does.
    ///
    /// # Errors
    /// [`Error::Driver`], for an entry that the text lacks too. A failure leaves nothing loaded.
    pub fn load(device: &Device, ptx: &Ptx) -> Result<Self, Error> {
        let _bound = device.bind()?;
        let kernels = Kernels::load(std::slice::from_ref(ptx), device.compute_capability())?;
        Ok(Self { device: device.clone(), kernels })
    }

    /// The device that it was compiled for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Enqueues an entry with its one parameter, a struct by value, and without dynamic shared memory.
    ///
    /// # Safety
    /// `P` is laid out as the entry's parameter, its addresses are valid for what the entry does with them, and the launch is one that the entry
    /// can have. The stream is of this device's primary context. Until the kernel is done, and as long as a graph that captured the launch can
    /// be launched, this module and all that the parameter names stay. Where [`Ptx::starts_early`], the entry waits as
    /// [`Ptx::starting_early`] says.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Panics
    /// When no entry has this name.
    pub unsafe fn launch<P>(
        &self,
        name: &'static str,
        grid: [u32; 3],
        block: [u32; 3],
        stream: StreamRef<'_>,
        param: &P,
    ) -> Result<(), Error> {
        let _bound = self.device.bind()?;
        // SAFETY: the caller's promises, and the context is current.
        Ok(unsafe { self.kernels.launch(name, grid, block, stream.handle(), param) }?)
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries: Vec<_> = self.kernels.functions.iter().map(|function| function.name).collect();
        f.debug_struct("Module").field("device", &self.device.ordinal()).field("entries", &entries).finish()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Self { device, kernels } = self;
        device.release(|| {
            kernels.unload();
            Ok(())
        });
    }
}
