//! Which way to push slots of which size: measured by all ranks together, so that they choose alike.

use std::ops::Range;

use engram_core::Ownership;
use engram_cuda::{DeviceBuffer, DeviceView, Event, IdShape, IdType, Ids, Stream, StreamRef};

use super::exchange::{Exchange, Push};
use super::layout::Agreed;
use crate::exchange::{Algorithm, Config};
use crate::{Error, Group, Result, Step};

/// A way to push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// How a rank knows what has arrived.
    pub push: Push,
    /// Most blocks of the kernel: signals of few blocks are quicker, copies of many.
    pub blocks: u32,
}

/// One slot, and how long the slowest rank took for it each way.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Tokens a rank.
    pub slot: u32,
    /// Microseconds, in the order of [`Choice::ways`]; infinite where the way does not do for the slot.
    pub us: Vec<f64>,
}

/// The way to push, by slot.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The ways there are: one, where nothing was measured.
    pub ways: Vec<Way>,
    /// What was measured, by ascending slot.
    pub measured: Vec<Measured>,
    /// Largest slot that lines have room for.
    line_tokens: u32,
}

impl Choice {
    /// One way for all slots, which has to do for them.
    pub(super) fn by(push: Push, blocks: u32) -> Self {
        Self { ways: vec![Way { push, blocks }], measured: Vec::new(), line_tokens: 0 }
    }

    /// Whether some slot may be pushed by lines.
    pub(super) fn has_lines(&self) -> bool {
        self.ways.iter().any(|way| way.push.by_lines())
    }

    /// The way for a slot: the fastest at the measured slot that is nearest, as a ratio, of those that do for the slot itself.
    #[must_use]
    pub fn way(&self, slot: u32) -> Way {
        let next = self.measured.iter().position(|measured| measured.slot >= slot);
        let nearest = match next {
            None => self.measured.last(),
            Some(0) => self.measured.first(),
            Some(next) => {
                let (below, above) = (&self.measured[next - 1], &self.measured[next]);
                let square = u64::from(slot) * u64::from(slot);
                Some(if square < u64::from(below.slot) * u64::from(above.slot) { below } else { above })
            }
        };
        let fastest = nearest.and_then(|measured| {
            let ways = (0..self.ways.len()).filter(|&way| does(self.ways[way], slot, self.line_tokens));
            ways.min_by(|&a, &b| measured.us[a].total_cmp(&measured.us[b]))
        });
        self.ways[fastest.unwrap_or(0)]
    }
}

/// Whether a way does for a slot.
fn does(way: Way, slot: u32, line_tokens: u32) -> bool {
    !way.push.by_lines() || slot <= line_tokens
}

/// Slots that are measured.
const SLOTS: [u32; 9] = [1, 8, 32, 64, 128, 256, 512, 1024, 2048];

/// Pairs of exchanges each way: the first ones warm up, the best counts.
const ROUNDS: u32 = 8;

/// What there is to measure: slots, and for each of them the ways that do.
#[derive(Debug)]
pub(super) struct Plan {
    slots: Vec<u32>,
    ways: Vec<Way>,
    line_tokens: u32,
}

impl Plan {
    /// `push` is the one way that is wanted, if any is.
    pub(super) fn new(world: usize, capacity: u32, line_tokens: u32, agreed: Agreed, push: Option<Push>) -> Self {
        let blocks = agreed.blocks;
        let measures = push.is_none() && world > 1;
        let slots = SLOTS.into_iter().filter(|&slot| measures && slot <= capacity).collect();
        let way = |push, blocks: u32| Way { push, blocks: blocks.max(1) };
        let mut ways = match push {
            Some(push) => vec![way(push, blocks)],
            None => [1, 2, 4].map(|part| way(Push::Flags, blocks / part)).to_vec(),
        };
        ways.dedup();
        if measures && line_tokens > 0 {
            ways.push(way(Push::Lines, blocks));
            if !agreed.marked {
                ways.push(way(Push::LinesApart, blocks));
            }
        }
        Self { slots, ways, line_tokens }
    }

    /// Exchanges that [`Plan::measure`] makes.
    pub(super) fn exchanges(&self) -> u32 {
        let pairs = |&slot: &u32| {
            self.ways.iter().filter(|&&way| does(way, slot, self.line_tokens)).map(|_| 2 * ROUNDS).sum::<u32>()
        };
        self.slots.iter().map(pairs).sum()
    }

    /// The way to take before anything is known.
    pub(super) fn first(&self) -> Choice {
        Choice::by(self.ways[0].push, self.ways[0].blocks)
    }

    /// Measures, if there is anything to. `rows` are those that each rank has, a layer.
    pub(super) fn measure(
        self,
        exchange: &mut Exchange,
        group: &mut Group,
        rows: &[Vec<Range<u64>>],
    ) -> Result<Choice> {
        let Some(&most) = self.slots.last() else { return Ok(self.first()) };
        // All ranks measure, or none.
        let sample = Sample::new(exchange, rows, most);
        let mut sample = group.agree(Step::Gather, sample)?;
        let mut timed = |slot: u32, way: Way| match does(way, slot, self.line_tokens) {
            true => time(exchange, &mut sample, slot, way).map(Some),
            false => Ok(None),
        };
        let own: Result<Vec<Vec<Option<f64>>>> =
            self.slots.iter().map(|&slot| self.ways.iter().map(|&way| timed(slot, way)).collect()).collect();
        let own = group.agree(Step::Gather, own)?;
        let mut measured: Vec<Measured> =
            self.slots.iter().map(|&slot| Measured { slot, us: vec![0.0; self.ways.len()] }).collect();
        for theirs in group.gather_values(Step::Gather, &own)? {
            for (measured, theirs) in measured.iter_mut().zip(theirs) {
                for (slowest, us) in measured.us.iter_mut().zip(theirs) {
                    *slowest = slowest.max(us.unwrap_or(f64::INFINITY));
                }
            }
        }
        Ok(Choice { ways: self.ways, measured, line_tokens: self.line_tokens })
    }
}

/// What an exchange is measured with. Of its ids each exchange takes others, and each rank has its own: rows that were asked for before would come
/// out of caches, where pinned memory and links look quicker than they are.
struct Sample {
    stream: Stream,
    clocks: [Event; 2],
    ids: DeviceBuffer,
    tokens: usize,
    layers: usize,
    columns: usize,
    /// First token of the next exchange.
    next: usize,
}

impl Sample {
    /// By the time that the first ids come again, their rows have left every cache.
    const BYTES: usize = 16 << 20;

    /// For slots of up to `most` tokens.
    fn new(exchange: &Exchange, rows: &[Vec<Range<u64>>], most: u32) -> Result<Self> {
        let config = exchange.config();
        let (layers, columns) = (config.layers.len(), config.columns);
        let tokens = tokens_of(most).max(Self::BYTES / (layers * columns * IdType::I32.bytes()));
        let seed = exchange.rank() as u64;
        let build = |device| {
            Ok(Self {
                stream: Stream::new(device)?,
                clocks: [Event::with_time(device)?, Event::with_time(device)?],
                ids: DeviceBuffer::from_slice(device, &sample_ids(config, rows, tokens, seed))?,
                tokens,
                layers,
                columns,
                next: 0,
            })
        };
        build(exchange.device()).map_err(|error| measuring(exchange.rank(), &error))
    }

    /// The next ids of a slot, after the last ones the first again; and the stream.
    fn take(&mut self, slot: u32) -> Result<(Ids<'_>, StreamRef<'_>), engram_cuda::Error> {
        let tokens = tokens_of(slot);
        let first = if self.next + tokens > self.tokens { 0 } else { self.next };
        self.next = first + tokens;
        let shape = IdShape::dense(IdType::I32, tokens, self.layers, self.columns);
        let bytes = |tokens: usize| (tokens * self.layers * self.columns * IdType::I32.bytes()) as u64;
        // SAFETY: a part of the buffer, which lives until the exchanges are done: dropping it waits for the device.
        let view = unsafe { DeviceView::from_raw(self.ids.address() + bytes(first), bytes(tokens)) };
        Ok((Ids::new(view, shape)?, self.stream.as_ref()))
    }
}

fn tokens_of(slot: u32) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}

fn measuring(rank: usize, error: &engram_cuda::Error) -> Error {
    Error::cuda(rank, "measuring an exchange", error)
}

/// Microseconds that this rank takes for one exchange of a full slot.
fn time(exchange: &mut Exchange, sample: &mut Sample, slot: u32, way: Way) -> Result<f64> {
    exchange.set_choice(Choice::by(way.push, way.blocks));
    let rank = exchange.rank();
    let cuda = |error: engram_cuda::Error| measuring(rank, &error);
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        // Ranks start together, so that the second of two exchanges shows what one takes.
        for clock in 0..2 {
            let (ids, stream) = sample.take(slot).map_err(cuda)?;
            exchange.run(&ids, slot, Algorithm::Push, stream)?;
            sample.clocks[clock].record(sample.stream.as_ref()).map_err(cuda)?;
        }
        sample.stream.synchronize().map_err(cuda)?;
        exchange.check()?;
        best = best.min(sample.clocks[1].elapsed_us(&sample.clocks[0]).map_err(cuda)?);
    }
    Ok(best)
}

/// Ids `[tokens][layers][columns]` that spread over the rows that their owners have.
fn sample_ids(config: &Config, rows: &[Vec<Range<u64>>], tokens: usize, seed: u64) -> Vec<i32> {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut draw = |rows: &Range<u64>| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let row = rows.start + (state >> 32) % (rows.end - rows.start).max(1);
        i32::try_from(row).unwrap_or(-1)
    };
    let mut ids = Vec::with_capacity(tokens * config.layers.len() * config.columns);
    for _ in 0..tokens {
        for (index, layer) in config.layers.iter().enumerate() {
            for column in 0..config.columns {
                ids.push(match layer.ownership {
                    Ownership::Heads(shards) => {
                        let owner = shards.owner_of_column(column).and_then(|owner| rows[owner].get(index));
                        owner.map_or(-1, &mut draw)
                    }
                    Ownership::Rows(shards) => draw(&(0..shards.rows())),
                });
            }
        }
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_measured_slot_decides() {
        let way = |push, blocks| Way { push, blocks };
        let ways = vec![way(Push::Flags, 132), way(Push::Lines, 132), way(Push::LinesApart, 132)];
        let measured = [
            (1, [7.0, 5.0, 5.5]),
            (128, [15.0, 8.0, 8.5]),
            (512, [26.0, 31.0, 18.0]),
            (2048, [61.0, f64::INFINITY, f64::INFINITY]),
        ];
        let measured = measured.map(|(slot, us)| Measured { slot, us: us.to_vec() }).to_vec();
        let choice = Choice { ways: ways.clone(), measured, line_tokens: 1024 };
        for (slot, expected) in
            [(1, 1), (128, 1), (255, 1), (256, 2), (512, 2), (1023, 2), (1024, 0), (2048, 0), (9000, 0)]
        {
            assert_eq!(choice.way(slot), ways[expected], "{slot}");
        }
        assert_eq!(Choice::by(Push::Lines, 9).way(7), way(Push::Lines, 9));
    }

    #[test]
    fn lines_are_not_taken_beyond_their_room() {
        let ways = vec![Way { push: Push::Flags, blocks: 132 }, Way { push: Push::Lines, blocks: 132 }];
        let measured = vec![Measured { slot: 1024, us: vec![40.0, 30.0] }];
        let choice = Choice { ways: ways.clone(), measured, line_tokens: 1024 };
        for (slot, expected) in [(1, 1), (1024, 1), (1025, 0), (1500, 0)] {
            assert_eq!(choice.way(slot), ways[expected], "{slot}");
        }
    }

    #[test]
    fn nothing_is_measured_where_there_is_no_choice() {
        let agreed = |blocks| Agreed { blocks, marked: false, direct: true, lines: true, landing: true, early: true };
        assert_eq!(Plan::new(2, 2048, 1024, agreed(132), Some(Push::Lines)).exchanges(), 0);
        assert_eq!(Plan::new(1, 2048, 0, agreed(132), None).exchanges(), 0);
        // Four slots, and of the three ways with a block only those by lines for the first three.
        let plan = Plan::new(2, 64, 32, agreed(1), None);
        assert_eq!((plan.ways.len(), plan.slots.len(), plan.exchanges()), (3, 4, (4 + 2 * 3) * 2 * ROUNDS));
        assert_eq!(plan.first().way(1), Way { push: Push::Flags, blocks: 1 });
        // Rows with marks are not collected by warps of their own.
        let plan = Plan::new(2, 64, 32, Agreed { marked: true, ..agreed(1) }, None);
        assert!(plan.ways.iter().all(|way| way.push != Push::LinesApart));
    }
}
