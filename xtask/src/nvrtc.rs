//! NVRTC, the CUDA C++ compiler as a library. It is loaded when kernels are compiled; nothing else here needs it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

type Program = *mut c_void;
/// `nvrtcResult`, 0 for success: any integer, whichever library answers it.
type Status = c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> Status;
type Copy = unsafe extern "C" fn(Program, *mut c_char) -> Status;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, symbol: *const c_char) -> *mut c_void;
    fn dlerror() -> *mut c_char;
}

const RTLD_NOW: c_int = 2;

/// The functions of a loaded library. It stays loaded until the process ends, so they stay valid.
pub(crate) struct Nvrtc {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    log: (Size, Copy),
    ptx: (Size, Copy),
    cubin: (Size, Copy),
}

/// Source text under the name that `#include` or a message gives it.
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) text: String,
}

impl Nvrtc {
    pub(crate) fn load(library: &Path) -> Result<Self> {
        let path = CString::new(library.as_os_str().as_bytes())?;
        // SAFETY: the path is a C string. The library's initialisers are NVRTC's own, which ask nothing of the process.
        let handle = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: it may be called at any time.
            let message = unsafe { dlerror() };
            // SAFETY: after a failure on this thread it is a C string, which stays until the next call here.
            let message = unsafe { CStr::from_ptr(message) };
            bail!("loading {}: {}", library.display(), message.to_string_lossy());
        }
        // SAFETY: here and below, the library is loaded, and the field has the type that nvrtc.h declares for the name.
        let version = unsafe { function(handle, c"nvrtcVersion") }?;
        // SAFETY: as above.
        let create = unsafe { function(handle, c"nvrtcCreateProgram") }?;
        // SAFETY: as above.
        let compile = unsafe { function(handle, c"nvrtcCompileProgram") }?;
        // SAFETY: as above.
        let destroy = unsafe { function(handle, c"nvrtcDestroyProgram") }?;
        let output = |size: &CStr, copy: &CStr| -> Result<(Size, Copy)> {
            // SAFETY: as above.
            let size = unsafe { function(handle, size) }?;
            // SAFETY: as above.
            let copy = unsafe { function(handle, copy) }?;
            Ok((size, copy))
        };
        Ok(Self {
            version,
            create,
            compile,
            destroy,
            log: output(c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog")?,
            ptx: output(c"nvrtcGetPTXSize", c"nvrtcGetPTX")?,
            cubin: output(c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN")?,
        })
    }

    /// Major and minor version of the compiler.
    pub(crate) fn version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two integers are written.
        check("nvrtcVersion", unsafe { (self.version)(&raw mut major, &raw mut minor) })?;
        Ok((major, minor))
    }

    /// Compiles to PTX for an architecture `compute_NN`, to machine code for `sm_NN`. Warnings are errors.
    pub(crate) fn compile(
        &self,
        source: &Source,
        headers: &[Source],
        architecture: &str,
        options: &[&str],
    ) -> Result<Vec<u8>> {
        let c_strings = |texts: &mut dyn Iterator<Item = &str>| texts.map(CString::new).collect::<Result<Vec<_>, _>>();
        let text = CString::new(source.text.as_str())?;
        let name = CString::new(source.name.as_str())?;
        let header_texts = c_strings(&mut headers.iter().map(|header| header.text.as_str()))?;
        let header_names = c_strings(&mut headers.iter().map(|header| header.name.as_str()))?;
        let architecture_option = format!("--gpu-architecture={architecture}");
        let options = c_strings(&mut options.iter().copied().chain([architecture_option.as_str()]))?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (texts, names, arguments) = (pointers(&header_texts), pointers(&header_names), pointers(&options));

        let mut program = std::ptr::null_mut();
        // SAFETY: all pointers are C strings, or arrays of as many C strings as is said, that live until the end of this function.
        let status = unsafe {
            let count = c_int::try_from(headers.len())?;
            (self.create)(&raw mut program, text.as_ptr(), name.as_ptr(), count, texts.as_ptr(), names.as_ptr())
        };
        check("nvrtcCreateProgram", status)?;
        // SAFETY: the program is live, and the options are so many C strings.
        let status = unsafe { (self.compile)(program, c_int::try_from(arguments.len())?, arguments.as_ptr()) };
        let log = String::from_utf8_lossy(&read(self.log, program)?).trim_matches(['\0', '\n']).to_owned();
        let output = if architecture.starts_with("sm_") { self.cubin } else { self.ptx };
        let result = match check("nvrtcCompileProgram", status) {
            Ok(()) if log.is_empty() => read(output, program),
            Ok(()) => Err(anyhow::anyhow!("warnings")),
            Err(error) => Err(error),
        };
        // SAFETY: the program is live, and not used after this.
        check("nvrtcDestroyProgram", unsafe { (self.destroy)(&raw mut program) })?;
        result.with_context(|| format!("{} for {architecture}\n{log}", source.name))
    }
}

/// A function of a loaded library.
///
/// # Safety
/// `library` is loaded, and `F` is the type of its function `name`.
unsafe fn function<F>(library: *mut c_void, name: &CStr) -> Result<F> {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>(), "a function pointer");
    // SAFETY: the library is loaded, and the name is a C string.
    let address = unsafe { dlsym(library, name.as_ptr()) };
    if address.is_null() {
        bail!("NVRTC has no {}", name.to_string_lossy());
    }
    // SAFETY: a function pointer of the caller's type, from an address that is not null.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

/// An output of a program: its size is asked first.
fn read((size, copy): (Size, Copy), program: Program) -> Result<Vec<u8>> {
    let mut bytes = 0;
    // SAFETY: the caller's program is live, and one size is written.
    check("the size of an output", unsafe { size(program, &raw mut bytes) })?;
    let mut output = vec![0_u8; bytes];
    // SAFETY: the output has the size that NVRTC gave.
    check("an output", unsafe { copy(program, output.as_mut_ptr().cast()) })?;
    Ok(output)
}

fn check(call: &str, status: Status) -> Result<()> {
    if status != 0 {
        bail!("{call}: NVRTC error {status}");
    }
    Ok(())
}
