//! The driver functions that this crate uses, one to one: results as [`DriverError`], out-parameters as return values.
//!
//! Every function is `unsafe` for the same reason: handles and addresses are not checked. The types above this module own the handles.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use crate::error::{CudaVersion, DriverCode, DriverError};
use crate::sys::{self, CuResult};

pub(crate) type Result<T> = std::result::Result<T, DriverError>;

/// Calls a driver function, and turns any code but success into an error that says what was being done.
macro_rules! call {
    ($api:ident($($arg:expr),* $(,)?), $($doing:tt)+) => {{
        // SAFETY: the enclosing `unsafe fn` passes its own contract on: handles are live, addresses and sizes belong together, and
        // out-parameters are locals of the right type.
        let result = unsafe { sys::$api($($arg),*) };
        outcome(stringify!($api), result, || format!($($doing)+))
    }};
}

fn outcome(api: &'static str, result: CuResult, doing: impl FnOnce() -> String) -> Result<()> {
    match result {
        CuResult::SUCCESS => Ok(()),
        CuResult(code) => Err(DriverError { api, code: DriverCode(code), doing: doing() }),
    }
}

/// As `call!`, for functions that fill an out-parameter as their first argument.
macro_rules! obtain {
    ($ty:ty, $api:ident($($arg:expr),* $(,)?), $($doing:tt)+) => {{
        let mut out = MaybeUninit::<$ty>::zeroed();
        call!($api(out.as_mut_ptr(), $($arg),*), $($doing)+)?;
        // SAFETY: zeroed bytes are a value of each type used here (integers, arrays of them, and raw pointers), and the driver filled it.
        Ok(unsafe { out.assume_init() })
    }};
}

pub(crate) fn init() -> Result<()> {
    call!(cuInit(0), "initialising the CUDA driver")
}

pub(crate) fn version() -> Result<CudaVersion> {
    let version: Result<c_int> = obtain!(c_int, cuDriverGetVersion(), "asking the driver's version");
    Ok(CudaVersion(version?))
}

/// The address of a driver function that is younger than the bindings this crate links to.
pub(crate) fn late(symbol: &'static CStr, since: CudaVersion) -> Result<*mut c_void> {
    let mut function: *mut c_void = ptr::null_mut();
    call!(cuGetProcAddress(symbol.as_ptr(), &raw mut function, since.0, 0), "looking {symbol:?} up")?;
    if function.is_null() {
        return Err(DriverError {
            api: "cuGetProcAddress",
            code: DriverCode(500),
            doing: format!("looking {symbol:?} up"),
        });
    }
    Ok(function)
}

pub(crate) fn device_count() -> Result<c_int> {
    obtain!(c_int, cuDeviceGetCount(), "counting devices")
}

pub(crate) fn device(ordinal: c_int) -> Result<sys::CUdevice> {
    obtain!(sys::CUdevice, cuDeviceGet(ordinal), "opening device {ordinal}")
}

pub(crate) fn device_name(device: sys::CUdevice) -> Result<String> {
    let mut name = [0 as c_char; 256];
    call!(cuDeviceGetName(name.as_mut_ptr(), 255, device), "asking a device's name")?;
    // SAFETY: the array's last byte was never handed out, so it is zero and ends the string at the latest.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

pub(crate) fn device_attribute(attribute: c_int, device: sys::CUdevice) -> Result<c_int> {
    obtain!(c_int, cuDeviceGetAttribute(attribute, device), "asking device attribute {attribute}")
}

pub(crate) fn device_uuid(device: sys::CUdevice) -> Result<[u8; 16]> {
    obtain!([u8; 16], cuDeviceGetUuid_v2(device), "asking a device's UUID")
}

/// Whether the path between two devices lets one read and write the other's memory.
pub(crate) fn can_access_peer(device: sys::CUdevice, peer: sys::CUdevice) -> Result<bool> {
    let can: Result<c_int> =
        obtain!(c_int, cuDeviceCanAccessPeer(device, peer), "asking whether device {device} reaches device {peer}");
    Ok(can? != 0)
}

/// What the path from one device to another one has.
pub(crate) fn peer_attribute(attribute: c_int, device: sys::CUdevice, peer: sys::CUdevice) -> Result<c_int> {
    obtain!(
        c_int,
        cuDeviceGetP2PAttribute(attribute, device, peer),
        "asking attribute {attribute} of the path from device {device} to device {peer}"
    )
}

/// # Safety
/// Each retain is matched by at most one [`release_primary_context`].
pub(crate) unsafe fn retain_primary_context(device: sys::CUdevice) -> Result<sys::CUcontext> {
    obtain!(sys::CUcontext, cuDevicePrimaryCtxRetain(device), "retaining the primary context")
}

/// # Safety
/// Undoes one [`retain_primary_context`]; nothing made in the context is used afterwards.
pub(crate) unsafe fn release_primary_context(device: sys::CUdevice) -> Result<()> {
    call!(cuDevicePrimaryCtxRelease_v2(device), "releasing the primary context")
}

pub(crate) fn current_context() -> Result<sys::CUcontext> {
    obtain!(sys::CUcontext, cuCtxGetCurrent(), "asking the current context")
}

/// # Safety
/// `context` is live.
pub(crate) unsafe fn push_context(context: sys::CUcontext) -> Result<()> {
    call!(cuCtxPushCurrent_v2(context), "making the primary context current")
}

/// # Safety
/// The calling thread pushed a context that it has not popped.
pub(crate) unsafe fn pop_context() -> Result<()> {
    let popped: Result<sys::CUcontext> = obtain!(sys::CUcontext, cuCtxPopCurrent_v2(), "restoring the current context");
    popped.map(|_| ())
}

pub(crate) unsafe fn synchronize_context() -> Result<()> {
    call!(cuCtxSynchronize(), "waiting for the device")
}

pub(crate) unsafe fn memory_info() -> Result<(usize, usize)> {
    let (mut free, mut total) = (0, 0);
    call!(cuMemGetInfo_v2(&raw mut free, &raw mut total), "asking for free device memory")?;
    Ok((free, total))
}

pub(crate) unsafe fn alloc(bytes: usize) -> Result<u64> {
    obtain!(sys::CUdeviceptr, cuMemAlloc_v2(bytes), "allocating {bytes} bytes of device memory")
}

pub(crate) unsafe fn free(address: u64) -> Result<()> {
    call!(cuMemFree_v2(address), "freeing device memory")
}

/// Registers host memory: portable to every context, mapped into the device's address space.
pub(crate) unsafe fn register_host(address: *mut c_void, bytes: usize) -> Result<()> {
    const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
    call!(cuMemHostRegister_v2(address, bytes, PORTABLE_AND_MAPPED), "registering {bytes} bytes of host memory")
}

pub(crate) unsafe fn unregister_host(address: *mut c_void) -> Result<()> {
    call!(cuMemHostUnregister(address), "unregistering host memory")
}

pub(crate) unsafe fn host_device_address(address: *mut c_void) -> Result<u64> {
    obtain!(sys::CUdeviceptr, cuMemHostGetDevicePointer_v2(address, 0), "asking the device's address of host memory")
}

/// Which kind of memory an address belongs to (1 host, 2 device), and which device's.
pub(crate) unsafe fn pointer_home(address: u64) -> Result<(c_uint, c_int)> {
    const MEMORY_TYPE: c_int = 2;
    const DEVICE_ORDINAL: c_int = 9;
    let mut kind: c_uint = 0;
    call!(
        cuPointerGetAttribute((&raw mut kind).cast(), MEMORY_TYPE, address),
        "asking where address {address:#x} lies"
    )?;
    let mut ordinal: c_int = 0;
    call!(
        cuPointerGetAttribute((&raw mut ordinal).cast(), DEVICE_ORDINAL, address),
        "asking which device owns {address:#x}"
    )?;
    Ok((kind, ordinal))
}

pub(crate) unsafe fn copy_to_device(to: u64, from: *const c_void, bytes: usize, stream: sys::CUstream) -> Result<()> {
    call!(cuMemcpyHtoDAsync_v2(to, from, bytes, stream), "copying {bytes} bytes to the device")
}

pub(crate) unsafe fn copy_to_host(to: *mut c_void, from: u64, bytes: usize, stream: sys::CUstream) -> Result<()> {
    call!(cuMemcpyDtoHAsync_v2(to, from, bytes, stream), "copying {bytes} bytes to the host")
}

pub(crate) unsafe fn copy_on_device(to: u64, from: u64, bytes: usize, stream: sys::CUstream) -> Result<()> {
    call!(cuMemcpyDtoDAsync_v2(to, from, bytes, stream), "copying {bytes} bytes on the device")
}

/// Where a two-dimensional copy reads or writes.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Device(u64),
    Host(*mut c_void),
}

/// Copies `height` lines of `width` bytes between pitched memories.
pub(crate) unsafe fn copy_2d(
    (to, to_pitch): (Place, usize),
    (from, from_pitch): (u64, usize),
    width: usize,
    height: usize,
    stream: sys::CUstream,
) -> Result<()> {
    let (to_kind, to_host, to_device) = match to {
        Place::Device(address) => (sys::CUmemorytype::CU_MEMORYTYPE_DEVICE, ptr::null_mut(), address),
        Place::Host(address) => (sys::CUmemorytype::CU_MEMORYTYPE_HOST, address, 0),
    };
    let copy = sys::CUDA_MEMCPY2D_st {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: ptr::null(),
        srcDevice: from,
        srcArray: ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: to_kind,
        dstHost: to_host,
        dstDevice: to_device,
        dstArray: ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: width,
        Height: height,
    };
    call!(cuMemcpy2DAsync_v2(&raw const copy, stream), "copying {height} lines of {width} bytes")
}

pub(crate) unsafe fn fill(address: u64, byte: u8, bytes: usize, stream: sys::CUstream) -> Result<()> {
    call!(cuMemsetD8Async(address, byte, bytes, stream), "filling {bytes} bytes of device memory")
}

const DEVICE_LOCATION: c_int = 1;
const DESCRIPTOR: c_int = 1;
const FABRIC: c_int = 8;

/// How allocations of a device are made that can be exported as a descriptor, as a fabric handle, or not at all.
pub(crate) fn allocation_property(device: sys::CUdevice, descriptor: bool, fabric: bool) -> sys::AllocationProperty {
    const PINNED: c_int = 1;
    sys::AllocationProperty {
        kind: PINNED,
        handle_kinds: if descriptor { DESCRIPTOR } else { 0 } | if fabric { FABRIC } else { 0 },
        location: sys::MemoryLocation { kind: DEVICE_LOCATION, device },
        win32_metadata: ptr::null_mut(),
        flags: [0; 4],
    }
}

pub(crate) unsafe fn allocation_granularity(property: &sys::AllocationProperty) -> Result<usize> {
    const MINIMUM: c_int = 0;
    obtain!(
        usize,
        cuMemGetAllocationGranularity(&raw const *property, MINIMUM),
        "asking for the granularity of device memory"
    )
}

pub(crate) unsafe fn create_memory(bytes: usize, property: &sys::AllocationProperty) -> Result<u64> {
    obtain!(
        u64,
        cuMemCreate(bytes, &raw const *property, 0),
        "allocating {bytes} bytes of device memory with handles of kind {}",
        property.handle_kinds
    )
}

pub(crate) unsafe fn release_memory(handle: u64) -> Result<()> {
    call!(cuMemRelease(handle), "releasing device memory")
}

/// A new descriptor of the memory, which the caller closes.
pub(crate) unsafe fn export_descriptor(handle: u64) -> Result<c_int> {
    let mut descriptor: c_int = -1;
    call!(
        cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, DESCRIPTOR, 0),
        "exporting device memory as a descriptor"
    )?;
    Ok(descriptor)
}

pub(crate) unsafe fn export_fabric(handle: u64) -> Result<[u8; 64]> {
    let mut fabric = [0; 64];
    call!(
        cuMemExportToShareableHandle(fabric.as_mut_ptr().cast(), handle, FABRIC, 0),
        "exporting device memory as a fabric handle"
    )?;
    Ok(fabric)
}

/// The descriptor stays the caller's.
pub(crate) unsafe fn import_descriptor(descriptor: c_int) -> Result<u64> {
    // The driver takes the number in the pointer's place.
    let number = ptr::without_provenance_mut(usize::try_from(descriptor).unwrap_or(usize::MAX));
    obtain!(
        u64,
        cuMemImportFromShareableHandle(number, DESCRIPTOR),
        "importing device memory from descriptor {descriptor}"
    )
}

pub(crate) unsafe fn import_fabric(mut fabric: [u8; 64]) -> Result<u64> {
    obtain!(
        u64,
        cuMemImportFromShareableHandle(fabric.as_mut_ptr().cast(), FABRIC),
        "importing device memory from a fabric handle"
    )
}

pub(crate) unsafe fn reserve_addresses(bytes: usize) -> Result<u64> {
    obtain!(sys::CUdeviceptr, cuMemAddressReserve(bytes, 0, 0, 0), "reserving {bytes} bytes of addresses")
}

pub(crate) unsafe fn free_addresses(address: u64, bytes: usize) -> Result<()> {
    call!(cuMemAddressFree(address, bytes), "freeing {bytes} bytes of addresses at {address:#x}")
}

pub(crate) unsafe fn map_memory(address: u64, bytes: usize, handle: u64) -> Result<()> {
    call!(cuMemMap(address, bytes, 0, handle, 0), "mapping {bytes} bytes of device memory at {address:#x}")
}

pub(crate) unsafe fn unmap_memory(address: u64, bytes: usize) -> Result<()> {
    call!(cuMemUnmap(address, bytes), "unmapping {bytes} bytes of device memory at {address:#x}")
}

/// Lets `device` read and write a range that is mapped.
pub(crate) unsafe fn allow_access(address: u64, bytes: usize, device: sys::CUdevice) -> Result<()> {
    const READ_WRITE: c_int = 3;
    let location = sys::MemoryLocation { kind: DEVICE_LOCATION, device };
    let access = sys::MemoryAccess { location, access: READ_WRITE };
    call!(
        cuMemSetAccess(address, bytes, &raw const access, 1),
        "giving device {device} access to {bytes} bytes at {address:#x}"
    )
}

pub(crate) unsafe fn create_stream(priority: c_int) -> Result<sys::CUstream> {
    const NON_BLOCKING: c_uint = 1;
    obtain!(sys::CUstream, cuStreamCreateWithPriority(NON_BLOCKING, priority), "creating a stream")
}

pub(crate) unsafe fn destroy_stream(stream: sys::CUstream) -> Result<()> {
    call!(cuStreamDestroy_v2(stream), "destroying a stream")
}

pub(crate) unsafe fn synchronize_stream(stream: sys::CUstream) -> Result<()> {
    call!(cuStreamSynchronize(stream), "waiting for a stream")
}

/// Whether all work of the stream is done.
pub(crate) unsafe fn stream_is_idle(stream: sys::CUstream) -> Result<bool> {
    not_ready_is_false(call!(cuStreamQuery(stream), "asking whether a stream is idle"))
}

pub(crate) unsafe fn stream_wait(stream: sys::CUstream, event: sys::CUevent) -> Result<()> {
    call!(cuStreamWaitEvent(stream, event, 0), "making a stream wait for an event")
}

pub(crate) unsafe fn stream_context(stream: sys::CUstream) -> Result<sys::CUcontext> {
    let mut context = ptr::null_mut();
    call!(cuStreamGetCtx(stream, &raw mut context), "asking a stream's context")?;
    Ok(context)
}

/// The capture that the stream takes part in: `Ok(Some(id))` while it runs.
pub(crate) unsafe fn capture_id(stream: sys::CUstream) -> Result<Option<u64>> {
    const ACTIVE: c_int = 1;
    const INVALIDATED: c_int = 2;
    const API: &str = "cuStreamGetCaptureInfo";
    let (mut status, mut id) = (0, 0);
    call!(cuStreamGetCaptureInfo(stream, &raw mut status, &raw mut id), "asking whether a stream is being captured")?;
    match status {
        ACTIVE => Ok(Some(id)),
        INVALIDATED => {
            let doing = "using a stream whose capture an earlier error has invalidated".to_owned();
            Err(DriverError { api: API, code: DriverCode(901), doing })
        }
        _ => Ok(None),
    }
}

pub(crate) unsafe fn begin_capture(stream: sys::CUstream) -> Result<()> {
    const THREAD_LOCAL: c_uint = 1;
    call!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL), "beginning a stream capture")
}

pub(crate) unsafe fn end_capture(stream: sys::CUstream) -> Result<sys::CUgraph> {
    let mut graph = ptr::null_mut();
    call!(cuStreamEndCapture(stream, &raw mut graph), "ending a stream capture")?;
    Ok(graph)
}

/// Exchanges the calling thread's capture mode; 2 is relaxed, which allows calls that the capture does not record.
pub(crate) unsafe fn exchange_capture_mode(mode: &mut c_uint) -> Result<()> {
    call!(cuThreadExchangeStreamCaptureMode(mode), "changing the thread's capture mode")
}

pub(crate) unsafe fn create_event(timing: bool) -> Result<sys::CUevent> {
    const DISABLE_TIMING: c_uint = 2;
    obtain!(sys::CUevent, cuEventCreate(if timing { 0 } else { DISABLE_TIMING }), "creating an event")
}

pub(crate) unsafe fn destroy_event(event: sys::CUevent) -> Result<()> {
    call!(cuEventDestroy_v2(event), "destroying an event")
}

pub(crate) unsafe fn record_event(event: sys::CUevent, stream: sys::CUstream) -> Result<()> {
    call!(cuEventRecord(event, stream), "recording an event")
}

/// Whether the event's last recording has been reached.
pub(crate) unsafe fn event_is_reached(event: sys::CUevent) -> Result<bool> {
    not_ready_is_false(call!(cuEventQuery(event), "asking whether an event was reached"))
}

pub(crate) unsafe fn synchronize_event(event: sys::CUevent) -> Result<()> {
    call!(cuEventSynchronize(event), "waiting for an event")
}

pub(crate) unsafe fn elapsed_milliseconds(start: sys::CUevent, end: sys::CUevent) -> Result<f32> {
    obtain!(f32, cuEventElapsedTime(start, end), "reading the time between two events")
}

pub(crate) unsafe fn instantiate(graph: sys::CUgraph) -> Result<sys::CUgraphExec> {
    obtain!(sys::CUgraphExec, cuGraphInstantiateWithFlags(graph, 0), "instantiating a graph")
}

pub(crate) unsafe fn launch_graph(exec: sys::CUgraphExec, stream: sys::CUstream) -> Result<()> {
    call!(cuGraphLaunch(exec, stream), "launching a graph")
}

pub(crate) unsafe fn destroy_graph_exec(exec: sys::CUgraphExec) -> Result<()> {
    call!(cuGraphExecDestroy(exec), "destroying a graph")
}

pub(crate) unsafe fn destroy_graph(graph: sys::CUgraph) -> Result<()> {
    call!(cuGraphDestroy(graph), "destroying a graph's nodes")
}

/// # Safety
/// A context is current; `image` is PTX text.
pub(crate) unsafe fn load_module(image: &CStr) -> Result<sys::CUmodule> {
    obtain!(sys::CUmodule, cuModuleLoadData(image.as_ptr().cast()), "compiling the embedded kernels for this device")
}

pub(crate) unsafe fn unload_module(module: sys::CUmodule) -> Result<()> {
    call!(cuModuleUnload(module), "unloading kernels")
}

pub(crate) unsafe fn function(module: sys::CUmodule, name: &CStr) -> Result<sys::CUfunction> {
    obtain!(sys::CUfunction, cuModuleGetFunction(module, name.as_ptr()), "resolving kernel {name:?}")
}

/// Loads a kernel now, which the driver would otherwise do at its first launch (where it can stall behind a kernel that spins).
pub(crate) unsafe fn load_function(function: sys::CUfunction) -> Result<()> {
    type LoadFunction = unsafe extern "C" fn(sys::CUfunction) -> CuResult;
    let address = late(c"cuFuncLoad", CudaVersion(12_040))?;
    // SAFETY: the driver gave this address for cuFuncLoad of CUDA 12.4, which takes a function and returns a result code.
    let load: LoadFunction = unsafe { std::mem::transmute::<*mut c_void, LoadFunction>(address) };
    // SAFETY: the caller passes a live function.
    outcome("cuFuncLoad", unsafe { load(function) }, || "loading a kernel".to_owned())
}

type LaunchEx =
    unsafe extern "C" fn(*const sys::LaunchConfig, sys::CUfunction, *mut *mut c_void, *mut *mut c_void) -> CuResult;

/// Launches kernels that start early: `cuLaunchKernelEx`.
#[derive(Clone, Copy)]
pub(crate) struct EarlyLaunch(LaunchEx);

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const EARLY: c_int = 6;

impl EarlyLaunch {
    pub(crate) fn find() -> Result<Self> {
        let address = late(c"cuLaunchKernelEx", CudaVersion(11_080))?;
        // SAFETY: the driver gave this address for cuLaunchKernelEx of CUDA 11.8, which takes these and returns a result code.
        Ok(Self(unsafe { std::mem::transmute::<*mut c_void, LaunchEx>(address) }))
    }
}

/// # Safety
/// `params` points to one value of the right type for each of the kernel's parameters. With `early`, the kernel waits by itself for what is ahead
/// of it.
pub(crate) unsafe fn launch(
    name: &str,
    function: sys::CUfunction,
    early: Option<EarlyLaunch>,
    [grid, block]: [[c_uint; 3]; 2],
    stream: sys::CUstream,
    params: &mut [*mut c_void],
) -> Result<()> {
    let doing = || format!("launching {name} with {grid:?} blocks of {block:?} threads");
    let (params, extra) = (params.as_mut_ptr(), ptr::null_mut());
    let Some(EarlyLaunch(launch)) = early else {
        let ([x, y, z], [block_x, block_y, block_z]) = (grid, block);
        // SAFETY: the caller's promises.
        let result =
            unsafe { sys::cuLaunchKernel(function, x, y, z, block_x, block_y, block_z, 0, stream, params, extra) };
        return outcome("cuLaunchKernel", result, doing);
    };
    let mut attribute = sys::LaunchAttribute { kind: EARLY, padding: 0, value: [0; 16] };
    attribute.value[0] = 1;
    let config = sys::LaunchConfig {
        grid,
        block,
        shared_bytes: 0,
        stream,
        attributes: &raw const attribute,
        attribute_count: 1,
    };
    // SAFETY: the config and its attribute live until the call is over, and the rest the caller vouches for.
    outcome("cuLaunchKernelEx", unsafe { launch(&raw const config, function, params, extra) }, doing)
}

/// # Safety
/// `data` stays valid, and may be used from another thread, whenever the stream (or a graph captured from it) runs the function.
pub(crate) unsafe fn launch_host(stream: sys::CUstream, function: sys::HostFn, data: *mut c_void) -> Result<()> {
    call!(cuLaunchHostFunc(stream, function, data), "enqueueing a host function")
}

fn not_ready_is_false(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.code.0 == CuResult::NOT_READY.0 => Ok(false),
        Err(error) => Err(error),
    }
}
