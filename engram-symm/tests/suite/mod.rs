//! What every backend of the exchange must do, whether its ranks are threads, processes or GPUs.
//!
//! A case is a function that each rank of a group runs. The expected rows are computed by each rank for itself, row by
//! row from the whole tables.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    unreachable_pub,
    reason = "a case fails by panicking, its numbers are small, and each test binary has this module for itself"
)]

pub mod cases;
pub mod model;

use engram_symm::protocol::Fault;
use engram_symm::{Algorithm, Error, Group, Ids, Result};
use model::{Shape, Tables};

/// How slowly a rank goes about its memory.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    Steady,
    /// Every access takes some hundred microseconds.
    Slow,
    /// Some accesses are held up, by up to half a millisecond.
    Random(u64),
}

/// One rank's exchange, whatever its memory is.
pub trait Exchanger {
    /// The rows as bytes, layer by layer: packed or values, then scales.
    fn run(&mut self, ids: Ids<'_>, slot: u32, algorithm: Algorithm) -> Result<Vec<Vec<u8>>>;
    /// The same of the last exchange once more, all zero if it failed.
    fn rows(&self) -> Vec<Vec<u8>>;
    fn check(&self) -> Result<(), Fault>;
    fn sleep(&mut self) -> Result<()>;
    fn wake(&mut self, group: &mut Group) -> Result<()>;
    fn close(self) -> Result<()>;
}

/// A kind of group.
pub trait Backend {
    type Exchange: Exchanger;

    /// Whether `check` sees what others have reported before this rank's next call.
    const SEES_REPORTS: bool = true;

    /// An exchange of the whole group that has done `epoch` steps, over memory of its own. Collective.
    fn exchange(group: &mut Group, shape: &Shape, tables: Tables, epoch: u32, pace: Pace) -> Result<Self::Exchange>;
}

/// The fault in an error that says nothing else.
#[track_caller]
pub fn fault<T: std::fmt::Debug>(outcome: Result<T>) -> Fault {
    match outcome {
        Err(Error::Fault(fault)) => fault,
        other => panic!("expected a fault, got {other:?}"),
    }
}

/// Defines a test a case: calls `$run` with the case's name, each of the world sizes, and the case for `$backend`.
#[macro_export]
macro_rules! conformance {
    ($run:path, $backend:ty) => {
        $crate::conformance!($run, $backend,
            world_of_one: [1],
            uneven_heads: [1, 2, 3, 4, 5, 6, 7, 8],
            rows_are_owned: [1, 2, 3, 4, 8],
            every_output: [3],
            fewer_tokens_than_the_slot: [3, 4, 8],
            many_tokens: [3],
            views_of_ids: [2],
            delayed_writer: [2],
            delayed_reader: [2],
            late_but_in_time: [3],
            back_to_back_across_the_wrap: [2, 3],
            both_algorithms_in_turn: [4],
            two_groups_at_once: [3],
            two_groups_once_begun: [2],
            closing_two_at_once: [2],
            different_call_counts: [3],
            another_buffer_order: [3],
            slots_that_disagree: [3],
            algorithms_that_disagree: [3],
            closing_while_others_exchange: [3],
            a_table_that_fails: [3],
            sleeping_and_waking: [3],
            refusals_are_local: [2],
        );
    };
    ($run:path, $backend:ty, $($case:ident: $worlds:expr,)*) => {
        $(
            #[test]
            fn $case() {
                for world in $worlds {
                    $run(stringify!($case), world, $crate::suite::cases::$case::<$backend>);
                }
            }
        )*
    };
}
