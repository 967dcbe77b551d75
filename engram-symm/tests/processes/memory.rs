//! Memory, and what it must not leave behind.

use std::time::Duration;

use engram_symm::{Error, OsError, Step};
use rustix::io::Errno;

use crate::fleet::{Job, all_fail, all_succeed};
use crate::meeting::{LIMIT, join, script};
use crate::script::Action;

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("segments_are_shared", segments_are_shared),
    ("sizes_that_differ_are_named", sizes_that_differ_are_named),
    ("what_no_machine_has_is_refused_to_all", what_no_machine_has_is_refused_to_all),
    ("a_limit_on_files_is_an_error_not_a_signal", a_limit_on_files_is_an_error_not_a_signal),
    ("eight_ranks_need_few_descriptors", eight_ranks_need_few_descriptors),
    ("descriptors_that_run_out_are_told_to_all", descriptors_that_run_out_are_told_to_all),
    ("a_thousand_groups_leave_nothing", a_thousand_groups_leave_nothing),
];

fn segments_are_shared() {
    for world in [1, 2, 5, 8] {
        for bytes in [0, 1, 4096, 1 << 20] {
            let actions = [join(LIMIT), Action::Allocate(bytes), Action::Allocate(bytes), Action::CloseAll];
            all_succeed(&Job::new().run(world, |_| script(actions.clone())));
        }
    }
}

fn sizes_that_differ_are_named() {
    let bytes = |rank| if rank == 2 { 8192 } else { 4096 };
    let actions =
        |rank| [join(LIMIT), Action::vainly(Action::Allocate(bytes(rank))), Action::Allocate(1), Action::CloseAll];
    let reports = Job::new().run(3, |rank| script(actions(rank)));
    all_succeed(&reports);
    for report in reports {
        let expected = "ranks disagree on the bytes of a segment: rank 0 says 4096, rank 2 says 8192";
        assert_eq!(report.expected[0].to_string(), expected);
    }
}

fn what_no_machine_has_is_refused_to_all() {
    for bytes in [1 << 50, usize::MAX, usize::MAX - 8191] {
        let reports = Job::new().run(2, |_| script([join(LIMIT), Action::Allocate(bytes)]));
        let source = OsError(Errno::NOMEM.raw_os_error());
        all_fail(&reports, &Error::Memory { rank: 0, step: Step::Room, bytes: bytes as u64, source });
    }
}

fn a_limit_on_files_is_an_error_not_a_signal() {
    let reports = Job::new().run(2, |rank| {
        let limit = if rank == 1 { Action::LimitSize(1 << 16) } else { Action::Sleep(Duration::ZERO) };
        script([
            limit,
            join(LIMIT),
            Action::vainly(Action::Allocate(1 << 17)),
            Action::Allocate(1 << 16),
            Action::CloseAll,
        ])
    });
    all_succeed(&reports);
    for report in reports {
        let source = OsError(Errno::FBIG.raw_os_error());
        assert_eq!(report.expected, [Error::Memory { rank: 1, step: Step::Room, bytes: 1 << 17, source }]);
    }
}

fn eight_ranks_need_few_descriptors() {
    // As another user if possible: root's descriptors under way are not limited.
    let job = Job::new().by_nobody();
    let groups = [join(LIMIT), Action::Allocate(10_000), Action::Allocate(10_000)];
    let actions = [Action::LimitFiles(64)].into_iter().chain(groups.clone()).chain(groups.clone()).chain(groups);
    let actions: Vec<_> = actions.chain([Action::CloseAll]).collect();
    all_succeed(&job.run(8, |_| script(actions.clone())));
}

fn descriptors_that_run_out_are_told_to_all() {
    let allocate = |spare| {
        let reports = Job::new().run(3, |rank| {
            let limit = if rank == 1 { Action::SpareFiles(spare) } else { Action::Sleep(Duration::ZERO) };
            script([join(LIMIT), limit, Action::Allocate(1)])
        });
        reports.into_iter().map(|report| report.outcome).collect::<Vec<_>>()
    };
    let mut steps = Vec::new();
    loop {
        // Rank 1 needs a few descriptors at once, and fails at every step for the want of one more.
        let outcomes = allocate(steps.len() as u64);
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
        match &outcomes[0] {
            Err(Error::Memory { rank: 1, step, source, .. } | Error::Os { rank: 1, step, source }) => {
                assert_eq!(*source, OsError(Errno::MFILE.raw_os_error()));
                steps.push(*step);
            }
            Ok(()) => break,
            Err(error) => panic!("{error} with {} descriptors to spare", steps.len()),
        }
    }
    // Its own segment, then a copy of that descriptor and those of two peers.
    assert_eq!(steps.first(), Some(&Step::Create));
    assert!(steps.len() >= 4 && steps[1..].iter().all(|step| *step == Step::Share), "{steps:?}");
}

fn a_thousand_groups_leave_nothing() {
    for world in [1, 2, 4] {
        let count = if world == 2 { 1000 } else { 200 };
        let cycles = Action::Cycles { count, limit: Duration::from_secs(20) };
        all_succeed(&Job::new().run(world, |_| script([Action::LimitFiles(64), cycles.clone()])));
    }
}
