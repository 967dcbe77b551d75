//! The exchange of one rank with a GPU.

use std::ops::Range;

use engram_core::Ownership;
use engram_cuda::kernels::Divisor;
use engram_cuda::raw::{self, MappedWords, Mark, Module, TableArray};
use engram_cuda::{Device, DeviceBuffer, DeviceView, IdType, Ids, Stream, StreamRef, Table};

use super::choose::{Choice, Plan, Way};
use super::kernels::{self, BARRIER, Control, LINE_TILE, NEAR, PUSH, Peer, STEP, THREADS, TILE, WARP};
use super::layout::{Agreed, Layout, RowShape, unit};
use super::{Segments, peer_access};
use crate::exchange::{Algorithm, Config, Output, invalid};
use crate::protocol::words::Poison;
use crate::protocol::{Call, LINE, MAX_WORLD, Operation, Word};
use crate::{Error, Group, PeerAccess, Registration, Result, Step};

/// How `Push` tells that something has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Push {
    /// Every 16 bytes say so themselves: fast for few tokens. Needs links that deliver 16 bytes as one.
    Lines,
    /// A flag for each block's share of ids and rows: fast for many tokens.
    Flags,
}

/// How an exchange goes about it; alike on all ranks, where nothing else is said.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Multiprocessors that its kernels may use, all by default. An exchange takes at most a half of each, so that two can run at once; more than
    /// two need a limit, since kernels that wait must leave room for those that they wait for. May differ between ranks; the least counts.
    pub multiprocessors: Option<u32>,
    /// The one way to push, instead of the faster one for each slot.
    pub push: Option<Push>,
    /// Epoch of the last step before the first: tests start just below the wrap.
    pub epoch: u32,
    /// Ranks share host memory even where they could share device memory.
    pub through_host: bool,
}

/// The exchange of one rank, over memory that all ranks of a group share: of their GPUs, or of the host where those do not reach each other.
///
/// It does what [`Exchange`](crate::Exchange) does, and gives the same rows bit for bit, but on streams: a call enqueues kernels and returns. All
/// ranks make the same calls in the same order. Eager calls are ordered by the exchange, whichever stream they come from; graphs of one exchange
/// must not overlap, which is found and reported.
///
/// Tables lie in device or pinned memory. A fault is written to a word of the host's; [`check`](Self::check) reads it without waiting, and each
/// later call fails by it. The exchange that failed leaves zero rows; graphs that are replayed afterwards leave the outputs as they find them, so
/// that their rows count only while [`check`](Self::check) finds nothing.
#[derive(Debug)]
pub struct Exchange {
    device: Device,
    config: Config,
    choice: Choice,
    layout: Layout,
    agreed: Agreed,
    rank: usize,
    world: usize,
    barrier: Module,
    push: Module,
    tables: TableArray,
    report: MappedWords,
    /// Whether the data sleeps.
    asleep: bool,
    last_slot: u32,
    /// The last eager call, and the last one of a capture.
    eager: Mark,
    captured: Mark,
    own_stream: Stream,
    /// What all launches have in common.
    base: kernels::Exchange,
    /// [`kernels::Peer`]s and [`kernels::Layer`]s.
    _arrays: [DeviceBuffer; 2],
    /// Outputs that other ranks do not write to.
    _outputs: Option<DeviceBuffer>,
    segments: Segments,
}

/// The rows of an exchange, in device memory at addresses that stay: valid once the stream's work is done, until the exchange's next run.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The rows, in the form of [`Config::output`], for all of the capacity.
    pub rows: DeviceView<'a>,
    /// With [`Output::Mx`], the scales.
    pub scales: Option<DeviceView<'a>>,
    /// Tokens of the slot; those past the ids' tokens are zero rows.
    pub slot: u32,
}

/// What an exchange reports to the host.
const REPORT_WORDS: usize = 4;

/// What ranks tell each other of themselves before they allocate.
#[derive(serde::Serialize, serde::Deserialize)]
struct Traits {
    blocks: u32,
    free_of_nan: bool,
    /// Rows that the rank has, a layer.
    rows: Vec<Range<u64>>,
}

impl Exchange {
    /// An exchange of the whole group, over memory that is allocated for it. Collective. `name` tells it from the group's other exchanges.
    ///
    /// `tables` are what this rank owns, one a layer; a rank that owns nothing may leave them out. Which way to push pays for which slot is
    /// measured here, on all ranks together, unless the options say.
    ///
    /// # Errors
    /// On all ranks, when one of them fails: [`Error::Invalid`] for a config that contradicts itself, and tables of another format or without rows
    /// that the rank owns; [`Error::Disagreement`] when ranks bring another name, config or options; [`Error::Memory`] and [`Error::Cuda`].
    pub fn create(
        group: &mut Group,
        device: &Device,
        name: &str,
        config: Config,
        tables: &[Table],
        options: &Options,
    ) -> Result<Self> {
        let (rank, world) = (group.rank(), group.world());
        let checked = check(&config, world, rank, tables);
        group.agree(Step::Register, checked)?;
        group.register(&[Registration {
            name: name.to_owned(),
            bytes: u64::from(config.capacity),
            dtype: config.layers[0].format.kind().to_string(),
            digest: config.digest(),
        }])?;
        let memory = if options.through_host { ", through the host" } else { "" };
        let said = format!("{:?} from epoch {}{memory}", options.push, options.epoch);
        group.agree_on_value(Step::Register, "the options of the exchange", &said)?;

        let access = if options.through_host {
            PeerAccess::Host(crate::access::Reason::HostBackend)
        } else {
            peer_access(group, device)?
        };
        let (agreed, rows) = agree(group, device, access, tables, options)?;
        let layout = Layout::new(&config, world, agreed);
        let layout = group.agree(Step::Register, layout)?;
        if options.push == Some(Push::Lines) && layout.line_tokens < config.capacity {
            let expected = format!("at most {} to push by lines", layout.line_tokens);
            return Err(invalid("capacity", &config.capacity, &expected));
        }
        let segments = Segments::allocate(group, device, access, layout.signal_bytes, layout.data_bytes, 0xff)?;
        let built = Self::build(device, config, tables, options, agreed, layout, segments, (rank, world));
        let mut exchange = group.agree(Step::Publish, built)?;
        let plan = exchange.plan(options);
        exchange.choice = plan.measure(&mut exchange, group, &rows)?;
        exchange.last_slot = 0;
        Ok(exchange)
    }

    #[expect(clippy::too_many_arguments, reason = "what a constructor has decided so far")]
    fn build(
        device: &Device,
        config: Config,
        tables: &[Table],
        options: &Options,
        agreed: Agreed,
        layout: Layout,
        segments: Segments,
        (rank, world): (usize, usize),
    ) -> Result<Self> {
        let cuda = |error: engram_cuda::Error| Error::cuda(rank, "creating an exchange", &error);
        let peers: Vec<u64> = (0..world).flat_map(|peer| [segments.signals(peer), segments.data(peer)]).collect();
        let layers: Vec<u32> = config.layers.iter().flat_map(layer_words).collect();
        let arrays = [
            DeviceBuffer::from_slice(device, &peers).map_err(cuda)?,
            DeviceBuffer::from_slice(device, &layers).map_err(cuda)?,
        ];
        let report = MappedWords::new(device, REPORT_WORDS).map_err(cuda)?;
        (0..REPORT_WORDS).for_each(|word| report.store(word, 0));
        let tables = TableArray::new(device, tables).map_err(cuda)?;
        let row = layout.row;
        let outputs = if agreed.direct {
            None
        } else {
            Some(DeviceBuffer::new(device, row.out_bytes.next_multiple_of(256) + row.scales_bytes).map_err(cuda)?)
        };
        let (out, out_scales) = match &outputs {
            None => (segments.data(rank) + layout.out as u64, segments.data(rank) + layout.out_scales as u64),
            Some(buffer) => (buffer.address(), buffer.address() + row.out_bytes.next_multiple_of(256) as u64),
        };
        // The steps that measure come before the first.
        let plan = Plan::new(world, config.capacity, layout.line_tokens, agreed.blocks, options.push);
        let last = options.epoch.wrapping_sub(plan.exchanges());
        start_after(device, &segments, (rank, world), last).map_err(cuda)?;
        let mut near = [Peer::default(); NEAR];
        for (rank, peer) in near.iter_mut().enumerate().take(world) {
            *peer = Peer { signals: segments.signals(rank), data: segments.data(rank) };
        }
        let base = base(
            &config,
            &layout,
            agreed,
            (rank, world),
            &Addresses {
                control: segments.signals(rank),
                near,
                far: arrays[0].address(),
                layer_info: arrays[1].address(),
                report: report.address(),
                tables: if tables.handles().is_empty() { 0 } else { tables.address() },
                out,
                out_scales,
            },
            &tables,
        );
        let exchange = Self {
            device: device.clone(),
            choice: plan.first(),
            layout,
            agreed,
            rank,
            world,
            barrier: Module::load(device, &BARRIER).map_err(cuda)?,
            push: Module::load(device, &PUSH).map_err(cuda)?,
            tables,
            report,
            asleep: false,
            last_slot: 0,
            eager: Mark::new(device).map_err(cuda)?,
            captured: Mark::new(device).map_err(cuda)?,
            own_stream: Stream::new(device).map_err(cuda)?,
            base,
            _arrays: arrays,
            _outputs: outputs,
            segments,
            config,
        };
        exchange.clear_outputs()?;
        Ok(exchange)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks in the group.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What it moves.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Which way to push slots of which size, as was measured.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Enqueues an exchange: brings the rows of `ids` and serves the other ranks theirs. Collective. May be captured.
    ///
    /// `slot` is how many tokens each rank has room for in this exchange, alike on all ranks, with the ids' tokens `<= slot <= capacity`; rows from
    /// the ids' tokens on are zero rows, and so are those of ids that nobody owns.
    ///
    /// # Errors
    /// [`Error::Invalid`] for ids or a slot that do not fit, [`Error::Asleep`]; then this rank has not taken part. [`Error::Fault`] when the group
    /// has failed before. A fault of this exchange shows in [`check`](Self::check) once the stream's work is done; its rows are zero then.
    pub fn run(&mut self, ids: &Ids<'_>, slot: u32, algorithm: Algorithm, stream: StreamRef<'_>) -> Result<Rows<'_>> {
        let param = self.admit(ids, slot)?;
        self.in_order(stream, |exchange| match algorithm {
            Algorithm::Barrier => exchange.enqueue_barrier(param, stream, false),
            Algorithm::Push => exchange.enqueue_push(param, stream),
        })?;
        self.last_slot = slot;
        Ok(self.rows())
    }

    /// As [`run`](Self::run) by [`Algorithm::Barrier`], for a caller who reads the rows where their owners left them: gives the address of each
    /// owner's packed rows for this rank, `[slot][layers][own columns][row_bytes]`, by owner. Valid once the stream's work is done, until the next
    /// run. Where rows are owned, each owner's are those of its ids alone.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_shared(&mut self, ids: &Ids<'_>, slot: u32, stream: StreamRef<'_>) -> Result<Vec<u64>> {
        let param = self.admit(ids, slot)?;
        self.in_order(stream, |exchange| exchange.enqueue_barrier(param, stream, true))?;
        let requester_bytes = |owner: usize| {
            let columns = self.columns_of(owner) as u64;
            u64::from(slot) * self.config.layers.len() as u64 * columns * self.row_bytes() as u64
        };
        let base = |owner: usize| {
            self.segments.data(owner) + self.layout.shared_rows as u64 + self.rank as u64 * requester_bytes(owner)
        };
        Ok((0..self.world).map(base).collect())
    }

    /// The rows of the last exchange that was enqueued by a call, all zero if it failed.
    #[must_use]
    pub fn rows(&self) -> Rows<'_> {
        let row = &self.layout.row;
        // SAFETY: the outputs live as long as this value, of which dropping waits for the device.
        let view = |address: u64, bytes: usize| unsafe { DeviceView::from_raw(address, bytes as u64) };
        Rows {
            rows: view(self.base.out, row.out_bytes),
            scales: (self.config.output == Output::Mx).then(|| view(self.base.out_scales, row.scales_bytes)),
            slot: self.last_slot,
        }
    }

    /// The fault by which the group has failed, as far as this rank's device has found out; waits for nobody.
    ///
    /// # Errors
    /// [`Error::Fault`]; and [`Error::Asleep`] when a graph was replayed while the exchange slept.
    pub fn check(&self) -> Result<()> {
        let word = self.report.load(0);
        if word != 0 {
            let (ours, theirs) = (self.report.load(1), self.report.load(2));
            return Err(Poison { word, ours, theirs }.fault(self.rank, Call::from_word(ours)).into());
        }
        if self.report.load(3) != 0 { Err(Error::Asleep) } else { Ok(()) }
    }

    /// Gives the memory for ids and rows back, on all ranks. Collective, and waits. Signals stay; a call or replay meanwhile reports
    /// [`Error::Asleep`].
    ///
    /// # Errors
    /// [`Error::Asleep`] when it sleeps already, [`Error::Fault`] when the group fails, and what the driver refuses.
    pub fn sleep(&mut self) -> Result<()> {
        self.require_awake()?;
        self.together(Operation::Sleep)?;
        self.set_state(kernels::ASLEEP)?;
        self.asleep = true;
        self.segments.discard()
    }

    /// Takes memory again, at the same addresses: graphs go on as before. Collective, and waits. `group` is the one that the exchange was created
    /// with, or another one of the same ranks.
    ///
    /// # Errors
    /// [`Error::Awake`] when it does not sleep. When one rank gets no memory, that error on all of them; they sleep on.
    pub fn wake(&mut self, group: &mut Group) -> Result<()> {
        if !self.asleep {
            return Err(Error::Awake);
        }
        self.segments.reserve(group)?;
        let cleared = self.clear_outputs();
        if let Err(error) = group.agree(Step::Publish, cleared) {
            // The error that is told is the first one.
            let _ = self.segments.discard();
            return Err(error);
        }
        self.set_state(0)?;
        self.report.store(3, 0);
        self.asleep = false;
        Ok(())
    }

    /// Ends the exchange together with all ranks, and waits for them. Collective, unless the group has failed: then this only ends it here.
    ///
    /// # Errors
    /// [`Error::Fault`] when the group fails now.
    pub fn close(mut self) -> Result<()> {
        if matches!(self.check(), Err(Error::Fault(_))) {
            return Ok(());
        }
        if self.asleep {
            self.set_state(0)?;
            // A replay meanwhile is no reason to stay.
            self.report.store(3, 0);
        }
        self.together(Operation::Close)
    }

    /// Enqueues a step without rows on a stream: a barrier between all ranks, as it costs alone. Collective. May be captured.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn barrier(&mut self, stream: StreamRef<'_>) -> Result<()> {
        self.require_awake()?;
        self.check()?;
        self.in_order(stream, |exchange| exchange.enqueue_meeting(Operation::Meet, stream))
    }

    /// A step without rows, waited for.
    fn together(&mut self, operation: Operation) -> Result<()> {
        self.check()?;
        // For graphs too, whose launches nobody has told of: their steps come before this one.
        self.device.synchronize().map_err(|error| self.cuda("waiting", &error))?;
        self.enqueue_meeting(operation, self.own_stream.as_ref())?;
        self.own_stream.synchronize().map_err(|error| self.cuda("waiting for the other ranks", &error))?;
        match self.check() {
            Err(fault @ Error::Fault(_)) => Err(fault),
            _ => Ok(()),
        }
    }

    fn enqueue_meeting(&self, operation: Operation, stream: StreamRef<'_>) -> Result<()> {
        let param = kernels::Exchange { operation: u32::from(operation.code()), slot: 0, tokens: 0, ..self.base };
        // A warp more than speak to others.
        let threads = (narrow(self.world).next_multiple_of(WARP) + WARP).min(THREADS);
        self.launch(&self.barrier, "barrier_meet", Grid { blocks: 1, threads }, stream, &param)
    }

    fn enqueue_barrier(&self, param: kernels::Exchange, stream: StreamRef<'_>, shared: bool) -> Result<()> {
        let param = kernels::Exchange { operation: u32::from(Operation::Barrier.code()), ..param };
        let rows = param.slot * param.layers * param.columns;
        let grid = |rows: u32, a_block: u32| self.full(rows.div_ceil(a_block));
        self.launch(&self.barrier, "barrier_announce", grid(rows, 4 * THREADS), stream, &param)?;
        self.launch(&self.barrier, "barrier_serve", grid(rows, THREADS / WARP * TILE), stream, &param)?;
        if shared {
            return self.launch(&self.barrier, "barrier_settle", self.full(1), stream, &param);
        }
        self.launch(&self.barrier, "barrier_pull", grid(rows, THREADS / WARP * TILE), stream, &param)
    }

    fn enqueue_push(&self, param: kernels::Exchange, stream: StreamRef<'_>) -> Result<()> {
        let lines = param.slot * param.layers * param.pairs;
        let Way { push, blocks } = self.choice.way(param.slot);
        let (tile, grid) = push_grid(push, lines, param.world, blocks);
        let operation = u32::from(Operation::Push.code());
        let param = kernels::Exchange {
            operation,
            line_count: lines,
            tile,
            tiles: lines.div_ceil(tile),
            self_tile: (tile * 4).min(LINE_TILE),
            ..param
        };
        // A table that is loaded again may have what serves as the mark.
        if push == Push::Lines
            && !self.agreed.marked
            && let Some(layer) = self.tables.handles().iter().position(|table| !table.is_free_of_nan())
        {
            return Err(invalid(
                &format!("table of layer {layer}"),
                &"one with NaN",
                "free of NaN, as it was at first",
            ));
        }
        let entry = match push {
            Push::Lines if self.agreed.marked => "push_lines_marked",
            Push::Lines if param.is_plain() => "push_lines_plain",
            Push::Lines => "push_lines_unmarked",
            Push::Flags if param.is_plain() => "push_flags_plain",
            Push::Flags => "push_flags_any",
        };
        self.launch(&self.push, entry, grid, stream, &param)
    }

    /// A grid of whole blocks.
    fn full(&self, blocks: u32) -> Grid {
        Grid { blocks: blocks.clamp(1, self.agreed.blocks), threads: THREADS }
    }

    fn launch(
        &self,
        module: &Module,
        entry: &'static str,
        grid: Grid,
        stream: StreamRef<'_>,
        param: &kernels::Exchange,
    ) -> Result<()> {
        // SAFETY: every entry takes `kernels::Exchange`. Its addresses are those of memory that this value holds, and that dropping it waits for;
        // `Ids` vouches for the ids. Sizes were checked by `admit`.
        let launched = unsafe { module.launch(entry, [grid.blocks, 1, 1], [grid.threads, 1, 1], stream, param) };
        launched.map_err(|error| self.cuda(entry, &error))
    }

    /// Runs `enqueue` after the group's last eager call, or after its last one in the same capture.
    fn in_order(&mut self, stream: StreamRef<'_>, enqueue: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let scope = self.scope(stream)?;
        let mark = |exchange: &Self| {
            if scope.capture().is_none() {
                exchange.eager.before(stream, scope)
            } else {
                exchange.captured.before(stream, scope)
            }
        };
        mark(self).map_err(|error| self.cuda("ordering streams", &error))?;
        enqueue(self)?;
        let mark = if scope.capture().is_none() { &mut self.eager } else { &mut self.captured };
        let recorded = mark.record(stream, scope);
        recorded.map_err(|error| self.cuda("ordering streams", &error))
    }

    /// The scope of a stream, which must be of this device.
    pub(super) fn scope(&self, stream: StreamRef<'_>) -> Result<engram_cuda::Scope> {
        let scope = stream.check_device(&self.device).and_then(|()| stream.scope(&self.device));
        scope.map_err(|error| self.cuda("asking whether a stream is captured", &error))
    }

    /// Refuses what this rank can refuse by itself.
    pub(super) fn admit(&self, ids: &Ids<'_>, slot: u32) -> Result<kernels::Exchange> {
        self.require_awake()?;
        self.check()?;
        let shape = *ids.shape();
        let expected = (self.config.layers.len(), self.config.columns);
        if (shape.layers, shape.columns) != expected {
            let found = format!("{:?}", (shape.layers, shape.columns));
            return Err(invalid("layers and columns of the ids", &found, &format!("{expected:?}")));
        }
        if shape.id_type != IdType::I32 {
            return Err(invalid("type of the ids", &format!("{:?}", shape.id_type), "I32"));
        }
        let fits = |slot: &u32| usize::try_from(*slot).is_ok_and(|slot| shape.tokens <= slot);
        if !(1..=self.config.capacity).contains(&slot) || !fits(&slot) {
            let expected = format!("at least 1 and the {} tokens, at most {}", shape.tokens, self.config.capacity);
            return Err(invalid("slot", &slot, &expected));
        }
        ids.check_device(&self.device).map_err(|error| self.cuda("looking at the ids", &error))?;
        if let Some(layer) = self.tables.handles().iter().position(Table::is_asleep) {
            return Err(invalid(&format!("table of layer {layer}"), &"asleep", "awake"));
        }
        Ok(kernels::Exchange {
            ids: ids.address() + (shape.first_layer * shape.columns * IdType::I32.bytes()) as u64,
            token_stride: i64::try_from(shape.token_stride).unwrap_or(i64::MAX),
            tokens: narrow(shape.tokens),
            slot,
            ..self.base
        })
    }

    /// How rows lie in the outputs.
    pub(super) fn row_shape(&self) -> &RowShape {
        &self.layout.row
    }

    /// Where kernels find [`Control::state`]; the address stays while the exchange sleeps.
    pub(super) fn state_address(&self) -> u64 {
        self.segments.signals(self.rank) + std::mem::offset_of!(Control, state) as u64
    }

    /// What there is to measure.
    fn plan(&self, options: &Options) -> Plan {
        Plan::new(self.world, self.config.capacity, self.layout.line_tokens, self.agreed.blocks, options.push)
    }

    pub(super) fn set_choice(&mut self, choice: Choice) {
        self.choice = choice;
    }

    fn require_awake(&self) -> Result<()> {
        if self.asleep { Err(Error::Asleep) } else { Ok(()) }
    }

    fn row_bytes(&self) -> usize {
        self.layout.row.value_bytes + self.layout.row.scale_bytes
    }

    fn columns_of(&self, owner: usize) -> usize {
        self.config.layers[0].ownership.columns_of(self.config.columns, owner).len()
    }

    fn clear_outputs(&self) -> Result<()> {
        let row = &self.layout.row;
        for (address, bytes) in [(self.base.out, row.out_bytes), (self.base.out_scales, row.scales_bytes)] {
            // SAFETY: the outputs are this value's own and of that size.
            let filled = unsafe { raw::fill(&self.device, address, 0, bytes) };
            filled.map_err(|error| self.cuda("clearing the outputs", &error))?;
        }
        Ok(())
    }

    fn set_state(&self, state: u64) -> Result<()> {
        // SAFETY: a word of this rank's own signals; no kernel of this exchange runs.
        let written = unsafe { raw::write(&self.device, self.state_address(), &[state]) };
        written.map_err(|error| self.cuda("writing the control line", &error))
    }

    fn cuda(&self, doing: &str, error: &engram_cuda::Error) -> Error {
        Error::cuda(self.rank, doing, error)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // Kernels under way use the memory that goes next. They end by their deadline at the latest.
        let _ = self.device.synchronize();
    }
}

/// Blocks of a launch, and threads of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grid {
    blocks: u32,
    threads: u32,
}

/// How a push is launched, for `lines` lines of each owner: lines that a warp takes at a time, and the grid. Alike on all ranks.
///
/// Few tokens spread over many blocks. Where there are more tiles to serve than warps, warps take as few turns as large tiles allow, and tiles are as
/// small as those turns allow. By lines, a rank takes its own rows in larger tiles, and what others send in a turn of its own.
fn push_grid(push: Push, lines: u32, world: u32, blocks: u32) -> (u32, Grid) {
    let warps = u64::from(blocks * (THREADS / WARP));
    // Four times the turns' tiles, and their lines.
    let served = match push {
        Push::Lines => u64::from(lines) * u64::from(4 * (world - 1) + 1),
        Push::Flags => u64::from(lines) * u64::from(4 * world),
    };
    let turns = served.div_ceil(4 * warps * u64::from(LINE_TILE)).max(1);
    let tile = u32::try_from(served.div_ceil(4 * warps * turns)).unwrap_or(LINE_TILE).clamp(1, LINE_TILE);
    let tiles = lines.div_ceil(tile);
    let blocks = tiles.clamp(1, blocks);
    let jobs_of_a_tile = if push == Push::Lines { 2 * world - 1 } else { world };
    // One more, which has nothing else to do than to see that all ranks call the same.
    let jobs = tiles.div_ceil(blocks).saturating_mul(jobs_of_a_tile).saturating_add(1);
    (tile, Grid { blocks, threads: jobs.saturating_mul(WARP).clamp(WARP * 2, THREADS) })
}

/// What follows from what all ranks say of themselves; and the rows that each has, a layer.
fn agree(
    group: &mut Group,
    device: &Device,
    access: PeerAccess,
    tables: &[Table],
    options: &Options,
) -> Result<(Agreed, Vec<Vec<Range<u64>>>)> {
    let all = device.multiprocessors();
    let own = Traits {
        blocks: options.multiprocessors.unwrap_or(all).clamp(1, all),
        free_of_nan: tables.iter().all(Table::is_free_of_nan),
        rows: tables.iter().map(Table::rows).collect(),
    };
    let own = serde_json::to_vec(&own).expect("plain data has a JSON form");
    // GPUs deliver 16 bytes to each other as one; to the host nothing says so.
    let direct = matches!(access, PeerAccess::Direct(_));
    let mut agreed = Agreed { blocks: u32::MAX, marked: false, direct, lines: direct };
    let mut rows = Vec::new();
    for (rank, traits) in group.all_gather(&own)?.iter().enumerate() {
        let traits: Traits = serde_json::from_slice(traits).map_err(|error| Error::Unreadable {
            rank,
            step: Step::Register,
            found: error.to_string(),
        })?;
        agreed.blocks = agreed.blocks.min(traits.blocks);
        agreed.marked |= !traits.free_of_nan;
        rows.push(traits.rows);
    }
    Ok((agreed, rows))
}

/// Refuses configs that contradict themselves, and tables that lack what this rank owns.
fn check(config: &Config, world: usize, rank: usize, tables: &[Table]) -> Result<()> {
    config.check(world)?;
    if world > MAX_WORLD || world > usize::try_from(THREADS).unwrap_or(0) {
        return Err(invalid("ranks of the group", &world, &format!("at most {}", MAX_WORLD.min(512))));
    }
    let owned = |layer: usize| match config.layers[layer].ownership {
        Ownership::Heads(shards) => (!shards.columns_of(rank).is_empty()).then_some(0..0),
        Ownership::Rows(shards) => Some(shards.range(rank)).filter(|rows| !rows.is_empty()),
    };
    let layers = config.layers.len();
    if tables.is_empty() && (0..layers).all(|layer| owned(layer).is_none()) {
        return Ok(());
    }
    if tables.len() != layers {
        return Err(invalid(&format!("tables of rank {rank}"), &tables.len(), &format!("{layers}, one a layer")));
    }
    for (index, (table, layer)) in tables.iter().zip(&config.layers).enumerate() {
        if table.format() != &layer.format {
            let (found, expected) = (format!("{:?}", table.format()), format!("{:?}", layer.format));
            return Err(invalid(&format!("format of the table of layer {index}"), &found, &expected));
        }
        let rows = table.rows();
        let missing =
            owned(index).filter(|owned| !owned.is_empty() && (owned.start < rows.start || owned.end > rows.end));
        if let Some(missing) = missing {
            let (found, expected) = (format!("{rows:?}"), format!("all of {missing:?}"));
            return Err(invalid(&format!("rows of the table of layer {index}"), &found, &expected));
        }
    }
    Ok(())
}

/// [`kernels::Layer`] as words.
fn layer_words(layer: &crate::exchange::Layer) -> [u32; 4] {
    let (rows_a_rank, rows) = match layer.ownership {
        Ownership::Heads(_) => (0, 0),
        // Ids are below 2^31, and so are the tables that kernels read.
        Ownership::Rows(shards) => {
            (u32::try_from(shards.per_rank()).unwrap_or(u32::MAX), u32::try_from(shards.rows()).unwrap_or(1 << 31))
        }
    };
    [rows_a_rank, rows, layer.format.global_scale().unwrap_or(0.0).to_bits(), 0]
}

/// Writes the signals of a group that has done steps up to `last`.
fn start_after(
    device: &Device,
    segments: &Segments,
    (rank, world): (usize, usize),
    last: u32,
) -> Result<(), engram_cuda::Error> {
    let own = segments.signals(rank);
    let control = [u64::from(last) * STEP, 0, u64::from(last), 0, 0];
    // SAFETY: within this rank's own signals, which nobody uses before all ranks have met.
    unsafe { raw::write(device, own, &control) }?;
    let call = Call { epoch: last, operation: Operation::Unknown(0), slot: 0 }.to_word();
    for peer in 0..world {
        let line = own + (LINE * (1 + peer) + 8 * Word::Call as usize) as u64;
        // SAFETY: as above.
        unsafe { raw::write(device, line, &[call, call]) }?;
    }
    Ok(())
}

/// Addresses that launches have in common.
struct Addresses {
    control: u64,
    near: [Peer; NEAR],
    far: u64,
    layer_info: u64,
    report: u64,
    tables: u64,
    out: u64,
    out_scales: u64,
}

/// What launches have in common.
fn base(
    config: &Config,
    layout: &Layout,
    agreed: Agreed,
    (rank, world): (usize, usize),
    addresses: &Addresses,
    tables: &TableArray,
) -> kernels::Exchange {
    let row = layout.row;
    let (values, scales) = (row.value_bytes as u64, row.scale_bytes as u64);
    let table_bits = tables.tables().iter().flat_map(|table| {
        let with_scales = if scales > 0 { table.scales | table.scale_stride } else { 0 };
        [table.values, table.value_stride, with_scales]
    });
    let heads_a_rank = match config.layers[0].ownership {
        Ownership::Heads(shards) => shards.per_rank(),
        Ownership::Rows(_) => 0,
    };
    let out_strides = [row.out_token, row.out_layer, row.out_column].map(|bytes| bytes as u64);
    let out_scales = if config.output == Output::Packed { scales } else { 0 };
    kernels::Exchange {
        control: addresses.control,
        far: addresses.far,
        tables: addresses.tables,
        layer_info: addresses.layer_info,
        ids: 0,
        token_stride: 0,
        report: addresses.report,
        // With room for what kernels add to it.
        deadline_ns: u64::try_from(config.deadline.as_nanos()).map_or(u64::MAX >> 1, |ns| ns.clamp(1, u64::MAX >> 1)),
        out: addresses.out,
        out_scales: addresses.out_scales,
        out_token: row.out_token as u64,
        out_layer: row.out_layer as u64,
        out_column: row.out_column as u64,
        scales_layer: row.scales_layer as u64,
        peer_out: layout.out as u64,
        peer_scales: layout.out_scales as u64,
        shared_ids: layout.shared_ids as u64,
        shared_rows: layout.shared_rows as u64,
        lines: layout.lines as u64,
        landing: layout.landing as u64,
        pushed_rows: layout.pushed_rows as u64,
        flags: layout.flags as u64,
        rank: narrow(rank),
        world: narrow(world),
        layers: narrow(config.layers.len()),
        columns: narrow(config.columns),
        heads_a_rank: narrow(heads_a_rank),
        capacity: config.capacity,
        tokens: 0,
        slot: 0,
        operation: 0,
        form: row.form,
        straight: layout.straight.into(),
        flagged_ids: (!agreed.lines).into(),
        value_bytes: narrow(row.value_bytes),
        scale_bytes: narrow(row.scale_bytes),
        value_chunks: narrow(row.value_chunks),
        chunks: narrow(row.chunks),
        unit: unit(table_bits.chain([values, scales])),
        out_unit: unit(out_strides.into_iter().chain([addresses.out, values, out_scales])),
        scale_tiles: narrow(row.scale_tiles),
        pairs: narrow(layout.pairs),
        flag_blocks: agreed.blocks,
        tile: 1,
        tiles: 0,
        self_tile: 1,
        halves: narrow(row.value_bytes / 8),
        line_count: 0,
        by_columns: Divisor::new(narrow(config.columns)),
        by_layers: Divisor::new(narrow(config.layers.len())),
        by_chunks: Divisor::new(narrow(row.chunks)),
        by_value_chunks: Divisor::new(narrow(row.value_chunks)),
        by_halves: Divisor::new(narrow(row.value_bytes / 8)),
        by_pairs: Divisor::new(narrow(layout.pairs)),
        near: addresses.near,
    }
}

/// Counts that the layout has bounded.
fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// 2 layers of 24 heads between two ranks: 12 lines a token.
    #[test]
    fn few_tokens_are_a_line_a_warp_and_many_fill_their_turns() {
        let grid = |blocks, threads| Grid { blocks, threads };
        assert_eq!(push_grid(Push::Lines, 12, 2, 132), (1, grid(12, 4 * WARP)));
        assert_eq!(push_grid(Push::Lines, 128 * 12, 2, 132), (1, grid(132, THREADS)));
        assert_eq!(push_grid(Push::Lines, 256 * 12, 2, 132), (2, grid(132, THREADS)));
        // Two turns of 6 lines rather than of 8, of which the second would be half empty.
        assert_eq!(push_grid(Push::Flags, 1024 * 12, 2, 132), (6, grid(132, THREADS)));
        assert_eq!(push_grid(Push::Flags, 2048 * 12, 2, 132), (8, grid(132, THREADS)));
    }

    proptest! {
        #[test]
        fn grids_keep_to_their_limits(lines in 1..1_u32 << 28, world in 1..512_u32, blocks in 1..200_u32, by_lines: bool) {
            let push = if by_lines { Push::Lines } else { Push::Flags };
            let (tile, grid) = push_grid(push, lines, world, blocks);
            prop_assert!((1..=LINE_TILE).contains(&tile));
            prop_assert!((1..=blocks).contains(&grid.blocks) && grid.blocks <= lines.div_ceil(tile));
            prop_assert!((2 * WARP..=THREADS).contains(&grid.threads) && grid.threads.is_multiple_of(WARP));
        }
    }
}
