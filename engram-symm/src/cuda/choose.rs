//! Which way to push slots of which size: measured by all ranks together, so that they choose alike.

use std::ops::Range;

use super::exchange::{Exchange, Push};
use super::layout::Agreed;
use super::measure::Measurement;
use crate::{Group, Result, Step};

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
        let ways = |&slot: &u32| self.ways.iter().filter(move |&&way| does(way, slot, self.line_tokens));
        self.slots.iter().flat_map(ways).map(|_| Measurement::EXCHANGES).sum()
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
        let measurement = Measurement::new(exchange, rows, most);
        let mut measurement = group.agree(Step::Gather, measurement)?;
        let mut timed = |slot: u32, way: Way| {
            if !does(way, slot, self.line_tokens) {
                return Ok(None);
            }
            exchange.set_choice(Choice::by(way.push, way.blocks));
            measurement.us(exchange, slot).map(Some)
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
        assert_eq!((plan.ways.len(), plan.slots.len(), plan.exchanges()), (3, 4, (4 + 2 * 3) * Measurement::EXCHANGES));
        assert_eq!(plan.first().way(1), Way { push: Push::Flags, blocks: 1 });
        // Rows with marks are not collected by warps of their own.
        let plan = Plan::new(2, 64, 32, Agreed { marked: true, ..agreed(1) }, None);
        assert!(plan.ways.iter().all(|way| way.push != Push::LinesApart));
    }
}
