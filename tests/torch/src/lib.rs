//! A C interface for the tests in Python beside this crate: just enough to drive lookups, prefetches, hashes and exchanges on foreign streams and
//! memory.
//!
//! Functions that can fail return null or a negative number, and leave the message for `engram_error`.
#![cfg(feature = "cuda")]
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "one promise of the caller covers all arguments of a function"
)]

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_void};

use engram_core::{Layout, Preset};
use engram_cuda::{
    Device, DeviceBatch, DeviceView, Hasher, IdShape, IdType, Ids, Lookup, LookupOptions, Output, PrefetchOptions,
    Prefetcher, StreamRef, Table,
};
use engram_ple::{FormatKind, OutputType, TableFormat};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

macro_rules! close {
    ($($name:ident: $ty:ty),*) => { $(
        /// Drops the value.
        ///
        /// # Safety
        /// It is live, and not used again.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(value: *mut $ty) {
            // SAFETY: by the caller's promise.
            drop(unsafe { Box::from_raw(value) });
        }
    )* };
}

pub mod exchange;

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

fn caught<T>(result: Result<T>) -> Option<T> {
    result.map_err(|error| LAST.set(error.to_string())).ok()
}

fn status(result: Result<()>) -> c_int {
    if caught(result).is_some() { 0 } else { -1 }
}

fn boxed<T>(result: Result<T>) -> *mut T {
    caught(result).map_or(std::ptr::null_mut(), |value| Box::into_raw(Box::new(value)))
}

/// Writes the calling thread's last message, cut to `len - 1` bytes and ended by a zero.
///
/// # Safety
/// `text` has room for `len` bytes, `len > 0`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_error(text: *mut c_char, len: usize) {
    LAST.with_borrow(|last| {
        let count = last.len().min(len - 1);
        // SAFETY: by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(last.as_ptr().cast(), text, count) };
        // SAFETY: as above.
        unsafe { text.add(count).write(0) };
    });
}

/// Opens a device by its ordinal.
#[unsafe(no_mangle)]
pub extern "C" fn engram_device(ordinal: u32) -> *mut Device {
    boxed(Device::new(ordinal).map_err(Into::into))
}

/// A table over the caller's memory; `scales` may be 0, and `global_scale` NaN for none.
///
/// # Safety
/// `device` is live; `format` is a C string; the memory is what [`Table::borrow`] wants.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_table(
    device: *const Device,
    format: *const c_char,
    width: usize,
    global_scale: f32,
    values: u64,
    scales: u64,
    rows: u64,
) -> *mut Table {
    // SAFETY: by the caller's promise.
    let (device, format) = unsafe { (&*device, CStr::from_ptr(format)) };
    let table = || {
        let kind: FormatKind = format.to_str()?.parse()?;
        let format = TableFormat::new(kind, width, (!global_scale.is_nan()).then_some(global_scale))?;
        // SAFETY: by the caller's promise.
        Ok(unsafe { Table::borrow(device, format, values, (scales != 0).then_some(scales), 0..rows) }?)
    };
    boxed(table())
}

/// A lookup in `count` tables, one a layer.
///
/// # Safety
/// `tables` names `count` live tables.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_lookup(tables: *const *const Table, count: usize, columns: usize) -> *mut Lookup {
    // SAFETY: by the caller's promise.
    let tables: Vec<Table> = (0..count).map(|index| unsafe { (**tables.add(index)).clone() }).collect();
    boxed(Lookup::new(&tables, columns, &LookupOptions::default()).map_err(Into::into))
}

/// Ids and an output as Python passes them.
#[repr(C)]
#[derive(Debug)]
pub struct Call {
    stream: *mut c_void,
    ids: u64,
    id_bytes: u64,
    wide: c_int,
    /// 0 packed, 1 bf16, 2 f16.
    form: c_int,
    tokens: usize,
    token_stride: usize,
    layers: usize,
    columns: usize,
    out: u64,
    out_bytes: u64,
    capacity: usize,
}

impl Call {
    fn id_type(&self) -> IdType {
        if self.wide != 0 { IdType::I64 } else { IdType::I32 }
    }

    unsafe fn stream(&self) -> StreamRef<'_> {
        // SAFETY: by the promise of the caller of the interface.
        unsafe { StreamRef::from_raw(self.stream) }
    }

    unsafe fn ids(&self) -> Result<Ids<'_>> {
        // SAFETY: by the promise of the caller of the interface.
        let memory = unsafe { DeviceView::from_raw(self.ids, self.id_bytes) };
        let Self { tokens, token_stride, layers, columns, .. } = *self;
        Ok(Ids::new(
            memory,
            IdShape { id_type: self.id_type(), tokens, token_stride, first_layer: 0, layers, columns },
        )?)
    }

    unsafe fn output(&self) -> Output<'_> {
        // SAFETY: by the promise of the caller of the interface.
        let memory = unsafe { DeviceView::from_raw(self.out, self.out_bytes) };
        match self.form {
            1 => Output::dense(memory, OutputType::Bf16, self.capacity),
            2 => Output::dense(memory, OutputType::F16, self.capacity),
            _ => Output::packed(memory),
        }
    }
}

/// [`Lookup::run`].
///
/// # Safety
/// All pointers are live, and memory holds what `call` says until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_run(lookup: *mut Lookup, call: *const Call) -> c_int {
    // SAFETY: by the caller's promise.
    let (lookup, call) = unsafe { (&mut *lookup, &*call) };
    // SAFETY: by the caller's promise.
    let (ids, out, stream) = unsafe { (call.ids(), call.output(), call.stream()) };
    status(ids.and_then(|ids| Ok(lookup.run(&ids, &out, stream)?)))
}

/// A prefetcher for steps of up to `max_tokens` tokens; it takes the lookup over.
///
/// # Safety
/// `lookup` is live and not used again; `stream` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_prefetcher(
    lookup: *mut Lookup,
    max_tokens: usize,
    wide: c_int,
    stream: *mut c_void,
) -> *mut Prefetcher {
    // SAFETY: by the caller's promise.
    let (lookup, stream) = unsafe { (Box::from_raw(lookup), StreamRef::from_raw(stream)) };
    let mut options = PrefetchOptions::new(max_tokens);
    options.id_type = if wide != 0 { IdType::I64 } else { IdType::I32 };
    boxed(Prefetcher::new(*lookup, options, stream).map_err(Into::into))
}

/// [`Prefetcher::start`].
///
/// # Safety
/// As [`engram_run`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_start(prefetcher: *mut Prefetcher, call: *const Call) -> c_int {
    // SAFETY: by the caller's promise.
    let (prefetcher, call) = unsafe { (&mut *prefetcher, &*call) };
    // SAFETY: by the caller's promise.
    let (ids, stream) = unsafe { (call.ids(), call.stream()) };
    status(ids.and_then(|ids| Ok(prefetcher.start(&ids, stream)?)))
}

/// [`Prefetcher::finish`].
///
/// # Safety
/// As [`engram_run`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_finish(prefetcher: *mut Prefetcher, layer: usize, call: *const Call) -> c_int {
    // SAFETY: by the caller's promise.
    let (prefetcher, call) = unsafe { (&mut *prefetcher, &*call) };
    // SAFETY: by the caller's promise.
    let (ids, out, stream) = unsafe { (call.ids(), call.output(), call.stream()) };
    status(ids.and_then(|ids| Ok(prefetcher.finish(layer, &ids, &out, stream)?)))
}

/// Hashes one request of `len` PLE tokens whose context is all EOS, in the layout of the `tiny-ple` preset; returns the ids of a token.
///
/// # Safety
/// `device` and `stream` are live; `tokens`, `starts` and `history` are i32 arrays of a batch in device memory; `ids` has room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_hash(
    device: *const Device,
    eos: i32,
    arrays: *const [u64; 4],
    len: usize,
    ids_bytes: u64,
    stream: *mut c_void,
) -> c_int {
    // SAFETY: by the caller's promise.
    let (device, &[tokens, starts, history, ids], stream) =
        unsafe { (&*device, &*arrays, StreamRef::from_raw(stream)) };
    // SAFETY: by the caller's promise.
    let view = |address, bytes| unsafe { DeviceView::from_raw(address, bytes) };
    let hash = || {
        let layout = Layout::from_config(&Preset::TinyPle.config())?;
        let hasher = Hasher::new(device, &layout, eos)?;
        let batch = DeviceBatch {
            tokens: view(tokens, len as u64 * 4),
            len,
            starts: view(starts, 8),
            requests: 1,
            history: view(history, (layout.ngram_size() as u64 - 1) * 4),
        };
        hasher.ids(&batch, view(ids, ids_bytes), None, stream)?;
        // The hasher's constants go when this returns.
        stream.synchronize(device)?;
        Ok(c_int::try_from(hasher.ids_per_token())?)
    };
    caught(hash()).unwrap_or(-1)
}

close!(engram_close_device: Device, engram_close_table: Table, engram_close_lookup: Lookup, engram_close_prefetcher: Prefetcher);
