//! An exchange made ahead on a side stream.

use engram_cuda::kernels::Ptx;
use engram_cuda::raw::{Dependency, Mark, Module, PrefetchOrder};
use engram_cuda::{DeviceBuffer, DeviceView, IdShape, IdType, Ids, Scope, Stream, StreamRef};
use engram_ple::mx;

use super::exchange::{Exchange, Rows};
use super::layout::unit;
use crate::exchange::{Algorithm, Output, invalid};
use crate::{Error, Group, Result, Step};

/// Starts an exchange when the ids are known, and hands each layer's rows over when the model needs them.
///
/// [`start`](Self::start) runs the exchange of all layers on one side stream. [`finish`](Self::finish) makes the caller's stream wait for it, and
/// copies one layer's rows into the caller's memory. Three ways to use it:
/// * eagerly;
/// * both calls captured in one graph, whose replays see new ids;
/// * both calls made eagerly between the launches of graph segments.
///
/// Start and finish of one step belong to the same capture, or both to none. Three dependencies keep it right: the side stream waits for the
/// ids' producer; the ids are copied, so the caller may overwrite them right after the start; the caller's stream waits for the rows.
///
/// An exchange is collective, and so is a start: a rank without tokens starts as well, and a start that is abandoned has taken part. All else
/// is local. A fault shows in [`Exchange::check`], and the rows are zero then.
#[derive(Debug)]
pub struct Prefetcher {
    exchange: Exchange,
    order: PrefetchOrder,
    /// Tokens of the last start.
    tokens: usize,
    side: Stream,
    kernels: Module,
    /// The step's ids, i32 `[tokens][layers][columns]`.
    ids: DeviceBuffer,
    ids_ready: Mark,
    exchanged: Mark,
    /// When the rows of each layer were read last.
    read: Vec<Mark>,
}

/// What copies lines of bytes unless the exchange sleeps. Entry `take_U` takes a [`Take`] of which all numbers are multiples of U.
const TAKE: Ptx = Ptx::new(
    &["take_16", "take_4", "take_1"],
    concat!(include_str!("../../kernels/prefetch.compute_80.ptx"), "\0"),
    None,
);

/// Parameter of the kernels.
#[repr(C)]
struct Take {
    state: u64,
    from: u64,
    to: u64,
    from_pitch: u64,
    to_pitch: u64,
    width: u64,
    lines: u32,
    padding: u32,
}

const _: () = assert!(size_of::<Take>() == 56);

/// Threads of a block.
const THREADS: u32 = 256;

impl Prefetcher {
    /// Allocates everything: room for the ids of the exchange's capacity, a side stream, events. Collective, so that all ranks have one or none.
    /// `stream` is the one that starts will come on, which must not be capturing yet; a first start inside a capture is fine.
    ///
    /// # Errors
    /// On all ranks, when one of them fails: [`Error::Capturing`] inside a capture, [`Error::Cuda`]. The exchange is dropped then.
    pub fn create(group: &mut Group, exchange: Exchange, stream: StreamRef<'_>) -> Result<Self> {
        let built = Self::build(exchange, stream);
        group.agree(Step::Allocate, built)
    }

    fn build(exchange: Exchange, stream: StreamRef<'_>) -> Result<Self> {
        let rank = exchange.rank();
        if exchange.scope(stream)?.capture().is_some() {
            let remedy = "create it before the capture begins".to_owned();
            return Err(Error::Capturing { rank, what: "Prefetcher::create".to_owned(), remedy });
        }
        let cuda = |error: engram_cuda::Error| Error::cuda(rank, "creating a prefetcher", &error);
        let (device, config) = (exchange.device(), exchange.config());
        let layers = config.layers.len();
        let capacity = usize::try_from(config.capacity).unwrap_or(usize::MAX);
        let bytes = capacity.saturating_mul(layers * config.columns).saturating_mul(IdType::I32.bytes());
        Ok(Self {
            order: PrefetchOrder::new(layers),
            tokens: 0,
            side: Stream::new(device).map_err(cuda)?,
            kernels: Module::load(device, &TAKE).map_err(cuda)?,
            ids: DeviceBuffer::new(device, bytes).map_err(cuda)?,
            ids_ready: Mark::new(device).map_err(cuda)?,
            exchanged: Mark::new(device).map_err(cuda)?,
            read: (0..layers).map(|_| Mark::new(device).map_err(cuda)).collect::<Result<_>>()?,
            exchange,
        })
    }

    /// Leaves a dependency out, so that a test can show that it is needed.
    #[cfg(feature = "fault-injection")]
    pub fn omit(&mut self, dependency: Option<Dependency>) {
        self.order.omit(dependency);
    }

    /// The exchange.
    #[must_use]
    pub fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    /// The exchange, for a call of its own between two steps: `stream` waits until the rows that were finished have been copied.
    ///
    /// # Errors
    /// [`Error::Prefetch`] when the last start is not finished; [`Error::Cuda`].
    pub fn exchange_mut(&mut self, stream: StreamRef<'_>) -> Result<&mut Exchange> {
        let scope = self.exchange.scope(stream)?;
        self.order.may_start(scope)?;
        self.after_reads(stream, scope)?;
        Ok(&mut self.exchange)
    }

    /// Gives the exchange back. Graphs that captured this prefetcher's calls are not launched any more.
    #[must_use]
    pub fn into_exchange(self) -> Exchange {
        self.exchange
    }

    /// Starts an exchange of `ids`, which the work before on `stream` has written and the work after may overwrite. Collective.
    ///
    /// # Errors
    /// [`Error::Prefetch`] when the last start is not finished; [`Error::Cuda`] for a stream or ids of another device; what [`Exchange::run`]
    /// refuses. Then this rank has not taken part.
    pub fn start(&mut self, ids: &Ids<'_>, slot: u32, algorithm: Algorithm, stream: StreamRef<'_>) -> Result<()> {
        let scope = self.exchange.scope(stream)?;
        self.exchange.admit(ids, slot)?;
        let tokens = ids.shape().tokens;
        if tokens > 0 {
            self.exchange
                .device()
                .check_home("the ids", ids.address(), false)
                .map_err(|error| self.cuda("starting an exchange", &error))?;
        }
        self.order.start(scope, tokens)?;
        self.tokens = tokens;
        let started = self.run_ahead(ids, slot, algorithm, (stream, scope));
        if started.is_err() {
            self.order.abandon();
        }
        started
    }

    fn run_ahead(
        &mut self,
        ids: &Ids<'_>,
        slot: u32,
        algorithm: Algorithm,
        (stream, scope): (StreamRef<'_>, Scope),
    ) -> Result<()> {
        // The side stream may still read the last step's ids, after a start that was abandoned or finished on another stream.
        self.exchanged.before(stream, scope).map_err(|error| self.cuda(ORDERING, &error))?;
        let shape = *ids.shape();
        let (layers, columns) = (shape.layers, shape.columns);
        let copies = self.order.keeps(Dependency::IdLifetime);
        if copies {
            let id = IdType::I32.bytes();
            let first = ids.address() + (shape.first_layer * columns * id) as u64;
            let from = (first, shape.token_stride * id);
            let width = layers * columns * id;
            self.take(from, (self.ids.address(), width), width, shape.tokens, stream)?;
        }
        // Inside a capture this is also what makes the side stream take part.
        if self.order.keeps(Dependency::Producer) || scope.capture().is_some() {
            self.ids_ready.record(stream, scope).map_err(|error| self.cuda(ORDERING, &error))?;
            self.ids_ready.before(self.side.as_ref(), scope).map_err(|error| self.cuda(ORDERING, &error))?;
        }
        self.after_reads(self.side.as_ref(), scope)?;
        let copy = IdShape::dense(IdType::I32, shape.tokens, layers, columns);
        let copy = Ids::new(&self.ids, copy).map_err(|error| self.cuda("copying ids", &error))?;
        let ids = if copies { &copy } else { ids };
        self.exchange.run(ids, slot, algorithm, self.side.as_ref())?;
        let recorded = self.exchanged.record(self.side.as_ref(), scope);
        recorded.map_err(|error| self.cuda(ORDERING, &error))
    }

    /// Makes `stream` wait for the exchange, and copies the layer's rows of the start's tokens to `rows`: `[tokens][columns * width]` in the form
    /// of [`Config::output`](crate::Config::output), packed rows as `[tokens][columns][row_bytes]`. With [`Output::Mx`] their scales go to `scales`,
    /// in whole tiles of 128 tokens ([`engram_ple::mx`]).
    ///
    /// # Errors
    /// [`Error::Prefetch`] without a start, in another capture than the start's, or for a layer finished before; [`Error::Invalid`] for memory that
    /// is too small, or scales where there are none; [`Error::Cuda`].
    pub fn finish(
        &mut self,
        layer: usize,
        rows: DeviceView<'_>,
        scales: Option<DeviceView<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let scope = self.exchange.scope(stream)?;
        self.order.may_finish(layer, scope, self.tokens)?;
        let (config, shape, tokens) = (self.exchange.config(), *self.exchange.row_shape(), self.tokens);
        let width = config.columns * shape.out_column;
        let scale_bytes = match (config.output, scales) {
            (Output::Mx, Some(_)) => mx::layer_bytes(tokens, config.columns * config.layers[layer].format.width()),
            (Output::Mx, None) => return Err(invalid("memory for scales", &"none", "some, with MX")),
            (_, Some(_)) => return Err(invalid("memory for scales", &"given", "none, but with MX")),
            (_, None) => 0,
        };
        let fits = |what: &str, memory: DeviceView<'_>, needed: usize| {
            let needed = needed as u64;
            if memory.bytes() >= needed {
                return Ok(());
            }
            Err(invalid(what, &format!("{} bytes", memory.bytes()), &format!("{needed} for {tokens} tokens")))
        };
        fits("memory for rows", rows, tokens * width)?;
        scales.map_or(Ok(()), |scales| fits("memory for scales", scales, scale_bytes))?;

        self.wait(stream, scope)?;
        let own = self.exchange.rows();
        let from = own.rows.address() + (layer * shape.out_layer) as u64;
        self.take((from, shape.out_token), (rows.address(), width), width, tokens, stream)?;
        if let (Some(own), Some(scales)) = (own.scales, scales) {
            let from = own.address() + (layer * shape.scales_layer) as u64;
            self.take((from, scale_bytes), (scales.address(), scale_bytes), scale_bytes, 1, stream)?;
        }
        self.done(layer, stream, scope)
    }

    /// As [`Prefetcher::finish`], but lends the layer's rows where they are, for all tokens of the slot, until the next start. With
    /// [`Output::Packed`] a token's `[columns][row_bytes]` lie `layers * columns * row_bytes` bytes from those of the next token. Work that reads
    /// them comes before the next start in that start's stream.
    ///
    /// # Errors
    /// As [`Prefetcher::finish`].
    pub fn finish_in_place(&mut self, layer: usize, stream: StreamRef<'_>) -> Result<Rows<'_>> {
        let scope = self.exchange.scope(stream)?;
        self.order.may_finish(layer, scope, self.tokens)?;
        self.wait(stream, scope)?;
        self.done(layer, stream, scope)?;
        let (config, shape, all) = (self.exchange.config(), *self.exchange.row_shape(), self.exchange.rows());
        let slot = usize::try_from(all.slot).unwrap_or(usize::MAX);
        let bytes = slot.saturating_sub(1) * shape.out_token + config.columns * shape.out_column;
        // SAFETY: a part of the exchange's outputs; the borrow ends before the next start.
        let part = |view: DeviceView<'_>, offset: usize, bytes: usize| unsafe {
            DeviceView::from_raw(view.address() + offset as u64, bytes as u64)
        };
        let scale_bytes = || mx::layer_bytes(slot, config.columns * config.layers[layer].format.width());
        Ok(Rows {
            rows: part(all.rows, layer * shape.out_layer, bytes),
            scales: all.scales.map(|scales| part(scales, layer * shape.scales_layer, scale_bytes())),
            slot: all.slot,
        })
    }

    /// Gives the last start up, whatever was finished of it: its exchange takes place all the same. `stream` waits until the side stream is done
    /// with it, which also joins the side stream to the capture that the start was made in. Nothing happens without a start.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn abandon(&mut self, stream: StreamRef<'_>) -> Result<()> {
        let Some((_, began)) = self.order.pending() else { return Ok(()) };
        self.order.abandon();
        if self.exchange.scope(stream)? == began {
            self.exchanged.before(stream, began).map_err(|error| self.cuda(ORDERING, &error))?;
        }
        Ok(())
    }

    fn wait(&self, stream: StreamRef<'_>, scope: Scope) -> Result<()> {
        if !self.order.keeps(Dependency::Consumer) {
            return Ok(());
        }
        self.exchanged.before(stream, scope).map_err(|error| self.cuda(ORDERING, &error))
    }

    fn done(&mut self, layer: usize, stream: StreamRef<'_>, scope: Scope) -> Result<()> {
        let recorded = self.read[layer].record(stream, scope);
        recorded.map_err(|error| self.cuda(ORDERING, &error))?;
        self.order.finished(layer);
        Ok(())
    }

    /// Makes `stream` wait until the rows of the last step have been copied.
    fn after_reads(&self, stream: StreamRef<'_>, scope: Scope) -> Result<()> {
        let mut reads = self.read.iter();
        reads.try_for_each(|read| read.before(stream, scope)).map_err(|error| self.cuda(ORDERING, &error))
    }

    /// Enqueues a copy of lines, given by their first address and pitch.
    fn take(
        &self,
        (from, from_pitch): (u64, usize),
        (to, to_pitch): (u64, usize),
        width: usize,
        lines: usize,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if width == 0 || lines == 0 {
            return Ok(());
        }
        // Lines without gaps are one.
        let (width, lines) = if (from_pitch, to_pitch) == (width, width) { (width * lines, 1) } else { (width, lines) };
        let [from_pitch, to_pitch, width] = [from_pitch, to_pitch, width].map(|bytes| bytes as u64);
        let pitches = if lines > 1 { from_pitch | to_pitch } else { 0 };
        let (entry, bytes) = match unit([from, to, pitches, width]) {
            16 => ("take_16", 16),
            4 | 8 => ("take_4", 4),
            _ => ("take_1", 1),
        };
        let lines = u32::try_from(lines).unwrap_or(u32::MAX);
        let state = self.exchange.state_address();
        let take = Take { state, from, to, from_pitch, to_pitch, width, lines, padding: 0 };
        let blocks = u32::try_from((width / bytes).div_ceil(u64::from(THREADS))).unwrap_or(u32::MAX);
        // SAFETY: the kernels take a `Take`, and the entry was chosen for what divides its numbers. Callers pass memory that is as large as they
        // say, and checked; the module lives as long as this value.
        let launched =
            unsafe { self.kernels.launch(entry, [blocks, lines.min(65_535), 1], [THREADS, 1, 1], stream, &take) };
        launched.map_err(|error| self.cuda(entry, &error))
    }

    fn cuda(&self, doing: &str, error: &engram_cuda::Error) -> Error {
        Error::cuda(self.exchange.rank(), doing, error)
    }
}

const ORDERING: &str = "ordering streams";
