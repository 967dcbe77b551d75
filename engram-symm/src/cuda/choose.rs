//! Which way to push slots of which size: measured by all ranks together, so that they choose alike.

use std::ops::Range;

use engram_core::Ownership;
use engram_cuda::{DeviceBuffer, Event, IdShape, IdType, Ids};

use super::exchange::{Exchange, Push};
use crate::exchange::{Algorithm, Config};
use crate::{Error, Group, Result, Step};

/// One slot, and how long the slowest rank took for it in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Tokens a rank.
    pub slot: u32,
    /// By lines.
    pub lines_us: f64,
    /// By flags.
    pub flags_us: f64,
}

/// The way to push, by slot.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The largest slot that is pushed by lines; larger ones by flags. 0 for none.
    pub lines_up_to: u32,
    /// What was measured, by ascending slot.
    pub measured: Vec<Measured>,
}

impl Choice {
    /// One way for all slots.
    pub(super) fn by(push: Push) -> Self {
        Self { lines_up_to: if push == Push::Lines { u32::MAX } else { 0 }, measured: Vec::new() }
    }

    /// The way for a slot.
    #[must_use]
    pub fn push(&self, slot: u32) -> Push {
        if slot <= self.lines_up_to { Push::Lines } else { Push::Flags }
    }

    /// From measurements by ascending slot: lines, up to the size from which flags win for good.
    pub(super) fn from(measured: Vec<Measured>) -> Self {
        let last = measured.iter().rposition(|m| m.lines_us <= m.flags_us);
        let lines_up_to = match last {
            None => 0,
            // Between two sizes that disagree the geometric middle is as good as any.
            Some(last) => match measured.get(last + 1) {
                None => measured[last].slot,
                Some(next) => middle(measured[last].slot, next.slot),
            },
        };
        Self { lines_up_to, measured }
    }
}

/// About the geometric mean.
fn middle(low: u32, high: u32) -> u32 {
    u32::try_from((u64::from(low) * u64::from(high)).isqrt()).unwrap_or(low).max(low)
}

/// Slots that are measured.
const SLOTS: [u32; 8] = [1, 8, 32, 64, 128, 256, 512, 1024];

/// Exchanges of each kind: the first ones warm up, the best of the others counts.
const ROUNDS: u32 = 8;

/// The slots to measure: none, where there is nothing to choose.
fn slots(line_tokens: u32, world: usize, push: Option<Push>) -> impl Iterator<Item = u32> {
    SLOTS.into_iter().filter(move |&slot| push.is_none() && world > 1 && slot <= line_tokens)
}

/// Steps that [`measure`] takes.
pub(super) fn steps(line_tokens: u32, world: usize, push: Option<Push>) -> u32 {
    slots(line_tokens, world, push).map(|_| 2 * 2 * ROUNDS).sum()
}

/// Measures, unless `push` says which way to take. `rows` are those that each rank has, a layer.
pub(super) fn measure(
    exchange: &mut Exchange,
    group: &mut Group,
    push: Option<Push>,
    rows: &[Vec<Range<u64>>],
) -> Result<Choice> {
    let slots: Vec<u32> = slots(exchange.line_tokens(), exchange.world(), push).collect();
    if slots.is_empty() {
        return Ok(Choice::by(push.unwrap_or(Push::Flags)));
    }
    let ids = sample_ids(exchange.config(), rows, slots.last().copied().unwrap_or(0));
    let mut timed = |slot, push| time(exchange, &ids, slot, push);
    let timed = slots.iter().map(|&slot| Ok([timed(slot, Push::Lines)?, timed(slot, Push::Flags)?]));
    let own = timed.collect::<Result<Vec<_>>>();
    exchange.set_choice(Choice::by(Push::Flags));
    let own = group.agree(Step::Gather, own)?;
    let mut slowest = own.clone();
    for (rank, theirs) in
        group.all_gather(&serde_json::to_vec(&own).expect("numbers have a JSON form"))?.iter().enumerate()
    {
        let theirs: Vec<[f64; 2]> = serde_json::from_slice(theirs).map_err(|error| Error::Unreadable {
            rank,
            step: Step::Gather,
            found: error.to_string(),
        })?;
        for (slowest, theirs) in slowest.iter_mut().zip(theirs) {
            *slowest = [slowest[0].max(theirs[0]), slowest[1].max(theirs[1])];
        }
    }
    let measured = slots.iter().zip(slowest).map(|(&slot, [lines_us, flags_us])| Measured { slot, lines_us, flags_us });
    Ok(Choice::from(measured.collect()))
}

/// Microseconds that this rank takes for one exchange of a full slot.
fn time(exchange: &mut Exchange, ids: &[i32], slot: u32, push: Push) -> Result<f64> {
    exchange.set_choice(Choice::by(push));
    let device = exchange.device().clone();
    let rank = exchange.rank();
    let cuda = |error: engram_cuda::Error| Error::cuda(rank, "measuring an exchange", &error);
    let tokens = usize::try_from(slot).unwrap_or(0);
    let config = exchange.config();
    let ids = &ids[..tokens * config.layers.len() * config.columns];
    let buffer = DeviceBuffer::from_slice(&device, ids).map_err(cuda)?;
    let shape = IdShape::dense(IdType::I32, tokens, config.layers.len(), config.columns);
    let ids = Ids::new(&buffer, shape).map_err(cuda)?;
    let stream = engram_cuda::Stream::new(&device).map_err(cuda)?;
    let clocks = [Event::with_time(&device).map_err(cuda)?, Event::with_time(&device).map_err(cuda)?];
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        // Ranks start together, so that the second of two exchanges shows what one takes.
        exchange.run(&ids, slot, Algorithm::Push, stream.as_ref())?;
        clocks[0].record(stream.as_ref()).map_err(cuda)?;
        exchange.run(&ids, slot, Algorithm::Push, stream.as_ref())?;
        clocks[1].record(stream.as_ref()).map_err(cuda)?;
        stream.synchronize().map_err(cuda)?;
        exchange.check()?;
        best = best.min(clocks[1].elapsed_us(&clocks[0]).map_err(cuda)?);
    }
    Ok(best)
}

/// Ids `[tokens][layers][columns]` that spread over the rows that their owners have.
fn sample_ids(config: &Config, rows: &[Vec<Range<u64>>], tokens: u32) -> Vec<i32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |rows: &Range<u64>| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let row = rows.start + (state >> 32) % (rows.end - rows.start).max(1);
        i32::try_from(row).unwrap_or(-1)
    };
    let mut ids = Vec::new();
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
    fn lines_are_for_slots_below_the_crossing() {
        let measured = |points: &[(u32, f64, f64)]| {
            points.iter().map(|&(slot, lines_us, flags_us)| Measured { slot, lines_us, flags_us }).collect()
        };
        let choice = Choice::from(measured(&[(1, 5.0, 6.0), (128, 8.0, 8.5), (256, 13.0, 12.0), (512, 23.0, 19.0)]));
        assert_eq!(choice.lines_up_to, 181);
        assert_eq!((choice.push(181), choice.push(182)), (Push::Lines, Push::Flags));
        assert_eq!(Choice::from(measured(&[(1, 7.0, 6.0)])).lines_up_to, 0);
        assert_eq!(Choice::from(measured(&[(1, 5.0, 6.0), (8, 6.0, 6.0)])).lines_up_to, 8);
        assert_eq!(Choice::from(Vec::new()).lines_up_to, 0);
        assert_eq!(Choice::by(Push::Lines).push(u32::MAX), Push::Lines);
    }
}
