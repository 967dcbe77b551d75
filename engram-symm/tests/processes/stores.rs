//! Meetings through a store.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use engram_symm::{Error, Step, Store, TcpStore, TcpStoreServer};

use crate::fleet::{Job, all_fail, all_succeed};
use crate::meeting::{LIMIT, join, script};
use crate::script::{Action, Event, Place, Script};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("ranks_meet_through_a_store", ranks_meet_through_a_store),
    ("a_store_knows_who_is_missing", a_store_knows_who_is_missing),
    ("a_store_shows_disagreements", a_store_shows_disagreements),
    ("a_rank_that_comes_again_is_found", a_rank_that_comes_again_is_found),
    ("a_slow_client_keeps_nobody_waiting", a_slow_client_keeps_nobody_waiting),
    ("a_slow_server_is_given_up", a_slow_server_is_given_up),
    ("a_dead_server_is_named", a_dead_server_is_named),
];

fn server() -> TcpStoreServer {
    TcpStoreServer::bind("127.0.0.1:0").expect("a free port")
}

fn at(address: SocketAddr, actions: impl IntoIterator<Item = Action>) -> Script {
    Script { place: Place::Tcp(address), ..script(actions) }
}

fn ranks_meet_through_a_store() {
    let server = server();
    let round = [join(LIMIT), Action::Barrier, Action::GatherMuch(100_000), Action::PeerAccess, Action::Close];
    let actions: Vec<_> = round.iter().chain(&round).chain(&round).cloned().collect();
    for world in [1, 2, 4] {
        all_succeed(&Job::new().run(world, |_| at(server.address(), actions.clone())));
    }
    // Descriptors do not travel through it.
    let reports = Job::new().run(2, |_| at(server.address(), [join(LIMIT), Action::Allocate(1)]));
    all_fail(&reports, &Error::AcrossNodes { step: Step::Allocate });
}

fn a_store_knows_who_is_missing() {
    let server = server();
    let limit = Duration::from_millis(900);
    for (step, at_step) in [(Step::Find, Step::Meet), (Step::Confirm, Step::Confirm), (Step::Gather, Step::Gather)] {
        let reports = Job::new().run_with_victim(3, 1, |rank| {
            let event = (rank == 1).then_some((step, 0, Event::Die));
            Script { event, ..at(server.address(), [join(limit), Action::Barrier]) }
        });
        for report in reports {
            let Error::Missing { step, ranks, .. } = report.error() else { panic!("{:?}", report.outcome) };
            assert_eq!((step, ranks), (at_step, vec![1]));
        }
    }
}

fn a_store_shows_disagreements() {
    let server = server();
    let job = Job::new();
    let world = |rank| if rank == 1 { 4 } else { 3 };
    let ranks: Vec<_> = (0..3).map(|rank| job.spawn(rank, world(rank), &at(server.address(), [join(LIMIT)]))).collect();
    for rank in ranks {
        let Error::Disagreement { what, rank, other, .. } = rank.report().error() else { panic!("not a disagreement") };
        assert_eq!(what, "the world size");
        assert!(rank == 1 || other == 1);
    }
    let reports = Job::new().run(2, |rank| {
        let call = if rank == 0 { Action::Barrier } else { Action::PeerAccess };
        at(server.address(), [join(LIMIT), call])
    });
    let error = reports[0].error();
    assert!(matches!(error, Error::Disagreement { .. }), "{error}");
    all_fail(&reports, &error);
    let job = Job::new();
    let twice = [0, 0].map(|rank| job.spawn(rank, 2, &at(server.address(), [join(Duration::from_secs(2))])));
    let errors = twice.map(|rank| rank.report().error());
    assert!(errors.contains(&Error::DuplicateRank { rank: 0 }), "{errors:?}");
}

fn a_rank_that_comes_again_is_found() {
    // Rank 0 comes, dies, and comes again, while rank 1 has already seen its first words.
    let server = server();
    let job = Job::new();
    let first = job.spawn(0, 2, &at(server.address(), [join(LIMIT)]));
    thread::sleep(Duration::from_millis(200));
    first.kill();
    let second = job.spawn(1, 2, &at(server.address(), [join(LIMIT), Action::Barrier, Action::Close]));
    thread::sleep(Duration::from_millis(200));
    let again = job.spawn(0, 2, &at(server.address(), [join(LIMIT), Action::Barrier, Action::Close]));
    all_succeed(&[second.report(), again.report()]);
}

fn a_slow_client_keeps_nobody_waiting() {
    let server = server();
    let slow: Vec<_> = (0..20_u8)
        .map(|part| {
            let mut stream = TcpStream::connect(server.address()).expect("the server listens");
            // Some stop in the midst of a request, some send what is none.
            let request = [b's', 3, 0, 0, 0, 200, 0, 0, 0, b'k', b'e', b'y'];
            let junk = [0xff; 64];
            let words = if part % 2 == 0 { &request[..usize::from(part).min(request.len())] } else { &junk };
            stream.write_all(words).expect("the server reads");
            stream
        })
        .collect();
    all_succeed(&Job::new().run(3, |_| at(server.address(), [join(LIMIT), Action::Barrier, Action::Close])));
    drop(slow);
}

/// A server that answers one byte at a time, or not at all.
fn dripping(pause: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a caller");
            thread::spawn(move || {
                let mut request = [0; 4096];
                while stream.read(&mut request).is_ok_and(|read| read > 0) {
                    for byte in [1, 200, 0, 0, 0].into_iter().chain([b' '; 200]) {
                        thread::sleep(pause);
                        if stream.write_all(&[byte]).is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    address
}

fn a_slow_server_is_given_up() {
    let store = TcpStore::new(dripping(Duration::from_millis(20)));
    let start = Instant::now();
    let error = store.get("key", Duration::from_millis(500)).expect_err("200 bytes take four seconds");
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    assert!(start.elapsed() < Duration::from_secs(2));
    let silent = dripping(Duration::from_secs(3600));
    let report = Job::new().spawn(0, 2, &at(silent, [join(Duration::from_millis(600))])).report();
    assert!(matches!(report.error(), Error::Store { rank: 0, step: Step::Meet, .. }), "{:?}", report.outcome);
}

fn a_dead_server_is_named() {
    let server = server();
    let actions = [join(LIMIT), Action::Sleep(Duration::from_millis(500)), Action::Barrier];
    let job = Job::new();
    let ranks = [0, 1].map(|rank| job.spawn(rank, 2, &at(server.address(), actions.clone())));
    // Once both have met.
    thread::sleep(Duration::from_millis(300));
    drop(server);
    for rank in ranks {
        let number = rank.rank;
        let error = rank.report().error();
        assert!(matches!(&error, Error::Store { rank, step: Step::Gather, .. } if *rank == number), "{error}");
    }
}
