//! Rows fetched ahead on a side stream.

use crate::driver::{self, Place};
use crate::error::Error;
use crate::ids::{IdType, IdsError};
use crate::kernels;
use crate::lookup::Lookup;
use crate::memory::DeviceBuffer;
use crate::prefetch_state::{Dependency, Order, Scope};
use crate::rows::{self, Blocks, Fetch};
use crate::stream::{Mark, Stream, StreamRef};
use crate::table::Placement;
use crate::view::{DeviceView, Ids, Output};

/// What a prefetcher's buffers are made for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PrefetchOptions {
    /// Most tokens of a step on one rank.
    pub max_tokens: usize,
    /// Ranks whose tokens come together (data parallelism); 1 by default.
    pub sharing: usize,
    /// Type of the ids; i32 by default.
    pub id_type: IdType,
}

impl PrefetchOptions {
    /// For steps of up to `max_tokens` tokens, on one rank, with i32 ids.
    #[must_use]
    pub fn new(max_tokens: usize) -> Self {
        Self { max_tokens, sharing: 1, id_type: IdType::I32 }
    }
}

/// Starts all layers' lookups when the ids are known, and hands each layer's rows over when the model needs them.
///
/// [`start`](Self::start) fetches the rows of all layers on one side stream, in layer order. [`finish`](Self::finish) makes the caller's stream
/// wait for its layer only, and unpacks the rows into the caller's memory. Three ways to use it:
/// * eagerly;
/// * both calls captured in one graph, whose replays see new ids;
/// * both calls made eagerly between the launches of graph segments.
///
/// Start and finish of one step belong to the same capture, or both to none. Three dependencies keep it right: the side stream waits for the
/// ids' producer; the ids are copied, so the caller may overwrite them right after the start; the caller's stream waits for the rows.
///
/// Tables in device memory gain nothing from this: there `start` only checks, and `finish` looks up.
#[derive(Debug)]
pub struct Prefetcher {
    lookup: Lookup,
    order: Order,
    options: PrefetchOptions,
    ahead: Option<Ahead>,
}

/// Buffers, and the side stream that fills them.
#[derive(Debug)]
struct Ahead {
    side: Stream,
    /// The step's ids, `[tokens][layers][columns]`.
    ids: DeviceBuffer,
    /// Its mixes, `[tokens][layers][orders]`, where the lookup takes some.
    mixes: Option<DeviceBuffer>,
    /// Packed rows, `[layers][capacity][columns][row_bytes]`.
    rows: DeviceBuffer,
    /// The same rows as tables, one a layer, of which token `t` takes rows `t * columns` and following.
    tables: DeviceBuffer,
    host_tables: Vec<kernels::Table>,
    /// 0, 1, 2, ..: the token of each token.
    tokens: DeviceBuffer,
    ids_ready: Mark,
    fetched: Vec<Mark>,
    read: Vec<Mark>,
}

impl Ahead {
    fn new(lookup: &Lookup, options: &PrefetchOptions) -> Result<Self, Error> {
        let device = lookup.device();
        let too_many = || Error::Ids(IdsError::TooMany { rows: u64::MAX });
        let tokens = options.max_tokens.checked_mul(options.sharing).ok_or_else(too_many)?;
        let capacity = tokens.max(1).checked_next_multiple_of(16).ok_or_else(too_many)?;
        let (layers, columns) = (lookup.tables().len(), lookup.columns());
        let row_bytes = lookup.format().row_bytes();
        let rows = capacity.checked_mul(columns).filter(|&rows| rows <= 1 << 31).ok_or_else(too_many)?;
        let layer_bytes = rows.checked_mul(row_bytes).ok_or_else(too_many)?;
        let buffer = DeviceBuffer::new(device, layer_bytes.checked_mul(layers).ok_or_else(too_many)?)?;
        let table = |layer: usize| {
            let values = buffer.address() + (layer * layer_bytes) as u64;
            kernels::Table {
                values,
                scales: values + lookup.format().value_bytes() as u64,
                value_stride: row_bytes as u64,
                scale_stride: row_bytes as u64,
                first: 0,
                rows: u32::try_from(rows).unwrap_or(u32::MAX),
            }
        };
        let host_tables: Vec<_> = (0..layers).map(table).collect();
        let words: Vec<u64> = host_tables
            .iter()
            .flat_map(|t| [t.values, t.scales, t.value_stride, t.scale_stride, u64::from(t.rows) << 32])
            .collect();
        let order: Vec<i32> = (0..i32::try_from(capacity).map_err(|_| too_many())?).collect();
        let marks = || (0..layers).map(|_| Mark::new(device)).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            side: Stream::new(device)?,
            ids: DeviceBuffer::new(device, capacity * layers * columns * options.id_type.bytes())?,
            mixes: match lookup.orders() {
                Some(orders) => Some(DeviceBuffer::new(device, capacity * layers * orders * size_of::<i64>())?),
                None => None,
            },
            tables: DeviceBuffer::from_slice(device, &words)?,
            host_tables,
            tokens: DeviceBuffer::from_slice(device, &order)?,
            ids_ready: Mark::new(device)?,
            fetched: marks()?,
            read: marks()?,
            rows: buffer,
        })
    }

    /// The rows of one layer.
    fn layer(&self, layer: usize) -> DeviceView<'_> {
        let bytes = self.rows.bytes() / self.host_tables.len();
        let address = self.rows.address() + (layer * bytes) as u64;
        // SAFETY: a part of a buffer that this value owns, and that waits for the device when it is dropped.
        unsafe { DeviceView::from_raw(address, bytes as u64) }
    }
}

impl Prefetcher {
    /// Allocates everything: buffers for `max_tokens * sharing` tokens of packed rows, a side stream, events. `stream` is the one that starts
    /// will come on, which must not be capturing yet; a first start inside a capture is fine.
    ///
    /// The lookup's `multiprocessors` limits the kernels of the side stream.
    ///
    /// # Errors
    /// [`Error::Capturing`] inside a capture; [`Error::Ids`] for buffers past 2^31 rows; [`Error::Driver`].
    pub fn new(lookup: Lookup, options: PrefetchOptions, stream: StreamRef<'_>) -> Result<Self, Error> {
        stream.check_device(lookup.device())?;
        let bound = lookup.device().bind()?;
        if stream.capture()?.is_some() {
            return Err(Error::Capturing { what: "Prefetcher::new", remedy: "construct it before the capture begins" });
        }
        drop(bound);
        let direct = lookup.tables().iter().all(|table| table.placement() == Placement::Device);
        let ahead = if direct { None } else { Some(Ahead::new(&lookup, &options)?) };
        Ok(Self { order: Order::new(lookup.tables().len()), lookup, options, ahead })
    }

    /// Whether starts fetch anything: not for tables in device memory.
    #[must_use]
    pub fn supports_prefetch(&self) -> bool {
        self.ahead.is_some()
    }

    /// Most tokens of a start, over all ranks that share.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.options.max_tokens.saturating_mul(self.options.sharing)
    }

    /// Leaves a dependency out, so that a test can show that it is needed.
    #[cfg(feature = "fault-injection")]
    pub fn omit(&mut self, dependency: Option<Dependency>) {
        self.order.omit(dependency);
    }

    /// Starts fetching the rows of all layers of `ids`, which the work before on `stream` has written and the work after may overwrite.
    /// No tokens, no launch.
    ///
    /// # Errors
    /// [`Error::Prefetch`] when the last start is not finished; [`Error::Ids`] for another shape or type than the buffers were made for;
    /// [`Error::Capacity`] for more tokens than they hold; [`Error::WrongDevice`]; what [`Lookup::run`] returns.
    pub fn start(&mut self, ids: &Ids<'_>, stream: StreamRef<'_>) -> Result<(), Error> {
        let scope = self.check(ids, stream)?;
        let shape = ids.shape();
        if shape.layers != self.lookup.tables().len() {
            return Err(Error::Ids(IdsError::Tables {
                first_layer: shape.first_layer,
                layers: shape.layers,
                columns: shape.columns,
                table_layers: self.lookup.tables().len(),
                table_columns: self.lookup.columns(),
            }));
        }
        self.order.start(scope, shape.tokens)?;
        if shape.tokens == 0 || self.ahead.is_none() {
            return Ok(());
        }
        let fetched = self.fetch(ids, scope, stream);
        if fetched.is_err() {
            self.order.abandon();
        }
        fetched
    }

    fn fetch(&mut self, ids: &Ids<'_>, scope: Scope, stream: StreamRef<'_>) -> Result<(), Error> {
        let (copies, waits) = (self.order.keeps(Dependency::IdLifetime), self.order.keeps(Dependency::Producer));
        let Some(ahead) = &mut self.ahead else { return Ok(()) };
        let _bound = self.lookup.device().bind()?;
        let shape = *ids.shape();
        let id_bytes = shape.id_type.bytes();
        let (width, pitch) = (shape.across() * id_bytes, shape.token_stride * id_bytes);
        // The side stream may still read the last step's ids, after a start that was abandoned or finished on another stream.
        if let Some(last) = ahead.fetched.last() {
            last.before(stream, scope)?;
        }
        let own = crate::ids::IdShape::dense(shape.id_type, shape.tokens, shape.layers, shape.columns);
        let mut copy = Ids::new(&ahead.ids, own)?;
        let from = ids.address() + (shape.first() * id_bytes) as u64;
        if copies {
            let to = (Place::Device(ahead.ids.address()), width);
            // SAFETY: `Ids` vouches for the source; the copy's shape was checked against its buffer.
            unsafe { driver::copy_2d(to, (from, pitch.max(width)), width, shape.tokens, stream.handle()) }?;
        }
        if let (Some(own), Some(mixes), Some(orders)) = (&ahead.mixes, ids.mixes(), self.lookup.orders()) {
            let (from, width) = mixes.rows(&shape, orders)?;
            let to = (Place::Device(own.address()), width);
            // SAFETY: the view vouches for the source, and was checked to hold the mixes; the buffer holds those of `capacity` tokens.
            unsafe { driver::copy_2d(to, from, width, shape.tokens, stream.handle()) }?;
            copy = copy.with_mixes(own, shape.layers * orders);
        }
        let side = ahead.side.as_ref();
        if waits || scope != Scope(None) {
            ahead.ids_ready.record(stream, scope)?;
            ahead.ids_ready.before(side, scope)?;
        }
        for layer in 0..shape.layers {
            // The layer's rows of the last step may still be read by the stream that finished it.
            ahead.read[layer].before(side, scope)?;
            let out = Output::packed(ahead.layer(layer));
            let ids = if copies { copy.layer(layer) } else { ids.layer(layer) };
            self.lookup.run(&ids, &out, side)?;
            ahead.fetched[layer].record(side, scope)?;
        }
        Ok(())
    }

    /// Makes `stream` wait for the layer's rows and unpacks them into `out`, `[tokens][columns * width]` in the forms that [`Output`] has.
    /// `ids` are those of the start; only a table in device memory reads them again.
    ///
    /// # Errors
    /// [`Error::Prefetch`] without a start, in another capture than the start's, or for a layer finished before; what [`Lookup::run`] returns.
    pub fn finish(
        &mut self,
        layer: usize,
        ids: &Ids<'_>,
        out: &Output<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        let scope = self.check(ids, stream)?;
        let tokens = ids.shape().tokens;
        self.order.may_finish(layer, scope, tokens)?;
        let waits = self.order.keeps(Dependency::Consumer);
        match &mut self.ahead {
            None => self.lookup.run(&ids.layer(layer), out, stream)?,
            Some(ahead) => {
                out.check_device(self.lookup.device())?;
                let _bound = self.lookup.device().bind()?;
                if waits && tokens > 0 {
                    ahead.fetched[layer].before(stream, scope)?;
                }
                let columns = self.lookup.columns();
                let fetch = Fetch {
                    ids: (ahead.tokens.address(), false),
                    token_stride: 1,
                    first: 0,
                    share: columns,
                    tokens,
                    columns,
                    tables: ahead.tables.address() + (layer * size_of::<kernels::Table>()) as u64,
                    layers: &ahead.host_tables[layer..=layer],
                };
                let device = self.lookup.device();
                // SAFETY: the buffers are this value's own, hold that many tokens, and wait for the device when they are dropped.
                unsafe { rows::enqueue(device, self.lookup.format(), &fetch, out, Blocks::on(device, None), stream) }?;
                if tokens > 0 {
                    ahead.read[layer].record(stream, scope)?;
                }
            }
        }
        self.order.finished(layer);
        Ok(())
    }

    /// As [`Prefetcher::finish`], but lends the packed rows where they are, `[tokens][columns][row_bytes]`, until the next start. Work that reads
    /// them comes before the next start in that start's stream.
    ///
    /// # Errors
    /// As [`Prefetcher::finish`]; [`Error::Invalid`] for tables in device memory, whose rows are nowhere yet.
    pub fn finish_in_place(
        &mut self,
        layer: usize,
        ids: &Ids<'_>,
        stream: StreamRef<'_>,
    ) -> Result<DeviceView<'_>, Error> {
        let scope = self.check(ids, stream)?;
        let tokens = ids.shape().tokens;
        self.order.may_finish(layer, scope, tokens)?;
        let waits = self.order.keeps(Dependency::Consumer);
        let Some(ahead) = &mut self.ahead else {
            let why = "a table in device memory has no prefetched rows to lend: finish into memory of your own";
            return Err(Error::Invalid { what: "finish_in_place", why: why.to_owned() });
        };
        let _bound = self.lookup.device().bind()?;
        if tokens > 0 {
            if waits {
                ahead.fetched[layer].before(stream, scope)?;
            }
            ahead.read[layer].record(stream, scope)?;
        }
        self.order.finished(layer);
        let bytes = tokens * self.lookup.columns() * self.lookup.format().row_bytes();
        // SAFETY: a part of a buffer that this value owns; the borrow ends before the next start.
        Ok(unsafe { DeviceView::from_raw(ahead.layer(layer).address(), bytes as u64) })
    }

    /// A lookup of one layer without a start, on the caller's stream.
    ///
    /// # Errors
    /// As [`Lookup::run`].
    pub fn lookup(
        &mut self,
        layer: usize,
        ids: &Ids<'_>,
        out: &Output<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        self.check(ids, stream)?;
        self.lookup.run(&ids.layer(layer), out, stream)
    }

    /// Gives the last start up, whatever was finished of it; `stream` waits until the side stream is done with it, which also joins the side
    /// stream to the capture that the start was made in. Nothing happens without a start.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn abandon(&mut self, stream: StreamRef<'_>) -> Result<(), Error> {
        let Some((tokens, scope)) = self.order.pending() else { return Ok(()) };
        self.order.abandon();
        let Some(ahead) = self.ahead.as_ref().filter(|_| tokens > 0) else { return Ok(()) };
        let _bound = self.lookup.device().bind()?;
        if Scope(stream.capture()?) == scope
            && let Some(last) = ahead.fetched.last()
        {
            last.before(stream, scope)?;
        }
        Ok(())
    }

    /// What start and finish have in common.
    fn check(&self, ids: &Ids<'_>, stream: StreamRef<'_>) -> Result<Scope, Error> {
        let shape = ids.shape();
        let device = self.lookup.device();
        stream.check_device(device)?;
        if shape.id_type != self.options.id_type {
            return Err(IdsError::Type { found: shape.id_type, expected: self.options.id_type }.into());
        }
        if shape.tokens > self.capacity() {
            return Err(Error::Capacity {
                what: "tokens are prefetched",
                found: shape.tokens,
                capacity: self.capacity(),
            });
        }
        if shape.tokens > 0 {
            device.check_home("the ids", ids.address(), false)?;
        }
        let _bound = device.bind()?;
        Ok(Scope(stream.capture()?))
    }
}
