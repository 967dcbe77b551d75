//! The exchange of rows between the ranks of a group.

mod config;
mod ids;
mod output;
mod payload;
mod segment;

use std::ops::Range;

use engram_core::Ownership;

pub use config::{Algorithm, Config, Layer, Output, Part};
pub use ids::Ids;
pub use output::Rows;

pub(crate) use config::invalid;
use output::Buffers;
use payload::{HostPayload, Unread};
use segment::{Segment, Sizes};

use crate::host::HostMemory;
use crate::memory::Memory;
use crate::protocol::{Call, Failure, Fault, MAX_WORLD, Operation, Patience, Payload, Protocol, Spins};
use crate::{Error, Group, Registration, Result, Step};

/// The exchange of one rank, over host memory that all ranks of a group share.
///
/// Every rank brings the ids of its own tokens and gets their rows, each from the rank that owns it. All ranks do the
/// same operations in the same order: [`run`](Self::run), [`sleep`](Self::sleep), [`wake`](Self::wake) and
/// [`close`](Self::close) are collective, and ranks that disagree on one fail with [`Fault::Mismatch`]. A rank that a
/// fault is reported to cannot use the exchange any more; all it can do is [`close`](Self::close) it.
///
/// Dropping it touches nothing but this process: the other ranks wait for the deadline if they still need this one.
#[derive(Debug)]
pub struct Exchange<M> {
    memory: M,
    plan: Plan,
    parts: Vec<Part>,
    protocol: Protocol,
    scratch: Scratch,
    output: Buffers,
    /// Tokens of the slot of the last exchange.
    last_slot: usize,
    spins: Spins,
    config: Config,
}

/// What does not change between exchanges.
#[derive(Debug)]
struct Plan {
    rank: usize,
    world: usize,
    columns: usize,
    /// Tokens of the largest slot.
    capacity: usize,
    layers: Vec<Layer>,
    segment: Segment,
    /// Ids that are looked up at once, if a token has no more than that.
    batch_ids: usize,
    zero_row: Vec<u8>,
    /// The ids of a token past the last.
    no_ids: Vec<i32>,
}

/// Buffers of this rank's own, so that an exchange allocates nothing and tables never see shared memory.
#[derive(Debug)]
struct Scratch {
    ids: Vec<i32>,
    places: Vec<usize>,
    rows: Vec<u8>,
    run: Vec<u8>,
}

impl Plan {
    /// Rows of about a megabyte: enough to keep a disk busy, few enough to stay in the cache.
    const BATCH_IDS: usize = 4096;

    fn row_bytes(&self) -> usize {
        self.zero_row.len()
    }

    /// The columns of which `rank` may own rows.
    fn columns_of(&self, rank: usize) -> Range<usize> {
        self.layers[0].ownership.columns_of(self.columns, rank)
    }

    /// Index in `[requester][capacity][layers][own columns]`, where the owner has `run` columns. Not by slot: a requester
    /// may be one exchange ahead of another whose ids are still to be read, and must not write where those lie.
    fn pushed_index(&self, requester: usize, token: usize, layer: usize, run: usize) -> usize {
        ((requester * self.capacity + token) * self.layers.len() + layer) * run
    }

    /// Index in `[requester][slot][layers][own columns]`, where the owner has `run` columns.
    fn own_index(&self, slot: usize, requester: usize, token: usize, layer: usize, run: usize) -> usize {
        ((requester * slot + token) * self.layers.len() + layer) * run
    }

    /// Index in `[slot][layers][columns]`.
    fn index(&self, token: usize, layer: usize, column: usize) -> usize {
        (token * self.layers.len() + layer) * self.columns + column
    }
}

fn segment(config: &Config, world: usize) -> Result<Segment> {
    config.check(world)?;
    if world > MAX_WORLD {
        return Err(invalid("ranks of the group", &world, &format!("at most {MAX_WORLD}")));
    }
    let own_columns = match config.layers[0].ownership {
        Ownership::Heads(shards) => shards.per_rank(),
        Ownership::Rows(_) => config.columns,
    };
    let sizes = usize::try_from(config.capacity).ok().map(|capacity| Sizes {
        world,
        capacity,
        layers: config.layers.len(),
        columns: config.columns,
        own_columns,
        row_bytes: config.layers[0].format.row_bytes(),
    });
    let too_large = || invalid("capacity", &config.capacity, "one whose buffers can be addressed");
    sizes.and_then(Segment::new).ok_or_else(too_large)
}

/// Bytes of memory that an exchange of `world` ranks takes on each of them, a whole number of pages.
///
/// # Errors
/// [`Error::Invalid`] for a config that [`Exchange::new`] would refuse too.
pub fn segment_bytes(config: &Config, world: usize) -> Result<usize> {
    Ok(segment(config, world)?.bytes())
}

impl Exchange<HostMemory> {
    /// An exchange of the whole group, over memory that is allocated for it. Collective. `name` tells it from the group's
    /// other exchanges.
    ///
    /// # Errors
    /// As [`Exchange::new`] and [`HostMemory::allocate`], on all ranks when one of them fails; and
    /// [`Error::Disagreement`] when ranks bring another name or config.
    pub fn create(group: &mut Group, name: &str, config: Config, parts: Vec<Part>) -> Result<Self> {
        let checked = segment_bytes(&config, group.world());
        let bytes = group.agree(Step::Register, checked)?;
        let registration = Registration {
            name: name.to_owned(),
            bytes: bytes as u64,
            dtype: config.layers[0].format.kind().to_string(),
            digest: config.digest(),
        };
        group.register(&[registration])?;
        let memory = HostMemory::allocate(group, bytes)?;
        group.agree(Step::Publish, Self::new(memory, config, parts))
    }
}

impl<M: Memory> Exchange<M> {
    /// An exchange over memory that no rank has used yet, of at least [`segment_bytes`]. `parts` are what this rank
    /// owns of each layer; a rank that owns nothing may leave them out.
    ///
    /// Nothing is said to the other ranks: they create theirs with an equal config by themselves.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the config contradicts itself, when the memory is too small, or when a part is missing, of
    /// another format, or lacks rows that this rank owns.
    pub fn new(memory: M, config: Config, parts: Vec<Part>) -> Result<Self> {
        let (rank, world) = (memory.rank(), memory.world());
        let segment = segment(&config, world)?;
        if memory.bytes() < segment.bytes() {
            return Err(invalid("bytes of a segment", &memory.bytes(), &format!("at least {}", segment.bytes())));
        }
        let Config { columns, ref layers, capacity, .. } = config;
        let format = &layers[0].format;
        let plan = Plan {
            rank,
            world,
            columns,
            capacity: usize::try_from(capacity).unwrap_or(usize::MAX),
            layers: layers.clone(),
            segment,
            batch_ids: Plan::BATCH_IDS.max(columns),
            zero_row: vec![0; format.row_bytes()],
            no_ids: vec![-1; layers.len() * columns],
        };
        check_parts(&plan, &parts)?;
        let too_large = || invalid("capacity", &capacity, "one whose outputs can be addressed");
        let output = Buffers::new(&config).ok_or_else(too_large)?;
        let scratch = Scratch {
            ids: vec![0; plan.batch_ids],
            places: Vec::with_capacity(plan.batch_ids),
            rows: vec![0; plan.batch_ids.saturating_mul(format.row_bytes())],
            run: vec![0; columns * format.row_bytes()],
        };
        Ok(Self {
            protocol: Protocol::new(world),
            memory,
            plan,
            parts,
            scratch,
            output,
            last_slot: 0,
            spins: Spins::default(),
            config,
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.plan.rank
    }

    /// Ranks in the group.
    pub fn world(&self) -> usize {
        self.plan.world
    }

    /// Exchanges rows: brings those of `ids`, and serves the other ranks theirs. Collective.
    ///
    /// `slot` is how many tokens each rank has room for in this exchange, alike on all ranks, with
    /// `ids.tokens() <= slot <= capacity`; rows from `ids.tokens()` on are zero rows. So are those of ids that nobody
    /// owns, -1 among them. The rows stay until the next call.
    ///
    /// # Errors
    /// [`Error::Invalid`] for ids or a slot that do not fit, and [`Error::Asleep`]; then this rank has not taken part.
    /// [`Error::Fault`] when the group has failed, [`Error::Table`] when it has because of this rank's table; then the
    /// rows are all zero.
    pub fn run(&mut self, ids: Ids<'_>, slot: u32, algorithm: Algorithm) -> Result<Rows<'_>> {
        let slot_tokens = self.admit(&ids, slot)?;
        let operation = match algorithm {
            Algorithm::Barrier => Operation::Barrier,
            Algorithm::Push => Operation::Push,
        };
        let mut payload = HostPayload {
            memory: &self.memory,
            plan: &self.plan,
            parts: &self.parts,
            ids,
            push: operation == Operation::Push,
            slot: slot_tokens,
            scratch: &mut self.scratch,
            output: &mut self.output,
        };
        self.last_slot = slot_tokens;
        let mut wait = Patience::new(&self.memory, self.config.deadline, &mut self.spins);
        let done = self.protocol.run(&self.memory, operation, slot, &mut payload, &mut wait);
        drop(wait);
        match done {
            Ok(()) => Ok(self.rows()),
            Err(failure) => {
                self.output.clear_scales(slot_tokens);
                self.output.clear(0..slot_tokens);
                Err(match failure {
                    Failure::Fault(fault) => fault.into(),
                    Failure::Payload(Unread { layer, source }) => Error::table(layer, source),
                })
            }
        }
    }

    /// The rows of the last exchange, all zero if it failed.
    pub fn rows(&self) -> Rows<'_> {
        self.output.rows(self.last_slot)
    }

    fn admit(&self, ids: &Ids<'_>, slot: u32) -> Result<usize> {
        self.require_awake()?;
        let shape = (self.plan.layers.len(), self.plan.columns);
        if ids.shape() != shape {
            return Err(invalid("layers and columns of the ids", &format!("{:?}", ids.shape()), &format!("{shape:?}")));
        }
        let tokens = ids.tokens();
        match usize::try_from(slot) {
            Ok(slot_tokens) if (1..=self.config.capacity).contains(&slot) && tokens <= slot_tokens => Ok(slot_tokens),
            _ => {
                let expected = format!("at least 1 and the {tokens} tokens, at most {}", self.config.capacity);
                Err(invalid("slot", &slot, &expected))
            }
        }
    }

    /// The fault by which the group has failed, if one has been reported to this rank. Waits for nobody.
    ///
    /// # Errors
    /// The fault.
    pub fn check(&self) -> Result<(), Fault> {
        self.protocol.fault(&self.memory).map_or(Ok(()), Err)
    }

    /// Gives the memory for ids and rows back to the system, on all ranks. Collective. The signals stay.
    ///
    /// # Errors
    /// [`Error::Asleep`] when it sleeps already, [`Error::Fault`] when the group has failed, and what the system refuses.
    pub fn sleep(&mut self) -> Result<()> {
        self.require_awake()?;
        self.together(Operation::Sleep, None)?;
        // All ranks have come, so that nobody reads rows any more; and none writes before it wakes.
        Protocol::set_asleep(&self.memory, true);
        self.memory.discard(self.plan.segment.data())
    }

    /// Takes the memory again, at the same addresses. Collective.
    ///
    /// # Errors
    /// [`Error::Awake`] when it does not sleep, [`Error::Fault`] when the group has failed; so it does when the system
    /// does not give a rank its memory.
    pub fn wake(&mut self) -> Result<()> {
        if !Protocol::is_asleep(&self.memory) {
            return Err(Error::Awake);
        }
        self.together(Operation::Wake, Some(self.plan.segment.data()))?;
        Protocol::set_asleep(&self.memory, false);
        Ok(())
    }

    /// Ends the exchange together with all ranks. Collective, unless the group has failed: then there is nobody to meet,
    /// and this only ends the exchange here.
    ///
    /// # Errors
    /// [`Error::Fault`] when the group fails now.
    pub fn close(mut self) -> Result<()> {
        if self.check().is_err() {
            return Ok(());
        }
        self.together(Operation::Close, None)
    }

    /// A step in which no rows move; with `data`, this rank takes these bytes back.
    fn together(&mut self, operation: Operation, data: Option<Range<usize>>) -> Result<()> {
        let mut payload = Idle { memory: &self.memory, data };
        let mut wait = Patience::new(&self.memory, self.config.deadline, &mut self.spins);
        self.protocol.run(&self.memory, operation, 0, &mut payload, &mut wait).map_err(|failure| match failure {
            Failure::Fault(fault) => fault.into(),
            Failure::Payload(error) => error,
        })
    }

    fn require_awake(&self) -> Result<()> {
        if Protocol::is_asleep(&self.memory) { Err(Error::Asleep) } else { Ok(()) }
    }
}

/// Every part is there, and holds what this rank owns of its layer.
fn check_parts(plan: &Plan, parts: &[Part]) -> Result<()> {
    let owned = |layer: &Layer| match layer.ownership {
        Ownership::Heads(_) => (!plan.columns_of(plan.rank).is_empty()).then_some(0..0),
        Ownership::Rows(shards) => Some(shards.range(plan.rank)).filter(|rows| !rows.is_empty()),
    };
    if parts.is_empty() && plan.layers.iter().all(|layer| owned(layer).is_none()) {
        return Ok(());
    }
    if parts.len() != plan.layers.len() {
        let expected = format!("{}, one a layer", plan.layers.len());
        return Err(invalid(&format!("parts of rank {}", plan.rank), &parts.len(), &expected));
    }
    for (index, (part, layer)) in parts.iter().zip(&plan.layers).enumerate() {
        let (found, expected) = (part.source.format(), &layer.format);
        if found != expected {
            let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
            return Err(invalid(&format!("format of the part of layer {index}"), &found, &expected));
        }
        // Which rows heads reach is for their layout to say; rows are known here.
        let end = part.first_row.saturating_add(part.source.rows());
        let missing = owned(layer).filter(|rows| !rows.is_empty() && (rows.start < part.first_row || rows.end > end));
        if let Some(rows) = missing {
            let (found, expected) = (format!("{}..{end}", part.first_row), format!("all of {rows:?}"));
            return Err(invalid(&format!("rows of the part of layer {index}"), &found, &expected));
        }
    }
    Ok(())
}

/// No ids and no rows. Memory is taken back before this rank answers anybody, since from then on others may write to it.
struct Idle<'a, M> {
    memory: &'a M,
    data: Option<Range<usize>>,
}

impl<M: Memory> Payload for Idle<'_, M> {
    type Error = Error;

    fn publish(&mut self, _: Call) {}

    fn serve(&mut self, _: usize) -> Result<()> {
        self.data.take().map_or(Ok(()), |data| self.memory.reserve(data))
    }

    fn collect(&mut self, _: usize) {}
}
