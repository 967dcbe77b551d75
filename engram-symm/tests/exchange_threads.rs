//! Exchanges between the threads of one process.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod host;
mod suite;

use std::convert::Infallible;
use std::time::Duration;

use engram_symm::protocol::{Call, Failure, Fault, Operation, Payload, Phase, Progress, Protocol, signal_bytes};
use engram_symm::{Algorithm, Error, Exchange, Group, HostMemory};
use host::Host;
use suite::cases::random_exchanges;
use suite::model::{Shape, Tables};

/// Runs `case` as every rank of a group.
fn run(name: &str, world: usize, case: fn(Group)) {
    std::thread::scope(|scope| {
        for (rank, mut group) in Group::threads(world).unwrap().into_iter().enumerate() {
            group.set_timeout(Duration::from_secs(60));
            let named = std::thread::Builder::new().name(format!("{name}, rank {rank} of {world}"));
            named.spawn_scoped(scope, move || case(group)).unwrap();
        }
    });
}

conformance!(run, Host);

#[test]
fn a_thousand_random_exchanges() {
    for world in 1..=8 {
        run("a_thousand_random_exchanges", world, random_exchanges::<Host, 125>);
    }
}

/// Two steps at once on one rank, as two graphs that overlap would do: both fail, and so do the other ranks.
#[test]
fn steps_that_overlap_fail_on_all_ranks() {
    for operation in [Operation::Barrier, Operation::Push] {
        run(
            "steps_that_overlap_fail_on_all_ranks",
            2,
            match operation {
                Operation::Push => |group| overlap(group, Operation::Push),
                _ => |group| overlap(group, Operation::Barrier),
            },
        );
    }
}

fn overlap(mut group: Group, operation: Operation) {
    let memory = HostMemory::allocate(&mut group, signal_bytes(2)).unwrap();
    let overlap = Fault::Overlap { rank: 0, epoch: 1 };
    if group.rank() == 0 {
        let (mut first, mut second) = (Protocol::new(2), Protocol::new(2));
        first.begin(&memory, operation, 1, &mut Nothing).unwrap();
        assert_eq!(first.poll(&memory, &mut Nothing), Ok(Progress::Waiting(Phase::Ids)));
        assert_eq!(second.begin(&memory, operation, 1, &mut Nothing), Err(overlap));
        assert_eq!(first.poll(&memory, &mut Nothing), Err(Failure::Fault(overlap)));
    }
    group.barrier().unwrap();
    if group.rank() == 1 {
        let mut protocol = Protocol::new(2);
        assert_eq!(protocol.begin(&memory, operation, 1, &mut Nothing), Err(overlap));
        assert_eq!(protocol.fault(&memory), Some(overlap));
    }
    group.barrier().unwrap();
}

struct Nothing;

impl Payload for Nothing {
    type Error = Infallible;

    fn publish(&mut self, _: Call) {}

    fn serve(&mut self, _: usize) -> Result<(), Infallible> {
        Ok(())
    }

    fn collect(&mut self, _: usize) {}
}

/// A rank that sleeps is woken by a signal, long before its deadline.
#[test]
fn a_sleeping_rank_is_woken() {
    run("a_sleeping_rank_is_woken", 3, |mut group| {
        let shape = Shape { deadline: Duration::from_secs(1000), ..Shape::new(3, 5) };
        let parts = shape.parts(group.rank(), Tables::Sound);
        let mut exchange = Exchange::create(&mut group, "sleepy", shape.config(), parts).unwrap();
        for step in 0..30 {
            let ids = shape.ids(group.rank(), step, 8);
            if step % 3 == group.rank() as u64 {
                std::thread::sleep(Duration::from_millis(5));
            }
            let rows = exchange.run(shape.view(&ids), 8, Algorithm::Push).unwrap();
            assert!(rows.packed().unwrap() == shape.expected(&ids, 8)[0]);
        }
        exchange.close().unwrap();
        group.close().unwrap();
    });
}

/// Exchanges are told apart by their names, and configs must be alike.
#[test]
fn another_name_or_config_is_seen_by_all() {
    run("another_name_or_config_is_seen_by_all", 3, |mut group| {
        let shape = Shape::new(3, 5);
        let parts = |group: &Group| shape.parts(group.rank(), Tables::Sound);
        let odd = group.rank() == 1;
        for (name, tables) in [(if odd { "b" } else { "a" }, 1), ("a", if odd { 2 } else { 1 })] {
            let parts = parts(&group);
            let created = Exchange::create(&mut group, name, shape.config().with_tables(tables), parts);
            assert!(matches!(created, Err(Error::Disagreement { rank: 0, other: 1, .. })), "{created:?}");
        }
        // A part that only one rank lacks fails on all of them, and the group goes on.
        let without = if odd { Vec::new() } else { parts(&group) };
        let created = Exchange::create(&mut group, "a", shape.config(), without);
        assert!(matches!(created, Err(Error::Invalid { .. })), "{created:?}");
        let parts = parts(&group);
        Exchange::create(&mut group, "a", shape.config(), parts).unwrap().close().unwrap();
    });
}
