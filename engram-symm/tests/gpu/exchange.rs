//! The suite on GPUs: ranks are processes, on one device and on a device each.

use crate::backend::{
    Chosen, FlaggedIds, Flags, Gpu, Lines, LinesApart, MarkedLines, PinnedFlags, PinnedLines, ThroughHost, Way,
};
use crate::ranks::{Rank, Spread, start};
use crate::suite::Backend;
use crate::suite::cases;

/// Runs cases one after the other, each in a group of its own.
macro_rules! cases {
    ($rank:expr, $backend:ty: $($case:ident)*) => {
        $({
            let start = std::time::Instant::now();
            cases::$case::<$backend>($rank.group(stringify!($case)));
            if $rank.number() == 0 {
                println!("  {} {:.2} s", stringify!($case), start.elapsed().as_secs_f64());
            }
        })*
    };
}

/// What any number of ranks can do.
fn any_world<B: Backend>(rank: &Rank)
where
    B::Exchange: Send,
{
    cases!(rank, B: uneven_heads rows_are_owned fewer_tokens_than_the_slot many_tokens every_output late_but_in_time
        back_to_back_across_the_wrap both_algorithms_in_turn);
    if rank.takes_turns() {
        cases!(rank, B: two_groups_once_begun);
    } else {
        cases!(rank, B: two_groups_at_once);
    }
    cases!(rank, B: closing_two_at_once slots_that_disagree algorithms_that_disagree sleeping_and_waking refusals_are_local
        views_of_ids);
}

fn of_two<B: Backend>(rank: &Rank)
where
    B::Exchange: Send,
{
    cases!(rank, B: delayed_writer delayed_reader);
    any_world::<B>(rank);
}

fn of_three<B: Backend>(rank: &Rank)
where
    B::Exchange: Send,
{
    cases!(rank, B: different_call_counts another_buffer_order closing_while_others_exchange);
    any_world::<B>(rank);
}

/// Of more ranks than most machines have devices. Ranks that take turns do what needs few exchanges, some 200.
fn of_many<B: Backend>(rank: &Rank)
where
    B::Exchange: Send,
{
    if rank.takes_turns() {
        cases!(rank, B: uneven_heads rows_are_owned fewer_tokens_than_the_slot slots_that_disagree sleeping_and_waking
            refusals_are_local);
    } else {
        of_three::<B>(rank);
    }
}

fn everywhere(name: &str, world: usize, case: fn(&Rank)) {
    let spreads = if world > 3 { vec![Spread::widest(world)] } else { Spread::all(world) };
    for spread in spreads {
        start(name, world, spread, "suite", |rank| case(&rank));
    }
}

/// Each exchange measures hundreds of steps first, which takes long where ranks take turns on a device, and says nothing.
#[test]
#[ignore = "needs a CUDA device"]
fn two_ranks_as_measured() {
    start("exchange::two_ranks_as_measured", 2, Spread::widest(2), "suite", |rank| any_world::<Gpu<Chosen>>(&rank));
}

macro_rules! conformance {
    ($($test:ident: $world:expr, $cases:ident, $way:ty;)*) => {
        $(
            #[test]
            #[ignore = "needs a CUDA device"]
            fn $test() {
                everywhere(concat!("exchange::", stringify!($test)), $world, $cases::<Gpu<$way>>);
            }
        )*
    };
}

fn alone<B: Backend>(rank: &Rank) {
    cases!(rank, B: world_of_one uneven_heads rows_are_owned);
}

conformance! {
    one_rank: 1, alone, Flags;
    one_rank_by_lines: 1, alone, Lines;
    one_rank_by_lines_apart: 1, alone, LinesApart;
    two_ranks_by_lines: 2, of_two, Lines;
    two_ranks_by_lines_apart: 2, of_two, LinesApart;
    two_ranks_by_marked_lines: 2, of_two, MarkedLines;
    two_ranks_by_flags: 2, of_two, Flags;
    two_ranks_with_flagged_ids: 2, of_two, FlaggedIds;
    two_ranks_with_pinned_tables_by_flags: 2, any_world, PinnedFlags;
    two_ranks_with_pinned_tables_by_lines: 2, any_world, PinnedLines;
    two_ranks_through_the_host: 2, any_world, ThroughHost;
    three_ranks_by_lines: 3, of_three, Lines;
    three_ranks_by_lines_apart: 3, of_three, LinesApart;
    three_ranks_by_flags: 3, of_three, Flags;
    four_ranks_by_lines: 4, of_many, Lines;
    four_ranks_by_lines_apart: 4, of_many, LinesApart;
    four_ranks_by_flags: 4, of_many, Flags;
    four_ranks_with_pinned_tables_by_lines: 4, of_many, PinnedLines;
    four_ranks_with_pinned_tables_by_flags: 4, of_many, PinnedFlags;
    eight_ranks_by_lines: 8, of_many, Lines;
    eight_ranks_by_lines_apart: 8, of_many, LinesApart;
    eight_ranks_by_flags: 8, of_many, Flags;
    eight_ranks_with_pinned_tables_by_lines: 8, of_many, PinnedLines;
    eight_ranks_with_pinned_tables_by_flags: 8, of_many, PinnedFlags;
    // More ranks than kernels have addresses of in their parameter.
    nine_ranks_by_lines: 9, of_many, Lines;
    nine_ranks_by_flags: 9, of_many, Flags;
}

/// Random shapes, sizes, ids, algorithms and ownership, bit for bit what one process computes.
fn random<W: Way, const COUNT: u64>(rank: &Rank) {
    cases::random_exchanges::<Gpu<W>, COUNT>(rank.group("random"));
}

#[test]
#[ignore = "needs a CUDA device"]
fn ten_thousand_random_exchanges() {
    let spread = Spread::all(2).pop().unwrap();
    start("exchange::ten_thousand_random_exchanges", 2, spread, "random", |rank| {
        random::<Lines, 2000>(&rank);
        random::<LinesApart, 2000>(&rank);
        random::<MarkedLines, 2000>(&rank);
        random::<Flags, 2000>(&rank);
        random::<Chosen, 2000>(&rank);
    });
}

/// Tables in device and in pinned memory.
fn random_in_all_ways<const COUNT: u64>(rank: &Rank) {
    random::<Lines, COUNT>(rank);
    random::<LinesApart, COUNT>(rank);
    random::<MarkedLines, COUNT>(rank);
    random::<Flags, COUNT>(rank);
    random::<PinnedLines, COUNT>(rank);
    random::<PinnedFlags, COUNT>(rank);
}

/// 300 exchanges of ranks that take turns; else 7,500, and 1,250 that choose for themselves, which takes hundreds of exchanges each time.
fn stress(name: &str, world: usize) {
    start(name, world, Spread::widest(world), "random", |rank| {
        if rank.takes_turns() {
            random_in_all_ways::<50>(&rank);
        } else {
            random_in_all_ways::<1250>(&rank);
            random::<Chosen, 1250>(&rank);
        }
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn random_exchanges_of_four_ranks() {
    stress("exchange::random_exchanges_of_four_ranks", 4);
}

#[test]
#[ignore = "needs a CUDA device"]
fn random_exchanges_of_eight_ranks() {
    stress("exchange::random_exchanges_of_eight_ranks", 8);
}
