//! Staged lookups: threads of the host gather rows into pinned memory, a kernel takes them over chunk by chunk, and the row kernels expand them.
//!
//! All of it is enqueued: ids go to the host, a host function announces them to the threads, the stage kernel waits for chunks. No thread of the
//! host calls the driver, and nothing on the device is waited for by the threads, so no order of streams or kernels can lock the three up.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::areas::Areas;
use crate::device::Device;
use crate::driver::{self, Place};
use crate::error::Error;
use crate::gather::crew::Crew;
use crate::gather::{Announcement, Chunks, HostTable, Run, Work};
use crate::ids::{IdShape, IdType, IdsError};
use crate::kernels::{self, Stage};
use crate::lookup::{Layers, LookupOptions};
use crate::memory::{DeviceBuffer, PinnedBuffer};
use crate::prefetch_state::Scope;
use crate::rows::{self, Blocks, Fetch};
use crate::stream::{Mark, StreamRef};
use crate::view::{Ids, Output};

/// Ids on the host, `[tokens][layers][columns]` without gaps, for [`Lookup::run_host`](crate::Lookup::run_host).
#[derive(Clone, Copy, Debug)]
pub struct HostIds<'a> {
    /// The ids.
    pub ids: &'a [i32],
    /// The n-grams' mixes, `[tokens][layers][orders]`, of which equal ones mean equal ids in all heads of that order.
    pub mixes: Option<&'a [i64]>,
    /// Tokens.
    pub tokens: usize,
}

/// One lookup's threads and buffers.
pub(crate) struct Staged {
    // Declared before the buffers that the threads use.
    crew: Option<Crew>,
    work: Arc<Work>,
    device: Device,
    capacity: usize,
    columns: usize,
    /// Heads an order, where mixes may come.
    heads: Option<usize>,
    areas: Areas,
    ids: PinnedBuffer,
    mixes: PinnedBuffer,
    rows: PinnedBuffer,
    /// Two words of status, then one for each chunk.
    words: PinnedBuffer,
    device_rows: DeviceBuffer,
    /// [`kernels::Table`] `[layers]` over the areas.
    tables: DeviceBuffer,
    host_tables: Vec<kernels::Table>,
    state: DeviceBuffer,
    announcements: HashMap<Key, Box<Announcement>>,
    from_host: Vec<FromHost>,
    last: Mark,
    /// Of every launch of the stage kernel, which counts them.
    blocks: u32,
    deadline_ns: u64,
}

/// What makes runs differ; equal ones share an announcement, so that nothing is allocated for a shape that was met before.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    with_mixes: bool,
    tokens: usize,
    first_layer: usize,
    layers: usize,
    wide: bool,
}

/// Room for one batch of ids from the host.
struct FromHost {
    ids: Box<[i32]>,
    mixes: Box<[i64]>,
    busy: Box<AtomicBool>,
    announcement: Box<Announcement>,
}

/// Blocks of the stage kernel: 8 have enough loads in flight to fill the link to the host; more wait for more chunks at a time.
const BLOCKS: u32 = 16;

/// Batches of host ids that may be under way at a time.
const IN_FLIGHT: usize = 4;

impl Staged {
    pub(crate) fn new(layers: &Layers, options: &LookupOptions) -> Result<Self, Error> {
        let device = layers.device();
        let (count, columns, capacity) = (layers.tables().len(), layers.columns(), options.max_tokens.max(1));
        let row_bytes = layers.format().row_bytes();
        if let Some(heads) = options.heads
            && (heads == 0 || !columns.is_multiple_of(heads))
        {
            return Err(Error::Invalid {
                what: "the heads",
                why: format!("{heads} heads an order do not divide {columns} columns"),
            });
        }
        let most = (capacity as u64).saturating_mul((count * columns) as u64).saturating_mul(row_bytes as u64);
        if (capacity as u64).saturating_mul((count * columns) as u64) > 1 << 30 || most > 1 << 40 {
            return Err(IdsError::TooMany { rows: (capacity as u64).saturating_mul((count * columns) as u64) }.into());
        }
        let areas = Areas::new(count, columns, options.heads.unwrap_or(1), capacity, row_bytes);
        let ids = PinnedBuffer::new(device, capacity * count * columns * IdType::I64.bytes())?;
        let orders = columns / options.heads.unwrap_or(columns);
        let mixes = PinnedBuffer::new(device, capacity * count * orders * size_of::<i64>())?;
        let rows = PinnedBuffer::new(device, areas.bytes())?;
        let words = PinnedBuffer::new(device, 8 + 8 * areas.chunks())?;
        let device_rows = DeviceBuffer::new(device, areas.bytes())?;
        let value_bytes = layers.format().value_bytes() as u64;
        let table = |layer: usize| {
            let values = device_rows.address() + areas.layer_start(layer) as u64;
            kernels::Table {
                values,
                scales: values + value_bytes,
                value_stride: row_bytes as u64,
                scale_stride: row_bytes as u64,
                first: 0,
                rows: u32::try_from(areas.layer_rows()).unwrap_or(u32::MAX),
            }
        };
        let host_tables: Vec<_> = (0..count).map(table).collect();
        let tables: Vec<u64> = host_tables
            .iter()
            .flat_map(|t| [t.values, t.scales, t.value_stride, t.scale_stride, u64::from(t.rows) << 32])
            .collect();
        let tables = DeviceBuffer::from_slice(device, &tables)?;
        let state = DeviceBuffer::from_slice(device, &[0u32; 4])?;
        let readers: Vec<Arc<dyn HostTable>> =
            layers.tables().iter().map(|table| Arc::new(table.clone()) as Arc<dyn HostTable>).collect();
        let chunks = Chunks {
            rows: rows.as_ptr(),
            status: words.as_ptr().cast(),
            // Two words of 4 bytes come first, so the others are aligned to 8.
            ready: words.as_ptr().wrapping_add(8).cast(),
        };
        let work = Arc::new(Work::new(readers, areas, columns, capacity, options.distinct, chunks));
        // One is left to the driver's own thread, without which a gather thread would lose its place for whole time slices.
        let threads = std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1);
        let threads = options.threads.unwrap_or(threads);
        let crew = Crew::new(&work, threads, capacity).map_err(Error::Threads)?;
        let last = Mark::new(device)?;
        let multiprocessors = options.multiprocessors.unwrap_or(device.multiprocessors());
        Ok(Self {
            crew: Some(crew),
            work,
            device: device.clone(),
            capacity,
            columns,
            heads: options.heads,
            areas,
            ids,
            mixes,
            rows,
            words,
            device_rows,
            tables,
            host_tables,
            state,
            announcements: HashMap::new(),
            from_host: Vec::new(),
            last,
            blocks: (multiprocessors * 2).clamp(1, BLOCKS),
            deadline_ns: u64::try_from(options.deadline.as_nanos()).unwrap_or(u64::MAX),
        })
    }

    /// Share of distinct n-grams (or ids) in the last batch that was looked through.
    pub(crate) fn distinct_share(&self) -> f32 {
        self.work.distinct_share()
    }

    /// N-gram orders of a layer, where mixes may come.
    pub(crate) fn orders(&self) -> Option<usize> {
        self.heads.map(|heads| self.columns / heads)
    }

    pub(crate) fn threads(&self) -> usize {
        self.crew.as_ref().map_or(0, Crew::threads)
    }

    /// Reports what went wrong in earlier runs.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.work.failure().map_or(Ok(()), |why| Err(Error::Gather(why)))
    }

    fn check_tokens(&self, tokens: usize) -> Result<(), Error> {
        if tokens > self.capacity {
            return Err(Error::Capacity { what: "tokens are staged", found: tokens, capacity: self.capacity });
        }
        Ok(())
    }

    /// Enqueues a lookup of ids in device memory.
    pub(crate) fn run(
        &mut self,
        layers: &Layers,
        ids: &Ids<'_>,
        out: &Output<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        let shape = *ids.shape();
        self.check_tokens(shape.tokens)?;
        rows::check(layers.format(), &self.fetch(&shape), out)?;
        let _bound = self.device.bind()?;
        let scope = Scope(stream.capture()?);
        self.last.before(stream, scope)?;

        if let Some(mixes) = ids.mixes() {
            let heads = self.heads.ok_or_else(|| Error::Invalid {
                what: "the mixes",
                why: "the lookup was made without `heads`, so it does not know which columns a mix is about".to_owned(),
            })?;
            let (from, width) = mixes.rows(&shape, self.columns / heads)?;
            let to = (Place::Host(self.mixes.as_ptr().cast()), width);
            // SAFETY: the view vouches for the source, and was checked to hold the mixes; the pinned buffer has room for `capacity` tokens.
            unsafe { driver::copy_2d(to, from, width, shape.tokens, stream.handle()) }?;
        }
        let id_bytes = shape.id_type.bytes();
        let (width, pitch) = (shape.across() * id_bytes, shape.token_stride * id_bytes);
        let from = ids.address() + (shape.first() * id_bytes) as u64;
        let to = (Place::Host(self.ids.as_ptr().cast()), width);
        // SAFETY: `Ids` vouches for the source; the pinned buffer has room for `capacity` tokens.
        unsafe { driver::copy_2d(to, (from, pitch.max(width)), width, shape.tokens, stream.handle()) }?;

        let key = Key {
            with_mixes: ids.mixes().is_some(),
            tokens: shape.tokens,
            first_layer: shape.first_layer,
            layers: shape.layers,
            wide: shape.id_type == IdType::I64,
        };
        let (work, ids, mixes) = (&self.work, self.ids.as_ptr(), self.mixes.as_ptr());
        let announcement = self.announcements.entry(key).or_insert_with(|| {
            let run = Run {
                tokens: key.tokens,
                first_layer: key.first_layer,
                layers: key.layers,
                ids,
                wide: key.wide,
                mixes: if key.with_mixes { mixes.cast_const().cast() } else { ptr::null() },
                busy: ptr::null(),
            };
            Box::new(Announcement { work: work.clone(), run })
        });
        let announcement: *const Announcement = &raw const **announcement;
        self.enqueue(layers, announcement, &shape, out, stream)?;
        self.last.record(stream, scope)
    }

    /// Enqueues a lookup of ids that are on the host.
    pub(crate) fn run_host(
        &mut self,
        layers: &Layers,
        host: &HostIds<'_>,
        out: &Output<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        let (tokens, count) = (host.tokens, layers.tables().len());
        self.check_tokens(tokens)?;
        let shape = IdShape::dense(IdType::I32, tokens, count, self.columns);
        rows::check(layers.format(), &self.fetch(&shape), out)?;
        let orders = self.orders();
        let expected = tokens * shape.across();
        if host.ids.len() != expected {
            return Err(Error::Invalid {
                what: "the ids",
                why: format!("{} ids, expected {expected}", host.ids.len()),
            });
        }
        if let Some(mixes) = host.mixes {
            let expected = orders.map(|orders| tokens * count * orders);
            if expected != Some(mixes.len()) {
                return Err(Error::Invalid {
                    what: "the mixes",
                    why: format!("{} mixes, expected {expected:?}", mixes.len()),
                });
            }
        }
        let _bound = self.device.bind()?;
        let scope = Scope(stream.capture()?);
        if scope != Scope(None) {
            let remedy = "ids on the host would be frozen into the graph: bring them to the device and use `run`";
            return Err(Error::Capturing { what: "run_host", remedy });
        }
        let free = self.from_host.iter().position(|slot| !slot.busy.load(Ordering::Acquire));
        let index = match free {
            Some(index) => index,
            None if self.from_host.len() < IN_FLIGHT => {
                self.from_host.push(FromHost::new(
                    &self.work,
                    self.capacity * shape.across(),
                    self.capacity * count * orders.unwrap_or(0),
                ));
                self.from_host.len() - 1
            }
            None => {
                return Err(Error::Capacity {
                    what: "batches of host ids are under way",
                    found: IN_FLIGHT + 1,
                    capacity: IN_FLIGHT,
                });
            }
        };
        self.last.before(stream, scope)?;
        let slot = &mut self.from_host[index];
        slot.ids[..host.ids.len()].copy_from_slice(host.ids);
        if let Some(mixes) = host.mixes {
            slot.mixes[..mixes.len()].copy_from_slice(mixes);
        }
        slot.announcement.run = Run {
            tokens,
            first_layer: 0,
            layers: count,
            ids: slot.ids.as_ptr().cast(),
            wide: false,
            mixes: if host.mixes.is_some() { slot.mixes.as_ptr() } else { ptr::null() },
            busy: &raw const *slot.busy,
        };
        let announcement: *const Announcement = &raw const *slot.announcement;
        slot.busy.store(true, Ordering::Release);
        let enqueued = self.enqueue(layers, announcement, &shape, out, stream);
        if enqueued.is_err() {
            // Nothing was announced, unless the driver failed half way; then its device is lost anyway.
            self.from_host[index].busy.store(false, Ordering::Release);
        }
        enqueued?;
        self.last.record(stream, scope)
    }

    fn fetch(&self, shape: &IdShape) -> Fetch<'_> {
        let areas = &self.areas;
        Fetch {
            ids: (self.device_rows.address(), false),
            token_stride: shape.layers * areas.groups,
            first: 0,
            share: areas.share,
            tokens: shape.tokens,
            columns: self.columns,
            tables: self.tables.address(),
            layers: &self.host_tables[..shape.layers],
        }
    }

    /// Announce, take over, expand.
    fn enqueue(
        &self,
        layers: &Layers,
        announcement: *const Announcement,
        shape: &IdShape,
        out: &Output<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        let areas = &self.areas;
        // Everything below is bounded by the 2^30 rows that the constructor allows.
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let param = Stage {
            ready: self.words.address() + 8,
            from: self.rows.address(),
            to: self.device_rows.address(),
            state: self.state.address(),
            status: self.words.address(),
            slots: self.device_rows.address(),
            deadline_ns: self.deadline_ns,
            slot_count: narrow(shape.tokens * shape.layers * areas.groups),
            chunk_bytes: narrow(areas.chunk_bytes()),
            slot_chunks: narrow(areas.slot_chunks),
            areas: narrow(shape.layers * areas.groups),
            area_chunks: narrow(areas.area_chunks),
            used_chunks: narrow(areas.used(shape.tokens)),
        };
        // SAFETY: the announcement lives as long as this value, which outlives what is enqueued (graphs are launched under that promise).
        unsafe { driver::launch_host(stream.handle(), announce, announcement.cast_mut().cast()) }?;
        // SAFETY: the entry takes `Stage`; its memory is this value's own, sized by the same areas.
        unsafe {
            self.device.kernels().launch(
                "stage",
                [self.blocks, 1, 1],
                [kernels::STAGE_THREADS, 1, 1],
                stream.handle(),
                &param,
            )
        }?;
        let blocks = Blocks::on(&self.device, None);
        // SAFETY: the slots and areas are this value's own, and the stage kernel has filled them for these tokens.
        unsafe { rows::enqueue(&self.device, layers.format(), &self.fetch(shape), out, blocks, stream) }
    }
}

impl FromHost {
    fn new(work: &Arc<Work>, ids: usize, mixes: usize) -> Self {
        let run = Run {
            tokens: 0,
            first_layer: 0,
            layers: 0,
            ids: ptr::null(),
            wide: false,
            mixes: ptr::null(),
            busy: ptr::null(),
        };
        Self {
            ids: vec![0; ids].into(),
            mixes: vec![0; mixes].into(),
            busy: Box::new(AtomicBool::new(false)),
            announcement: Box::new(Announcement { work: work.clone(), run }),
        }
    }
}

/// Runs on a thread of the driver's when the stream reaches it: no calls of the driver, no waiting.
unsafe extern "C" fn announce(data: *mut c_void) {
    let announcement = data.cast_const().cast::<Announcement>();
    // SAFETY: the lookup keeps the announcement where it is.
    let work = unsafe { &(*announcement).work };
    // SAFETY: as above.
    unsafe { work.announce(announcement) };
}

impl std::fmt::Debug for Staged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staged")
            .field("threads", &self.threads())
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // What was enqueued needs the threads; when the device has failed it will never come.
        let _ = self.device.synchronize();
        self.work.settle();
        self.crew = None;
    }
}
