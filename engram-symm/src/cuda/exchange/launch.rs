//! The launches of one step.

use engram_cuda::StreamRef;
use engram_cuda::kernels::Divisor;
use engram_cuda::raw::Module;

use super::{Exchange, Push, narrow};
use crate::Result;
use crate::cuda::choose::Way;
use crate::cuda::kernels::{self, LINE_TILE, ROUND, THREADS, TILE, WARP};
use crate::protocol::Operation;

impl Exchange {
    pub(super) fn enqueue_meeting(&self, operation: Operation, stream: StreamRef<'_>) -> Result<()> {
        let param = kernels::Exchange { operation: u32::from(operation.code()), slot: 0, tokens: 0, ..self.base };
        // A thread for every rank, which `check` has limited, and if there is room a warp that speaks to none.
        let threads = (narrow(self.world).next_multiple_of(WARP) + WARP).min(THREADS);
        self.launch(&self.barrier, "barrier_meet", Grid { blocks: 1, threads }, stream, &param)
    }

    pub(super) fn enqueue_barrier(&self, param: kernels::Exchange, stream: StreamRef<'_>, shared: bool) -> Result<()> {
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

    pub(super) fn enqueue_push(&self, param: kernels::Exchange, stream: StreamRef<'_>) -> Result<()> {
        let lines = param.slot * param.layers * param.pairs;
        let Way { push, blocks } = self.choice.way(param.slot);
        let Shares { tile, parts, self_tile, grid } = Shares::new(push, lines, param.chunks, param.world, blocks);
        let operation = u32::from(Operation::Push.code());
        let param = kernels::Exchange {
            operation,
            line_count: lines,
            tile,
            tiles: lines.div_ceil(tile),
            parts,
            by_parts: Divisor::new(parts),
            self_tile,
            servers: grid.threads / WARP / SERVING_PART,
            ..param
        };
        let entry = match push {
            Push::Lines | Push::LinesApart if self.agreed.marked => "push_lines_marked",
            Push::Lines if param.is_plain() => "push_lines_plain",
            Push::LinesApart if param.is_plain() => "push_lines_apart",
            Push::Lines | Push::LinesApart => "push_lines_unmarked",
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
}

/// Blocks of a launch, and threads of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grid {
    blocks: u32,
    threads: u32,
}

/// Of the warps of a block that pushes by lines apart, one in so many serves: enough to fill the links. What more of them write waits for the links
/// in a queue of the multiprocessor, with all that its other warps read and write behind it. Between two H200, 2,048 tokens took 1.1 times as long
/// with 6 of 16 warps as with 4, 1.3 times with 8, and 1.6 times with 10.
const SERVING_PART: u32 = 4;

/// How the lines of an owner are shared out between blocks and warps: alike on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shares {
    tile: u32,
    parts: u32,
    self_tile: u32,
    grid: Grid,
}

impl Shares {
    /// `lines` of each owner, for rows of `chunks` chunks.
    fn new(push: Push, lines: u32, chunks: u32, world: u32, blocks: u32) -> Self {
        match push {
            Push::Lines => Self::of_rounds(lines, chunks, world, blocks),
            Push::LinesApart | Push::Flags => Self::of_turns(push, lines, chunks, world, blocks),
        }
    }

    /// A block's lines are one tile if lanes suffice, and what of it is under way at a time is a job of one warp, for as many warps as there are. A
    /// rank's own rows are fewer jobs.
    fn of_rounds(lines: u32, chunks: u32, world: u32, blocks: u32) -> Self {
        let a_block = lines.div_ceil(blocks);
        let tile = a_block.div_ceil(a_block.div_ceil(WARP));
        let parts = parts(tile, chunks);
        let self_tile = (a_block / 3).clamp(LINE_TILE / 2, LINE_TILE);
        let tiles = lines.div_ceil(tile);
        let blocks = tiles.min(blocks);
        let others = tiles.div_ceil(blocks).saturating_mul(parts).saturating_mul(2 * (world - 1));
        let own = lines.div_ceil(self_tile).div_ceil(blocks);
        Self { tile, parts, self_tile, grid: Grid::of_jobs(blocks, others.saturating_add(own)) }
    }

    /// Where there are more tiles than warps, warps take as few turns as large tiles allow, and tiles are as small as those turns allow.
    fn of_turns(push: Push, lines: u32, chunks: u32, world: u32, blocks: u32) -> Self {
        // Apart, warps are half full, so that tiles are small enough to be collected while others are under way.
        let served = u64::from(lines) * u64::from(if push == Push::LinesApart { 2 * (world - 1) } else { world });
        let warps = u64::from(blocks * (THREADS / WARP));
        let turns = served.div_ceil(warps * u64::from(LINE_TILE)).max(1);
        let tile = u32::try_from(served.div_ceil(warps * turns)).unwrap_or(LINE_TILE).clamp(1, LINE_TILE);
        let tiles = lines.div_ceil(tile);
        let blocks = tiles.clamp(1, blocks);
        let jobs = if push == Push::LinesApart { THREADS / WARP } else { tiles.div_ceil(blocks).saturating_mul(world) };
        let parts = parts(tile, chunks);
        Self { tile, parts, self_tile: (tile * 4).min(LINE_TILE), grid: Grid::of_jobs(blocks, jobs) }
    }
}

/// Jobs of a tile, where warps share it: all do where a rank's tables or outputs are not what [`kernels::Exchange::is_plain`] means.
fn parts(tile: u32, chunks: u32) -> u32 {
    tile.saturating_mul(2 * chunks).div_ceil(ROUND)
}

impl Grid {
    /// A warp for each job of a block, if there may be as many; and one more, which has nothing else to do than to see that all ranks call the same.
    fn of_jobs(blocks: u32, jobs: u32) -> Self {
        Self { blocks, threads: jobs.saturating_add(1).saturating_mul(WARP).clamp(WARP * 2, THREADS) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// 2 layers of 24 heads between two ranks, 12 lines a token; rows of 17 chunks.
    #[test]
    fn few_tokens_are_a_line_a_block_and_many_fill_their_turns() {
        let shares = |push, tokens: u32| {
            let Shares { tile, parts, self_tile, grid } = Shares::new(push, tokens * 12, 17, 2, 132);
            (tile, parts, self_tile, grid.blocks, grid.threads / WARP)
        };
        // Served, collected, its own, and the calls.
        assert_eq!(shares(Push::Lines, 1), (1, 1, 4, 12, 4));
        assert_eq!(shares(Push::Lines, 64), (6, 4, 4, 128, 11));
        assert_eq!(shares(Push::Lines, 128), (12, 7, 4, 128, 16));
        assert_eq!(shares(Push::Lines, 1024), (32, 17, 8, 132, 16));
        // Two turns of 6 lines rather than of 8, of which the second would be half empty.
        assert_eq!(shares(Push::Flags, 1024), (6, 4, 8, 132, 16));
        assert_eq!(shares(Push::Flags, 2048), (8, 5, 8, 132, 16));
        assert_eq!(shares(Push::LinesApart, 1024), (6, 4, 8, 132, 16));
    }

    proptest! {
        #[test]
        fn shares_keep_to_their_limits(
            lines in 1..1_u32 << 28, chunks in 1..100_u32, world in 1..512_u32, blocks in 1..200_u32, push in 0..3_usize,
        ) {
            let push = [Push::Lines, Push::LinesApart, Push::Flags][push];
            let Shares { tile, parts, self_tile, grid } = Shares::new(push, lines, chunks, world, blocks);
            // Lanes hold a tile's lines, and where a warp takes it alone, its rows.
            let largest = if push == Push::Lines { WARP } else { LINE_TILE };
            prop_assert!((1..=largest).contains(&tile));
            prop_assert!((1..=LINE_TILE).contains(&self_tile));
            prop_assert!(parts * ROUND >= tile * 2 * chunks);
            prop_assert!((1..=blocks).contains(&grid.blocks) && grid.blocks <= lines.div_ceil(tile));
            prop_assert!((2 * WARP..=THREADS).contains(&grid.threads) && grid.threads.is_multiple_of(WARP));
        }
    }
}
