//! Exchanges between the threads of one process.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod suite;

use std::time::Duration;

use engram_symm::Group;
use suite::cases::random_exchanges;
use suite::host::Host;

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
