//! How long an exchange takes.

use std::ops::Range;

use engram_core::Ownership;
use engram_cuda::{DeviceBuffer, DeviceView, Event, IdShape, IdType, Ids, Stream, StreamRef};

use super::exchange::Exchange;
use crate::exchange::{Algorithm, Config};
use crate::{Error, Result};

/// Pairs of exchanges each way: the first ones warm up, the best counts.
const ROUNDS: u32 = 8;

/// What an exchange is measured with. Of its ids each exchange takes others, and each rank has its own: rows that were asked for before would come
/// out of caches, where pinned memory and links look quicker than they are.
pub(super) struct Measurement {
    stream: Stream,
    clocks: [Event; 2],
    ids: DeviceBuffer,
    tokens: usize,
    layers: usize,
    columns: usize,
    /// First token of the next exchange.
    next: usize,
}

impl Measurement {
    /// Exchanges that [`Measurement::us`] makes.
    pub(super) const EXCHANGES: u32 = 2 * ROUNDS;

    /// Of the ids: with some 100 bytes a row, a gigabyte is read before the first of them come again.
    const BYTES: usize = 16 << 20;

    /// For slots of up to `most` tokens.
    pub(super) fn new(exchange: &Exchange, rows: &[Vec<Range<u64>>], most: u32) -> Result<Self> {
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

    /// Microseconds that this rank takes for one exchange of a full slot, the way that is chosen at the time.
    pub(super) fn us(&mut self, exchange: &mut Exchange, slot: u32) -> Result<f64> {
        let rank = exchange.rank();
        let cuda = |error: engram_cuda::Error| measuring(rank, &error);
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            // Ranks start together, so that the second of two exchanges shows what one takes.
            for clock in 0..2 {
                let (ids, stream) = self.take(slot).map_err(cuda)?;
                exchange.run(&ids, slot, Algorithm::Push, stream)?;
                self.clocks[clock].record(self.stream.as_ref()).map_err(cuda)?;
            }
            self.stream.synchronize().map_err(cuda)?;
            exchange.check()?;
            best = best.min(self.clocks[1].elapsed_us(&self.clocks[0]).map_err(cuda)?);
        }
        Ok(best)
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
    use engram_core::{HeadShards, RowShards};
    use engram_ple::{FormatKind, TableFormat};

    use super::*;
    use crate::{Layer, Output};

    /// 3 columns over 2 ranks, of which the second has the last one; 2 layers.
    fn config(ownership: Ownership) -> Config {
        let format = TableFormat::new(FormatKind::Bf16, 16, None).unwrap();
        Config::new(
            3,
            vec![Layer { format: format.clone(), ownership }, Layer { format, ownership }],
            8,
            Output::Packed,
        )
    }

    #[test]
    fn sampled_ids_are_rows_that_owners_have() {
        let heads = config(Ownership::Heads(HeadShards::new(3, 2).unwrap()));
        let rows = [vec![0..10, 100..103], vec![500..501, 700..702]];
        let ids = sample_ids(&heads, &rows, 400, 0);
        assert_eq!(ids.len(), 400 * 2 * 3);
        for token in ids.chunks_exact(6) {
            let own = |id: i32, rows: Range<i32>| rows.contains(&id);
            assert!(token[..2].iter().all(|&id| own(id, 0..10)) && own(token[2], 500..501), "{token:?}");
            assert!(token[3..5].iter().all(|&id| own(id, 100..103)) && own(token[5], 700..702), "{token:?}");
        }
        let distinct: std::collections::BTreeSet<i32> = ids.iter().copied().collect();
        assert_eq!(distinct.len(), 10 + 3 + 1 + 2);

        let shared = config(Ownership::Rows(RowShards::new(50, 2).unwrap()));
        let of_rank = |rank| sample_ids(&shared, &rows, 400, rank);
        assert!(of_rank(0).iter().all(|id| (0..50).contains(id)));
        // What one rank asks for is not in a cache because another one did.
        assert_ne!(of_rank(0), of_rank(1));
    }
}
