//! The embedded kernels, loaded into a context.

use std::ffi::{CStr, CString, c_void};

use crate::driver;
use crate::error::DriverError;
use crate::kernels;
use crate::sys;

/// What is embedded.
const MODULES: [kernels::Ptx; 4] = [kernels::HASH, kernels::ROWS, kernels::FLOATS, kernels::STAGE];

/// Every kernel of this crate, compiled for the device and resolved.
pub(crate) struct Kernels {
    modules: Vec<sys::CUmodule>,
    functions: Vec<(&'static str, sys::CUfunction)>,
}

impl Kernels {
    /// Loads and resolves all of them now: a first launch would otherwise load its kernel lazily, and could stall behind one that spins.
    pub(crate) fn load((major, _): (i32, i32)) -> Result<Self, DriverError> {
        let mut kernels = Self { modules: Vec::new(), functions: Vec::new() };
        for ptx in MODULES {
            if let Err(error) = kernels.add(ptx, major) {
                kernels.unload();
                return Err(error);
            }
        }
        Ok(kernels)
    }

    fn add(&mut self, ptx: kernels::Ptx, major: i32) -> Result<(), DriverError> {
        let text = CStr::from_bytes_with_nul(ptx.text(major).as_bytes()).expect("embedded PTX ends with its only NUL");
        // SAFETY: the caller has made a context current, and the text is PTX.
        let module = unsafe { driver::load_module(text) }?;
        self.modules.push(module);
        for &name in ptx.entries {
            let symbol = CString::new(name).expect("entry names have no NUL");
            // SAFETY: the module is live.
            let function = unsafe { driver::function(module, &symbol) }?;
            // SAFETY: the function is live.
            unsafe { driver::load_function(function) }?;
            self.functions.push((name, function));
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
        let function = self.functions.iter().find(|(entry, _)| *entry == name);
        let &(_, function) = function.expect("every entry that is launched is embedded");
        let mut params = [(&raw const *param).cast_mut().cast::<c_void>()];
        // SAFETY: one parameter of the right type, by the caller's promise; the driver copies it during the call.
        unsafe { driver::launch(name, function, grid, block, stream, &mut params) }
    }

    /// Unloads everything. The context is current.
    pub(crate) fn unload(self) {
        for module in self.modules {
            // SAFETY: the module is this value's own, and its functions go with it.
            let _ = unsafe { driver::unload_module(module) };
        }
    }
}
