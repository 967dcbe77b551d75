//! The exchange of one rank with a GPU.

mod create;
mod launch;

use engram_cuda::raw::{self, MappedWords, Mark, Module, TableArray};
use engram_cuda::{Device, DeviceBuffer, DeviceView, FreeOfNan, IdType, Ids, Stream, StreamRef, Table};

use super::Segments;
use super::choose::Choice;
use super::kernels::{self, Control};
use super::layout::{Agreed, Layout, RowShape};
use crate::exchange::{Algorithm, Config, Output, invalid};
use crate::protocol::words::Poison;
use crate::protocol::{Call, Operation};
use crate::{Error, Group, Result, Step};

/// How `Push` tells that something has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Push {
    /// Every 16 bytes say so themselves: fast for few tokens. Only where 16 bytes arrive as one: within a GPU, and between GPUs where the driver
    /// knows of native atomics ([`Device::has_native_atomics`]), that is over NVLink.
    Lines,
    /// As by lines, but some warps of each block serve while the others collect: fast for many tokens. As [`Push::Lines`] where rows are marked,
    /// decoded, owned by range or of sizes that are not multiples of 8 bytes, and between more than 8 ranks.
    LinesApart,
    /// A flag for each block's share of the rows: for many tokens where lines do not do. Ids come as with [`Push::Lines`] where that can be; else
    /// they have flags too.
    Flags,
}

impl Push {
    /// Whether 16 bytes have to arrive as one.
    pub(super) fn by_lines(self) -> bool {
        self != Self::Flags
    }
}

/// How an exchange goes about it; alike on all ranks, where nothing else is said.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Multiprocessors that its kernels may use, all by default. An exchange takes at most a half of each while it waits for other ranks, so that two
    /// can run at once; more than two need a limit, since kernels that wait must leave room for those that they wait for. May differ between ranks;
    /// the least counts.
    ///
    /// While one of two that run at once waits for other ranks, the driver may make the other one wait for it: where their streams share a hardware
    /// queue (as all do with `CUDA_DEVICE_MAX_CONNECTIONS=1`), and where memory is freed or unregistered, a module loaded or unloaded, or one more of
    /// many streams created meanwhile. Ranks on which that happens the other way round wait for each other until the deadline.
    pub multiprocessors: Option<u32>,
    /// The one way to push, instead of the faster one for each slot.
    pub push: Option<Push>,
    /// Epoch of the last step before the first: tests start just below the wrap.
    pub epoch: u32,
    /// Ranks share host memory even where they could share device memory.
    pub through_host: bool,
    /// Nothing counts on 16 bytes arriving as one, even where they do: ids have flags, and no slot is pushed by lines.
    pub only_flags: bool,
    /// Kernels do not start early, as [`Exchange::run`] says they do. For GPUs that processes of other groups share, and for tools that cannot tell
    /// the edges of a captured graph apart. May differ between ranks: one that sets it is enough.
    pub never_early: bool,
}

/// The exchange of one rank, over memory that all ranks of a group share: of their GPUs, or of the host where those do not reach each other.
///
/// It does what [`Exchange`](crate::Exchange) does, and gives the same rows bit for bit, but on streams: a call enqueues kernels and returns. All
/// ranks make the same calls in the same order. Eager calls are ordered by the exchange, whichever stream they come from; graphs of one exchange
/// must not overlap, which is found and reported.
///
/// Tables lie in device or pinned memory. Where [`Push::Lines`] counts on them to be free of NaN, they stay so as long as the exchange lives:
/// [`Table::wake`] refuses other rows.
///
/// A fault is written to a word of the host's; [`check`](Self::check) reads it without waiting, and each later call fails by it. The exchange that
/// failed leaves zero rows; steps after that, of graphs that are replayed and of calls that nobody could refuse yet, leave the outputs as they find
/// them, so that rows count only while [`check`](Self::check) finds nothing.
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
    /// What rows that go by lines without marks count on, also in graphs: tables that wake keep it.
    _free_of_nan: Vec<FreeOfNan>,
    report: MappedWords,
    /// Whether the data sleeps.
    asleep: bool,
    last_slot: u32,
    /// The last eager call, and the last one of a capture.
    eager: Mark,
    captured: Mark,
    /// Graphs may hold steps, of whose launches nobody tells.
    in_graphs: bool,
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

impl Exchange {
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
    /// From compute capability 9.0 on, and where each rank has a GPU of its own, the kernels of a step start early (programmatic dependent launch):
    /// they may be on the device before what is ahead of them in the stream is done, wait for that first, and let the next kernel do the same once
    /// they wait for other ranks no more. Of the caller's kernels that concerns those that are launched so too. Each of them has to execute
    /// `griddepcontrol.wait` before it touches what kernels before it read or write, and in any case before it ends, since who comes after it counts
    /// on that; and one that waits for other ranks itself must not let the next one start before that is over. In captured graphs the edges
    /// between kernels are programmatic then.
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
        // What else reads the rows.
        self.device.synchronize().map_err(|error| self.cuda("waiting", &error))?;
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
    /// An exchange with steps in graphs first waits for all that the device does, as [`sleep`](Self::sleep) does: of several ones, end those in the
    /// same order on all ranks.
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

    /// A step without rows after all others, waited for. Not for the whole device, unless graphs may still run: on it may be a step of another
    /// exchange that waits for a rank which waits for this one.
    fn together(&mut self, operation: Operation) -> Result<()> {
        self.check()?;
        if self.in_graphs {
            self.device.synchronize().map_err(|error| self.cuda("waiting", &error))?;
        }
        let stream = self.own_stream.as_ref();
        let ordered = self.eager.before(stream, self.scope(stream)?);
        ordered.map_err(|error| self.cuda("ordering streams", &error))?;
        self.enqueue_meeting(operation, stream)?;
        self.own_stream.synchronize().map_err(|error| self.cuda("waiting for the other ranks", &error))?;
        match self.check() {
            Err(fault @ Error::Fault(_)) => Err(fault),
            _ => Ok(()),
        }
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
        self.in_graphs |= scope.capture().is_some();
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

/// Counts that the layout has bounded.
fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
