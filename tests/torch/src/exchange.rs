//! Exchanges of made-up tables between processes: two layers of 24 heads, rows of 256 bytes and 8 scales, packed.

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use engram_core::{HeadShards, Ownership};
use engram_cuda::{Device, Placement, Table};
use engram_ple::{FormatKind, SynthSource, TableFormat, TableSource};
use engram_symm::cuda::{Exchange, Options, Push};
use engram_symm::{Algorithm, Config, Group, Launch, Layer, Output, Rendezvous};

use super::{Call, Result, boxed, status};

const LAYERS: u32 = 2;
const COLUMNS: usize = 24;
const WIDTH: usize = 256;

fn format() -> Result<TableFormat> {
    Ok(TableFormat::new(FormatKind::E4m3E8m0x32, WIDTH, None)?)
}

/// The tables of all ranks, of which each has `rows`.
fn sources(rows: u64, world: usize) -> Result<Vec<SynthSource>> {
    let format = format()?;
    Ok((0..LAYERS).map(|layer| SynthSource::new(format.clone(), 7, layer, rows * world as u64)).collect())
}

/// The group of all `world` processes that say the same `run`.
///
/// # Safety
/// `run` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_group(rank: usize, world: usize, run: *const c_char) -> *mut Group {
    // SAFETY: by the caller's promise.
    let run = unsafe { CStr::from_ptr(run) }.to_string_lossy().into_owned();
    let launch = Launch { rank, world, local_rank: rank, run };
    boxed(Rendezvous::new(launch, "torch").timeout(Duration::from_secs(60)).join().map_err(Into::into))
}

/// An exchange of the whole group, each rank of which has `rows` rows of each layer in device memory.
///
/// # Safety
/// `group` and `device` are live; `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_exchange(
    group: *mut Group,
    device: *const Device,
    name: *const c_char,
    by_lines: c_int,
    rows: u64,
    capacity: u32,
    deadline_s: u64,
) -> *mut Exchange {
    // SAFETY: by the caller's promise.
    let (group, device, name) = unsafe { (&mut *group, &*device, CStr::from_ptr(name)) };
    let mut exchange = || {
        let (rank, world) = (group.rank() as u64, group.world());
        let own = rank * rows..(rank + 1) * rows;
        let sources = sources(rows, world)?;
        let load = |source: &SynthSource| Table::load(device, source, own.clone(), Placement::Device);
        let tables = sources.iter().map(load).collect::<std::result::Result<Vec<_>, _>>()?;
        let layer = Layer { format: format()?, ownership: Ownership::Heads(HeadShards::new(COLUMNS, world)?) };
        let config = Config::new(COLUMNS, vec![layer; tables.len()], capacity, Output::Packed)
            .with_deadline(Duration::from_secs(deadline_s));
        let mut options = Options::default();
        options.push = Some(if by_lines != 0 { Push::Lines } else { Push::Flags });
        Ok(Exchange::create(group, device, name.to_str()?, config, &tables, &options)?)
    };
    boxed(exchange())
}

/// [`Exchange::run`] of ids in a slot of the same size.
///
/// # Safety
/// All pointers are live, and memory holds what `call` says until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_exchange_run(exchange: *mut Exchange, call: *const Call, barrier: c_int) -> c_int {
    // SAFETY: by the caller's promise.
    let (exchange, call) = unsafe { (&mut *exchange, &*call) };
    // SAFETY: by the caller's promise.
    let (ids, stream) = unsafe { (call.ids(), call.stream()) };
    let algorithm = if barrier != 0 { Algorithm::Barrier } else { Algorithm::Push };
    let run = || {
        exchange.run(&ids?, u32::try_from(call.tokens)?, algorithm, stream)?;
        Ok(())
    };
    status(run())
}

/// The address of [`Exchange::rows`].
///
/// # Safety
/// `exchange` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_exchange_rows(exchange: *const Exchange) -> u64 {
    // SAFETY: by the caller's promise.
    unsafe { &*exchange }.rows().rows.address()
}

/// [`Exchange::check`].
///
/// # Safety
/// `exchange` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_exchange_check(exchange: *const Exchange) -> c_int {
    // SAFETY: by the caller's promise.
    let exchange = unsafe { &*exchange };
    status(exchange.check().map_err(Into::into))
}

/// [`Exchange::close`].
///
/// # Safety
/// `exchange` is live, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_exchange_close(exchange: *mut Exchange) -> c_int {
    // SAFETY: by the caller's promise.
    let exchange = unsafe { Box::from_raw(exchange) };
    status(exchange.close().map_err(Into::into))
}

/// The rows of `ids`, `[tokens][layers][columns]`, as the CPU makes them, into `out`, `[tokens][layers][columns][264]`.
///
/// # Safety
/// Both have room for that, in host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engram_expected(
    rows: u64,
    world: usize,
    ids: *const i32,
    tokens: usize,
    out: *mut u8,
) -> c_int {
    let expected = || {
        let row_bytes = format()?.row_bytes();
        let sources = sources(rows, world)?;
        let columns = tokens * sources.len() * COLUMNS;
        // SAFETY: by the caller's promise.
        let ids = unsafe { std::slice::from_raw_parts(ids, columns) };
        // SAFETY: by the caller's promise.
        let out = unsafe { std::slice::from_raw_parts_mut(out, columns * row_bytes) };
        let parts = ids.chunks_exact(COLUMNS).zip(out.chunks_exact_mut(COLUMNS * row_bytes));
        for ((ids, out), source) in parts.zip(sources.iter().cycle()) {
            source.gather(ids, out)?;
        }
        Ok(())
    };
    status(expected())
}

close!(engram_close_group: Group);
