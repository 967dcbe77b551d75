//! The kernels, and the parameter that all of them take.
//!
//! `kernels/exchange.cuh` holds the same structs and asserts the same sizes. Addresses are the device's. The kernels for compute capability
//! 9.0 are made so that they can start early ([`Ptx::starting_early`]).
//!
//! | module | entry | does | grid |
//! |---|---|---|---|
//! | [`BARRIER`] | `barrier_meet` | a step without rows | 1 |
//! | | `barrier_announce` | ids, first barrier | any |
//! | | `barrier_serve` | own rows for all ranks, own part of the second barrier | any |
//! | | `barrier_pull` | second barrier, rows of all owners into the output | any |
//! | | `barrier_settle` | second barrier alone | 1 |
//! | [`PUSH`] | `push_lines_unmarked`, `push_lines_marked` | a whole step; rows of tables that may have NaN are marked | alike on all ranks, and so is [`Exchange::tile`] |
//! | | `push_flags_any` | a whole step | alike on all ranks, up to [`Exchange::flag_blocks`] |
//! | | `push_lines_plain`, `push_flags_plain` | the same, where [`Exchange::is_plain`] | the same |
//! | | `push_lines_apart` | the same, some warps serving while the others collect | the same, and [`Exchange::servers`] |

use engram_cuda::kernels::{Divisor, Ptx};

macro_rules! ptx {
    ($file:literal) => {
        concat!(include_str!(concat!("../../kernels/", $file)), "\0")
    };
}

/// The exchange with two barriers.
pub(super) const BARRIER: Ptx = Ptx::new(
    &["barrier_meet", "barrier_announce", "barrier_serve", "barrier_pull", "barrier_settle"],
    ptx!("barrier.compute_80.ptx"),
    Some(ptx!("barrier.compute_90.ptx")),
);

/// The exchanges without one.
pub(super) const PUSH: Ptx = Ptx::new(
    &[
        "push_lines_plain",
        "push_lines_unmarked",
        "push_lines_marked",
        "push_lines_apart",
        "push_flags_plain",
        "push_flags_any",
    ],
    ptx!("push.compute_80.ptx"),
    Some(ptx!("push.compute_90.ptx")),
);

/// Threads a block at most.
pub(super) const THREADS: u32 = 512;

/// Threads of a warp.
pub(super) const WARP: u32 = 32;

/// Rows that a warp takes at a time, where it takes as many as it can.
pub(super) const TILE: u32 = 16;

/// Lines of the largest tile that one warp takes.
pub(super) const LINE_TILE: u32 = TILE / 2;

/// Chunks that a warp has under way at a time.
pub(super) const ROUND: u32 = 2 * WARP;

/// Length of [`Exchange::near`].
pub(super) const NEAR: usize = 8;

/// What a step adds to [`Control::steps`].
pub(super) const STEP: u64 = 1 << 16;

/// Bytes that rows are moved in.
pub(super) const CHUNK: usize = 16;

/// The control line: a rank's own words, at the start of its signals.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Control {
    /// Complete steps, times [`STEP`].
    pub(super) steps: u64,
    /// 0, [`ASLEEP`], or 2 when the group has failed.
    pub(super) state: u64,
    /// Steps that were begun.
    pub(super) starts: u64,
    /// 1 + the block that recorded the fault.
    pub(super) claimer: u64,
    /// Blocks of a kernel that have come to the point where the last one goes on.
    pub(super) arrived: u32,
    pub(super) padding: u32,
}

/// [`Control::state`] of a group that sleeps.
pub(super) const ASLEEP: u64 = 1;

/// Addresses of a rank's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peer {
    pub(super) signals: u64,
    pub(super) data: u64,
}

/// How one layer is owned and scaled.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    /// Row ownership: rows that a full rank owns.
    pub(super) rows_a_rank: u32,
    /// Row ownership: rows in all.
    pub(super) rows: u32,
    /// The table's scale, where it has one.
    pub(super) global_scale: f32,
    pub(super) padding: u32,
}

/// What becomes of rows.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Bytes as they are.
    Copy = 0,
    /// Values as they are, scales in tiles.
    Mx = 1,
    /// Decoded.
    Bf16 = 2,
    /// Decoded.
    F16 = 3,
}

/// The parameter of every kernel. Offsets are in bytes, from the start of a rank's data; "own" columns are those a rank owns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange {
    /// [`Control`] of this rank.
    pub(super) control: u64,
    /// [`Peer`] `[world]`.
    pub(super) far: u64,
    /// [`engram_cuda::kernels::Table`] `[layers]`; null for a rank without tables.
    pub(super) tables: u64,
    /// [`Layer`] `[layers]`.
    pub(super) layer_info: u64,
    /// The id of (token, layer, column) is `ids[token * token_stride + layer * columns + column]`; i32.
    pub(super) ids: u64,
    pub(super) token_stride: i64,
    /// u64 `[4]` of the host's: the fault and its two calls, and 1 where a step found the group asleep.
    pub(super) report: u64,
    pub(super) deadline_ns: u64,
    /// This rank's rows: byte of (token, layer, column) by the strides that follow.
    pub(super) out: u64,
    pub(super) out_scales: u64,
    pub(super) out_token: u64,
    pub(super) out_layer: u64,
    pub(super) out_column: u64,
    /// MX: bytes from a layer's scales to the next one's.
    pub(super) scales_layer: u64,
    /// Offset of the output, where other ranks write to it.
    pub(super) peer_out: u64,
    /// Offsets of i32 `[slot][layers][columns]` and `[requester][slot][layers][own][row_bytes]`.
    pub(super) shared_ids: u64,
    pub(super) shared_rows: u64,
    /// Push: offset of lines `[2][requester][capacity][layers][pairs]`, 16 bytes each.
    pub(super) lines: u64,
    /// Push by lines: offset of rows of chunks, owner after owner `[slot][layers][own]`; room for `[line_tokens][layers][columns]`.
    pub(super) landing: u64,
    /// Push by flags: offset of such rows, or of their scales' chunks; room for `[capacity][layers][columns]`.
    pub(super) pushed_rows: u64,
    /// Offset in the signals of u64 `[2][world][flag_blocks]`.
    pub(super) flags: u64,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) layers: u32,
    pub(super) columns: u32,
    /// Columns that a full rank owns; 0 where rows are owned.
    pub(super) heads_a_rank: u32,
    pub(super) capacity: u32,
    pub(super) tokens: u32,
    pub(super) slot: u32,
    /// The code that travels in the call.
    pub(super) operation: u32,
    pub(super) form: Form,
    /// Push by flags: rows go straight into the requester's output.
    pub(super) straight: u32,
    /// Push by flags: ids have a flag too, as where 16 bytes may not arrive as one.
    pub(super) flagged_ids: u32,
    pub(super) value_bytes: u32,
    pub(super) scale_bytes: u32,
    /// Chunks of a row's values, and of all of it.
    pub(super) value_chunks: u32,
    pub(super) chunks: u32,
    /// Powers of two that divide all addresses, strides and sizes of tables and packed rows, and of outputs; 16 at most.
    pub(super) unit: u32,
    pub(super) out_unit: u32,
    /// MX: tiles of 4 groups side by side.
    pub(super) scale_tiles: u32,
    /// Lines of a layer's ids, for the most columns that a rank owns; and of all ids that an owner gets.
    pub(super) pairs: u32,
    pub(super) line_count: u32,
    pub(super) flag_blocks: u32,
    /// Lines that go to a block together, up to [`WARP`], and how many times that gives; up to [`LINE_TILE`] where a warp takes them alone.
    pub(super) tile: u32,
    pub(super) tiles: u32,
    /// Push by lines: jobs of a tile, each of a warp and of up to [`ROUND`] chunks.
    pub(super) parts: u32,
    /// Push by lines: lines that a warp takes at a time of those that a rank sends to itself, up to [`LINE_TILE`].
    pub(super) self_tile: u32,
    /// Push by lines apart: warps of a block that serve others; the rest collect.
    pub(super) servers: u32,
    /// Units of 8 bytes in a row's values.
    pub(super) halves: u32,
    pub(super) by_columns: Divisor,
    pub(super) by_layers: Divisor,
    pub(super) by_chunks: Divisor,
    pub(super) by_value_chunks: Divisor,
    pub(super) by_halves: Divisor,
    pub(super) by_pairs: Divisor,
    pub(super) by_parts: Divisor,
    /// The first ranks, also in `far`: parameters are nearer than memory.
    pub(super) near: [Peer; NEAR],
}

impl Exchange {
    /// What is common: few ranks, whole heads, wide units, nothing decoded, rows straight into outputs.
    pub(super) fn is_plain(&self) -> bool {
        let few = usize::try_from(self.world).is_ok_and(|world| world <= NEAR);
        let kept = match self.form {
            Form::Copy => true,
            Form::Mx => self.scale_bytes.is_multiple_of(4),
            Form::Bf16 | Form::F16 => false,
        };
        few && kept
            && self.heads_a_rank != 0
            && self.unit >= 8
            && self.out_unit >= 8
            && self.straight != 0
            && self.flagged_ids == 0
    }
}

const _: () = {
    assert!(size_of::<Control>() == 40);
    assert!(size_of::<Peer>() == 16);
    assert!(size_of::<Layer>() == 16);
    assert!(size_of::<Exchange>() == 464);
};
