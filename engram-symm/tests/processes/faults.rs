//! Ranks that die, hang, fail or do something else, at every step.

use std::time::{Duration, Instant};

use engram_symm::{Error, OsError, Registration, Step};
use rustix::io::Errno;

use crate::fleet::{Job, all_fail, all_succeed};
use crate::meeting::{LIMIT, join, script};
use crate::script::{Action, Event, Script};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_death_at_any_step_is_told_to_all", a_death_at_any_step_is_told_to_all),
    ("a_death_before_it_comes_leaves_a_rank_missing", a_death_before_it_comes_leaves_a_rank_missing),
    ("a_failure_at_any_step_is_told_to_all", a_failure_at_any_step_is_told_to_all),
    ("a_failed_allocation_leaves_nothing_and_the_group_usable", a_failed_allocation_leaves_nothing),
    ("a_rank_that_hangs_is_named", a_rank_that_hangs_is_named),
    ("another_call_is_named", another_call_is_named),
    ("a_dropped_group_is_noticed", a_dropped_group_is_noticed),
    ("children_do_not_keep_a_group_alive", children_do_not_keep_a_group_alive),
    ("a_failed_group_stays_failed", a_failed_group_stays_failed),
    ("buffers_that_differ_are_named", buffers_that_differ_are_named),
];

const ALLOCATION: [Step; 7] =
    [Step::Room, Step::Create, Step::Size, Step::Seal, Step::Reserve, Step::Map, Step::MapPeers];
const TOGETHER: [Step; 4] = [Step::Allocate, Step::Share, Step::Publish, Step::Close];

/// Everything that a group does in its life. The rank `last` comes a little later than the others.
fn life(rank: usize, last: usize, limit: Duration) -> Script {
    let late = Action::Sleep(Duration::from_millis(if rank == last { 60 } else { 0 }));
    script([late, join(limit), Action::Register(Vec::new()), Action::Allocate(10_000), Action::CloseAll])
}

fn a_death_at_any_step_is_told_to_all() {
    let rendezvous = [Step::Meet, Step::Connect, Step::Confirm, Step::Register];
    for step in rendezvous.into_iter().chain(ALLOCATION).chain(TOGETHER) {
        for victim in 0..3 {
            // The victim comes first, and so listens, or last.
            for last in [victim, (victim + 1) % 3] {
                let reports = Job::new().run_with_victim(3, victim, |rank| {
                    let event = (rank == victim).then_some((step, 0, Event::Die));
                    Script { event, ..life(rank, last, Duration::from_millis(1500)) }
                });
                for report in reports {
                    match report.error() {
                        Error::Lost { rank, .. } => assert_eq!(rank, victim, "at {step}"),
                        // It died before the one that listens had heard of it.
                        Error::Missing { step: Step::Meet, ranks, .. } if step == Step::Meet => {
                            assert_eq!(ranks, [victim])
                        }
                        error => panic!("{error} at {step}"),
                    }
                }
            }
        }
    }
}

fn a_death_before_it_comes_leaves_a_rank_missing() {
    let limit = Duration::from_secs(1);
    for victim in 0..3 {
        let reports = Job::new().run_with_victim(3, victim, |rank| {
            let event = (rank == victim).then_some((Step::Find, 0, Event::Die));
            Script { event, ..life(rank, 3, limit) }
        });
        all_fail(&reports, &Error::Missing { step: Step::Meet, waited: limit, ranks: vec![victim] });
    }
}

fn a_failure_at_any_step_is_told_to_all() {
    let code = Errno::NFILE.raw_os_error();
    for step in [Step::Meet, Step::Connect, Step::Confirm, Step::Register, Step::Allocate, Step::Share, Step::Publish] {
        for victim in 0..3 {
            for last in [victim, (victim + 1) % 3] {
                let reports = Job::new().run(3, |rank| {
                    let event = (rank == victim).then_some((step, 0, Event::Fail(code)));
                    Script { event, ..life(rank, last, LIMIT) }
                });
                all_fail(&reports, &Error::Os { rank: victim, step, source: OsError(code) });
            }
        }
    }
}

fn a_failed_allocation_leaves_nothing() {
    let code = Errno::NOSPC.raw_os_error();
    for world in [1, 2, 3] {
        for step in ALLOCATION.into_iter().filter(|&step| world > 1 || step != Step::MapPeers) {
            for victim in 0..world {
                let reports = Job::new().run(world, |rank| {
                    let event = (rank == victim).then_some((step, 0, Event::Fail(code)));
                    let actions =
                        [join(LIMIT), Action::vainly(Action::Allocate(4096)), Action::Allocate(4096), Action::CloseAll];
                    Script { event, ..script(actions) }
                });
                all_succeed(&reports);
                for report in reports {
                    let expected = Error::Memory { rank: victim, step, bytes: 4096, source: OsError(code) };
                    assert_eq!(report.expected, [expected]);
                }
            }
        }
    }
}

fn a_rank_that_hangs_is_named() {
    let limit = Duration::from_secs(1);
    for step in [Step::Confirm, Step::Reserve, Step::MapPeers] {
        for victim in 0..3 {
            let job = Job::new();
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let event = (rank == victim).then_some((step, 0, Event::Sleep(2 * limit)));
                    job.spawn(rank, 3, &Script { event, ..life(rank, 3, limit) })
                })
                .collect();
            for rank in ranks {
                // The deadline of one rank is the first to pass. The others hear of it, the victim when it wakes.
                let error = rank.report().error();
                assert!(matches!(&error, Error::Missing { ranks, .. } if *ranks == [victim]), "{error} at {step}");
            }
        }
    }
}

fn another_call_is_named() {
    let reports = Job::new().run(2, |rank| {
        let call = if rank == 0 { Action::Barrier } else { Action::Register(Vec::new()) };
        script([join(LIMIT), call])
    });
    let error = reports[0].error();
    all_fail(&reports, &error);
    let expected = "ranks disagree on the collective call: rank 0 says a collective step (call 1), \
                    rank 1 says comparing the registered buffers (call 1)";
    assert_eq!(error.to_string(), expected);
}

fn a_dropped_group_is_noticed() {
    let reports = Job::new().run(3, |rank| {
        let rest = if rank == 1 { vec![Action::Drop] } else { vec![Action::Barrier, Action::Barrier] };
        script([join(LIMIT)].into_iter().chain(rest))
    });
    reports[1].success();
    for report in [&reports[0], &reports[2]] {
        assert!(matches!(report.error(), Error::Lost { rank: 1, .. }), "{:?}", report.outcome);
    }
}

fn children_do_not_keep_a_group_alive() {
    let start = Instant::now();
    let reports = Job::new().run_with_victim(3, 2, |rank| {
        let rest = if rank == 2 { vec![Action::LeaveChild, Action::Die] } else { vec![Action::Barrier] };
        script([join(LIMIT), Action::Allocate(1)].into_iter().chain(rest))
    });
    all_fail(&reports, &Error::Lost { rank: 2, step: Step::Gather });
    assert!(start.elapsed() < Duration::from_secs(10), "the child held the connections");
}

fn a_failed_group_stays_failed() {
    let reports = Job::new().run(2, |rank| {
        let event = (rank == 0).then_some((Step::Register, 0, Event::Fail(Errno::IO.raw_os_error())));
        let actions = [join(LIMIT), Action::vainly(Action::Register(Vec::new())), Action::Allocate(1)];
        Script { event, ..script(actions) }
    });
    let error = Error::Os { rank: 0, step: Step::Register, source: OsError(Errno::IO.raw_os_error()) };
    all_fail(&reports, &error);
    for report in reports {
        assert_eq!(report.expected, std::slice::from_ref(&error));
    }
}

fn buffers_that_differ_are_named() {
    let buffer = |name: &str, bytes, dtype: &str, digest| Registration {
        name: name.to_owned(),
        bytes,
        dtype: dtype.to_owned(),
        digest,
    };
    let usual = || vec![buffer("ids", 1 << 40, "i32", u128::MAX), buffer("rows", 264, "u8", 1 << 90)];
    let all = |list: &dyn Fn(usize) -> Vec<Registration>| {
        Job::new().run(3, |rank| script([join(LIMIT), Action::Register(list(rank)), Action::Close]))
    };
    all_succeed(&all(&|_| usual()));
    type Change = fn(&mut Vec<Registration>);
    let changes: [(&str, &str, &str, Change); 6] = [
        ("the name of buffer 0", "\"ids\"", "\"rows\"", |list| list.reverse()),
        ("the bytes of buffer 1 (\"rows\")", "264", "256", |list| list[1].bytes = 256),
        ("the dtype of buffer 0 (\"ids\")", "i32", "i64", |list| list[0].dtype = "i64".to_owned()),
        (
            "the table digest of buffer 1 (\"rows\")",
            "00000000040000000000000000000000",
            "00000000040000000000000000000001",
            |list| list[1].digest += 1,
        ),
        ("the number of buffers", "2, the last of them \"rows\"", "1, the last of them \"ids\"", |list| {
            list.pop();
        }),
        ("the number of buffers", "2, the last of them \"rows\"", "none", Vec::clear),
    ];
    for (what, right, wrong, change) in changes {
        for odd in 0..3 {
            let reports = all(&|rank| {
                let mut list = usual();
                if rank == odd {
                    change(&mut list);
                }
                list
            });
            let other = odd.max(1);
            let values = if odd == 0 { [wrong, right] } else { [right, wrong] };
            let [value, other_value] = values.map(str::to_owned);
            let what = what.to_owned();
            all_fail(&reports, &Error::Disagreement { what, rank: 0, value, other, other_value });
        }
    }
}
