//! The launches of one step.

use engram_cuda::StreamRef;
use engram_cuda::raw::Module;

use super::{Exchange, Push, narrow};
use crate::Result;
use crate::cuda::choose::Way;
use crate::cuda::kernels::{self, LINE_TILE, THREADS, TILE, WARP};
use crate::protocol::Operation;

impl Exchange {
    pub(super) fn enqueue_meeting(&self, operation: Operation, stream: StreamRef<'_>) -> Result<()> {
        let param = kernels::Exchange { operation: u32::from(operation.code()), slot: 0, tokens: 0, ..self.base };
        // A warp more than speak to others.
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
        let (tile, grid) = push_grid(push, lines, param.world, blocks);
        let operation = u32::from(Operation::Push.code());
        let param = kernels::Exchange {
            operation,
            line_count: lines,
            tile,
            tiles: lines.div_ceil(tile),
            self_tile: (tile * 4).min(LINE_TILE),
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

/// Of the warps of a block that pushes by lines apart, how many serve: enough to fill the links. What more of them write waits for the links in a
/// queue of the multiprocessor, with all that the other warps of it read and write behind it. 2,048 tokens between two H200 took 49 us with a
/// quarter of 16 warps, 54 with 6, 63 with 8, and 76 with 10.
const SERVING_PART: u32 = 4;

/// How a push is launched, for `lines` lines of each owner: lines that a warp takes at a time, and the grid. Alike on all ranks.
///
/// Few tokens spread over many blocks. Where there are more tiles to serve than warps, warps take as few turns as large tiles allow, and tiles are as
/// small as those turns allow. By lines, a rank takes its own rows in larger tiles, and what others send in a turn of its own.
fn push_grid(push: Push, lines: u32, world: u32, blocks: u32) -> (u32, Grid) {
    let warps = u64::from(blocks * (THREADS / WARP));
    // Four times the turns' tiles, and their lines.
    let served = match push {
        Push::Lines => u64::from(lines) * u64::from(4 * (world - 1) + 1),
        // Half full, so that tiles are small enough to be collected while others are under way.
        Push::LinesApart => u64::from(lines) * u64::from(8 * (world - 1)),
        Push::Flags => u64::from(lines) * u64::from(4 * world),
    };
    let turns = served.div_ceil(4 * warps * u64::from(LINE_TILE)).max(1);
    let tile = u32::try_from(served.div_ceil(4 * warps * turns)).unwrap_or(LINE_TILE).clamp(1, LINE_TILE);
    let tiles = lines.div_ceil(tile);
    let blocks = tiles.clamp(1, blocks);
    let jobs_of_a_tile = if push == Push::Flags { world } else { 2 * world - 1 };
    // One more, which has nothing else to do than to see that all ranks call the same.
    let jobs = tiles.div_ceil(blocks).saturating_mul(jobs_of_a_tile).saturating_add(1);
    let least = if push == Push::LinesApart { THREADS } else { WARP * 2 };
    (tile, Grid { blocks, threads: jobs.saturating_mul(WARP).clamp(least, THREADS) })
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
        assert_eq!(push_grid(Push::LinesApart, 1024 * 12, 2, 132), (6, grid(132, THREADS)));
    }

    proptest! {
        #[test]
        fn grids_keep_to_their_limits(lines in 1..1_u32 << 28, world in 1..512_u32, blocks in 1..200_u32, push in 0..3_usize) {
            let push = [Push::Lines, Push::LinesApart, Push::Flags][push];
            let (tile, grid) = push_grid(push, lines, world, blocks);
            prop_assert!((1..=LINE_TILE).contains(&tile));
            prop_assert!((1..=blocks).contains(&grid.blocks) && grid.blocks <= lines.div_ceil(tile));
            prop_assert!((2 * WARP..=THREADS).contains(&grid.threads) && grid.threads.is_multiple_of(WARP));
        }
    }
}
