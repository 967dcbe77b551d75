//! Finding each other.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use engram_symm::{Error, OsError, Step};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::fleet::{Job, all_fail, all_succeed};
use crate::not_here;
use crate::script::{Action, Event, Place, Script};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("ranks_meet", ranks_meet),
    ("ranks_that_never_come_are_named", ranks_that_never_come_are_named),
    ("a_rank_that_waits_alone_names_all_others", a_rank_that_waits_alone_names_all_others),
    ("a_wrong_world_size_is_told_to_all", a_wrong_world_size_is_told_to_all),
    ("two_processes_of_one_rank_are_told_to_all", two_processes_of_one_rank_are_told_to_all),
    ("subgroups_never_mix", subgroups_never_mix),
    ("generations_never_mix", generations_never_mix),
    ("a_file_of_a_crashed_run_is_replaced", a_file_of_a_crashed_run_is_replaced),
    ("a_file_of_another_kind_is_left_alone", a_file_of_another_kind_is_left_alone),
    ("many_meet_over_a_stale_file", many_meet_over_a_stale_file),
    ("strangers_are_ignored", strangers_are_ignored),
    ("other_users_are_ignored", other_users_are_ignored),
    ("a_failed_meeting_can_be_tried_again", a_failed_meeting_can_be_tried_again),
    ("namespaces_do_not_matter", namespaces_do_not_matter),
];

pub(crate) const LIMIT: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_secs(2);

pub(crate) fn join(limit: Duration) -> Action {
    Action::Join { key: "test".to_owned(), members: None, limit }
}

pub(crate) fn script(actions: impl IntoIterator<Item = Action>) -> Script {
    Script { actions: actions.into_iter().collect(), ..Script::default() }
}

fn pause(millis: u64) -> Action {
    Action::Sleep(Duration::from_millis(millis))
}

fn ranks_meet() {
    for world in [1, 2, 3, 8] {
        for first in 0..world.min(2) {
            // Whoever comes first listens.
            let start = |rank| if rank == first { pause(0) } else { pause(50) };
            let rest = [join(LIMIT), Action::Barrier, Action::GatherMuch(300_000), Action::PeerAccess, Action::Close];
            all_succeed(&Job::new().run(world, |rank| script([start(rank)].into_iter().chain(rest.clone()))));
        }
    }
}

fn ranks_that_never_come_are_named() {
    for absent in [vec![0], vec![1, 3], vec![3]] {
        let job = Job::new();
        let present: Vec<_> = (0..4).filter(|rank| !absent.contains(rank)).collect();
        let ranks: Vec<_> = present.iter().map(|&rank| job.spawn(rank, 4, &script([join(SHORT)]))).collect();
        for rank in ranks {
            let expected = Error::Missing { step: Step::Meet, waited: SHORT, ranks: absent.clone() };
            assert_eq!(rank.report().error(), expected);
        }
    }
}

fn a_rank_that_waits_alone_names_all_others() {
    let error = Job::new().spawn(1, 3, &script([join(SHORT)])).report().error();
    assert_eq!(error.to_string(), "ranks [0, 2] are missing after 2s of rendezvous");
}

fn a_wrong_world_size_is_told_to_all() {
    for wrong in 0..3 {
        let job = Job::new();
        let world = |rank| if rank == wrong { 4 } else { 3 };
        let ranks: Vec<_> = (0..3).map(|rank| job.spawn(rank, world(rank), &script([join(LIMIT)]))).collect();
        for rank in ranks {
            let Error::Disagreement { what, rank: low, value, other, other_value } = rank.report().error() else {
                panic!("not a disagreement");
            };
            assert_eq!(what, "the world size");
            assert!(low == wrong || other == wrong, "{low} and {other} disagree, but {wrong} is wrong");
            assert_eq!([value, other_value], [world(low).to_string(), world(other).to_string()]);
        }
    }
}

fn two_processes_of_one_rank_are_told_to_all() {
    for twice in 0..3 {
        let job = Job::new();
        let late = (twice + 1) % 3;
        let start = |rank| if rank == late { pause(400) } else { pause(0) };
        let ranks = [0, 1, 2, twice].map(|rank| job.spawn(rank, 3, &script([start(rank), join(LIMIT)])));
        all_fail(&ranks.map(|rank| rank.report()), &Error::DuplicateRank { rank: twice });
    }
}

fn subgroups_never_mix() {
    let members =
        |ranks: &[usize]| Action::Join { key: "test".to_owned(), members: Some(ranks.to_vec()), limit: LIMIT };
    for _ in 0..5 {
        let reports = Job::new().run(4, |rank| {
            let mut actions = Vec::new();
            // Ranks 0 and 1 are in several groups at once, of one key, all open and with memory of their own.
            let groups: [&[usize]; 4] = [&[0, 1], &[0, 1, 2], &[1, 0], &[3, 2, 1, 0]];
            for (number, ranks) in (0..).zip(groups) {
                if ranks.contains(&rank) {
                    actions.extend([members(ranks), Action::GatherSame(vec![number]), Action::Allocate(4096)]);
                }
            }
            script(actions.into_iter().chain([Action::CloseAll]))
        });
        all_succeed(&reports);
    }
}

fn generations_never_mix() {
    // Each rank is now far ahead of the others, now far behind; groups end by dropping or by closing.
    let reports = Job::new().run(3, |rank| {
        let rounds = (0..12_u8).flat_map(|round| {
            let lag = pause(if usize::from(round % 3) == rank { 30 } else { 0 });
            let end = if round % 2 == 0 { Action::Close } else { Action::Drop };
            [lag, join(LIMIT), Action::GatherSame(vec![round]), end]
        });
        script(rounds)
    });
    all_succeed(&reports);
}

fn a_failed_meeting_can_be_tried_again() {
    let code = Errno::NFILE.raw_os_error();
    for victim in 0..3 {
        for (last, late) in [(victim, 0), ((victim + 1) % 3, 0), ((victim + 1) % 3, 300)] {
            let reports = Job::new().run(3, |rank| {
                let event = (rank == victim).then_some((Step::Meet, 0, Event::Fail(code)));
                let start = pause(if rank == last { late } else { 0 });
                let actions = [start, Action::vainly(join(LIMIT)), join(LIMIT), Action::Barrier, Action::Close];
                Script { event, ..script(actions) }
            });
            all_succeed(&reports);
            for report in reports {
                assert_eq!(report.expected, [Error::Os { rank: victim, step: Step::Meet, source: OsError(code) }]);
            }
        }
    }
}

fn in_directory(directory: &Path, actions: impl IntoIterator<Item = Action>) -> Script {
    Script { place: Place::Directory(directory.to_owned()), ..script(actions) }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("the directory is there");
    entries.map(|entry| entry.expect("the directory can be read").path()).collect()
}

/// Waits until a rank listens in `directory` and returns the socket's path.
fn socket_in(directory: &Path) -> PathBuf {
    let start = Instant::now();
    loop {
        match entries(directory).pop() {
            Some(path) => return path,
            None => assert!(start.elapsed() < LIMIT, "nobody listens"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn a_file_of_a_crashed_run_is_replaced() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = Job::new();
    let crashed = job.spawn(0, 2, &in_directory(directory.path(), [join(LIMIT)]));
    let socket = socket_in(directory.path());
    crashed.kill();
    assert!(socket.exists(), "a crash removes no file");
    all_succeed(&job.run(2, |_| in_directory(directory.path(), [join(LIMIT), Action::Allocate(1), Action::CloseAll])));
    assert_eq!(entries(directory.path()), Vec::<PathBuf>::new());
}

fn many_meet_over_a_stale_file() {
    for _ in 0..5 {
        let directory = tempfile::tempdir().expect("a directory");
        let job = Job::new();
        let crashed = job.spawn(0, 8, &in_directory(directory.path(), [join(LIMIT)]));
        socket_in(directory.path());
        crashed.kill();
        all_succeed(&job.run(8, |_| in_directory(directory.path(), [join(LIMIT), Action::Close])));
        assert_eq!(entries(directory.path()), Vec::<PathBuf>::new());
    }
}

fn a_file_of_another_kind_is_left_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = Job::new();
    let rank = job.spawn(0, 2, &in_directory(directory.path(), [join(LIMIT)]));
    let path = socket_in(directory.path());
    rank.kill();
    fs::remove_file(&path).expect("a socket can be removed");
    fs::write(&path, "precious").expect("a file can be written");
    let error = job.spawn(0, 2, &in_directory(directory.path(), [join(LIMIT)])).report().error();
    assert!(matches!(error, Error::Os { rank: 0, step: Step::Find, .. }), "{error}");
    assert_eq!(fs::read_to_string(&path).expect("the file is there"), "precious");
}

fn socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket")
}

fn address(path: &Path) -> SocketAddrUnix {
    SocketAddrUnix::new(path).expect("a short path")
}

fn strangers_are_ignored() {
    let directory = tempfile::tempdir().expect("a directory");
    let actions = [join(LIMIT), Action::Allocate(1), Action::CloseAll];
    let job = Job::new();
    let first = job.spawn(0, 2, &in_directory(directory.path(), actions.clone()));
    let path = socket_in(directory.path());
    let mut strangers = Vec::new();
    let words: [&[u8]; 8] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 60_000],
        b"{",
        b"{{}",
        b"{\"Begin\"",
        b"{{\"Fault\":{\"DuplicateRank\":{\"rank\":1}}}",
        b"{{\"Hello\":{\"version\":1,\"group\":\"another\",\"world\":2,\"rank\":1}}",
        b"p\x01\0\0\0\0\x00",
    ];
    for round in 0..40 {
        let stranger = socket();
        // The rank may have bound its socket and not listen yet.
        while rustix::net::connect(&stranger, &address(&path)) == Err(Errno::CONNREFUSED) {}
        if let Some(words) = words.get(round) {
            let sent = rustix::net::send(&stranger, words, SendFlags::NOSIGNAL).expect("the socket takes it");
            assert_eq!(sent, words.len());
        }
        // Some leave at once, some stay and say nothing.
        if round % 3 != 0 {
            strangers.push(stranger);
        }
    }
    std::thread::sleep(Duration::from_millis(100));
    let second = job.spawn(1, 2, &in_directory(directory.path(), actions));
    all_succeed(&[first.report(), second.report()]);
}

/// Opens a path to all users.
fn open_to_all(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("the path is ours");
}

fn other_users_are_ignored() {
    if !rustix::process::geteuid().is_root() {
        not_here("only root can act as another user");
    }
    let directory = tempfile::tempdir().expect("a directory");
    open_to_all(directory.path());
    let job = Job::new();
    let rank = |rank| job.spawn(rank, 2, &in_directory(directory.path(), [join(LIMIT), Action::Close]));
    let nobody = |action| Job::new().by_nobody().spawn(0, 1, &script([action]));

    // The socket's path, and the words of rank 1 in this group.
    let first = rank(0);
    let path = socket_in(directory.path());
    first.kill();
    fs::remove_file(&path).expect("the directory is ours");
    let socket = socket();
    rustix::net::bind(&socket, &address(&path)).expect("the path is free");
    rustix::net::listen(&socket, 1).expect("a bound socket");
    let second = rank(1);
    let caller = rustix::net::accept(&socket).expect("rank 1 calls");
    let mut words = vec![0; 4096];
    let (len, _) = rustix::net::recv(&caller, &mut words, RecvFlags::empty()).expect("rank 1 speaks");
    second.kill();
    drop((socket, caller));

    // Another user says the same, and is not taken for rank 1.
    fs::remove_file(&path).expect("the directory is ours");
    let first = rank(0);
    socket_in(directory.path());
    open_to_all(&path);
    nobody(Action::Knock { path: path.clone(), words: words[..len].to_owned() }).report().success();
    let second = rank(1);
    all_succeed(&[first.report(), second.report()]);

    // Another user listens, and is not taken for rank 0.
    let listener = nobody(Action::Listen { path: path.clone(), time: Duration::from_secs(2) });
    socket_in(directory.path());
    std::thread::sleep(Duration::from_millis(50));
    let error = rank(1).report().error();
    assert_eq!(error, Error::ForeignPeer { expected: 0, found: 65534 });
    listener.report().success();
}

fn namespaces_do_not_matter() {
    let wrapper = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"];
    let may = std::process::Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").status();
    if !may.is_ok_and(|status| status.success()) {
        not_here("this process may not make namespaces");
    }
    let actions = [join(LIMIT), Action::Allocate(100), Action::CloseAll];
    all_succeed(&Job::new().wrapped(&wrapper).run(3, |_| script(actions.clone())));
    let directory = tempfile::tempdir().expect("a directory");
    all_succeed(&Job::new().wrapped(&wrapper).run(3, |_| in_directory(directory.path(), actions.clone())));
}
