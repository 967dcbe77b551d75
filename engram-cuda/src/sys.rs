//! Declarations of the CUDA driver API.
//!
//! `cust` brings the link to libcuda, the handle types and the struct layouts. The functions are declared here, because `cust` declares their
//! result as a closed Rust enum of CUDA 11.4: a newer driver answers with codes that this enum lacks, and receiving one would be undefined
//! behaviour. [`CuResult`] is a plain integer instead. Functions younger than `cust`'s bindings are looked up at run time
//! ([`driver::late`](crate::driver::late)), so that a driver without them gives an error and not a failed load.

use std::ffi::{c_char, c_int, c_uint, c_void};

pub(crate) use cust::sys::{
    CUDA_MEMCPY2D_st, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmemorytype,
    CUmodule, CUstream,
};

/// What a driver function answers: any integer, whichever driver answers it.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) struct CuResult(pub(crate) i32);

impl CuResult {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const NOT_READY: Self = Self(600);
}

/// How an allocation is made, as `CUmemAllocationProp`: its enums as integers, since those of `cust` lack the newer kinds of handles.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationProperty {
    pub(crate) kind: c_int,
    pub(crate) handle_kinds: c_int,
    pub(crate) location: MemoryLocation,
    pub(crate) win32_metadata: *mut c_void,
    /// Compression, remote access by network cards, usage: none of them.
    pub(crate) flags: [u16; 4],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemoryLocation {
    pub(crate) kind: c_int,
    pub(crate) device: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemoryAccess {
    pub(crate) location: MemoryLocation,
    pub(crate) access: c_int,
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CUstream,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) attribute_count: c_uint,
}

/// `CUlaunchAttribute`, of those whose value is a number: the rest of its 64 bytes is not read.
#[repr(C, align(8))]
pub(crate) struct LaunchAttribute {
    pub(crate) kind: c_int,
    pub(crate) padding: c_int,
    pub(crate) value: [c_int; 16],
}

const _: () = {
    assert!(size_of::<AllocationProperty>() == 32);
    assert!(size_of::<MemoryAccess>() == 12);
    assert!(size_of::<LaunchConfig>() == 56);
    assert!(size_of::<LaunchAttribute>() == 72);
};

pub(crate) type HostFn = unsafe extern "C" fn(*mut c_void);

macro_rules! driver_api {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)*) => {
        unsafe extern "C" {
            $(pub(crate) fn $name($($arg: $ty),*) -> CuResult;)*
        }
    };
}

driver_api! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetProcAddress(symbol: *const c_char, function: *mut *mut c_void, cuda_version: c_int, flags: u64);

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice);
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
    fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_int, device: CUdevice, peer: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    fn cuCtxGetCurrent(context: *mut CUcontext);
    fn cuCtxPushCurrent_v2(context: CUcontext);
    fn cuCtxPopCurrent_v2(context: *mut CUcontext);
    fn cuCtxSynchronize();

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(address: CUdeviceptr);
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(address: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, host: *mut c_void, flags: c_uint);
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: CUdeviceptr);
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D_st, stream: CUstream);
    fn cuMemsetD8Async(address: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream);

    fn cuMemGetAllocationGranularity(granularity: *mut usize, property: *const AllocationProperty, option: c_int);
    fn cuMemCreate(handle: *mut u64, bytes: usize, property: *const AllocationProperty, flags: u64);
    fn cuMemRelease(handle: u64);
    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_int, flags: u64);
    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_int);
    fn cuMemAddressReserve(address: *mut CUdeviceptr, bytes: usize, alignment: usize, wanted: CUdeviceptr, flags: u64);
    fn cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    fn cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: u64, flags: u64);
    fn cuMemUnmap(address: CUdeviceptr, bytes: usize);
    fn cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const MemoryAccess, count: usize);

    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamQuery(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuStreamGetCaptureInfo(stream: CUstream, status: *mut c_int, id: *mut u64);
    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint);
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventQuery(event: CUevent);
    fn cuEventSynchronize(event: CUevent);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
    fn cuGraphExecDestroy(exec: CUgraphExec);
    fn cuGraphDestroy(graph: CUgraph);

    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleUnload(module: CUmodule);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    fn cuLaunchHostFunc(stream: CUstream, function: HostFn, data: *mut c_void);
}
