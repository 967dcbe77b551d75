//! Groups whose ranks are threads of this process.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use engram_symm::access::{Device, Handle, HostReach, Peer, Reach, Reason, Refusal};
use engram_symm::{Error, Group, HostMemory, Launch, Memory, OsError, PeerAccess, Rendezvous, Step};

/// Runs `rank` as each rank of a group of threads and returns what each did, by rank.
fn on_threads<T: Send>(groups: Vec<Group>, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("the rank panicked")).collect()
    })
}

/// A byte of the segment of `rank`.
fn byte(memory: &HostMemory, rank: usize, at: usize) -> &AtomicU8 {
    assert!(at < memory.bytes());
    // SAFETY: the offset is within the segment.
    let byte = unsafe { memory.segment(rank).add(at) };
    // SAFETY: the segment is mapped for as long as `memory` lives, and all accesses here are atomic.
    unsafe { AtomicU8::from_ptr(byte.as_ptr()) }
}

#[test]
fn all_ranks_see_all_segments() {
    for world in 1..=8 {
        on_threads(Group::threads(world).unwrap(), |mut group| {
            group.set_timeout(Duration::from_secs(20));
            let memory = HostMemory::allocate(&mut group, 5000).unwrap();
            assert_eq!((memory.bytes(), memory.world()), (8192, world));
            for rank in 0..world {
                assert!((0..memory.bytes()).all(|at| byte(&memory, rank, at).load(Relaxed) == 0));
            }
            group.barrier().unwrap();
            let own = u8::try_from(memory.rank()).unwrap() + 1;
            for rank in 0..world {
                // Each rank writes one byte into every segment.
                byte(&memory, rank, memory.rank()).store(own, Relaxed);
            }
            group.barrier().unwrap();
            for rank in 0..world {
                for writer in 0..world {
                    assert_eq!(usize::from(byte(&memory, rank, writer).load(Relaxed)), writer + 1);
                }
            }
            group.close().unwrap();
        });
    }
}

#[test]
fn threads_meet_at_a_socket() {
    let run = format!("threads_meet_at_a_socket {}", std::process::id());
    for round in 0..20 {
        let world = 1 + round % 5;
        thread::scope(|scope| {
            for rank in 0..world {
                let launch = Launch { rank, world, local_rank: rank, run: run.clone() };
                scope.spawn(move || {
                    let mut group =
                        Rendezvous::new(launch, format!("of {world}")).timeout(Duration::from_secs(20)).join().unwrap();
                    let gathered = group.all_gather(&[u8::try_from(rank).unwrap()]).unwrap();
                    assert!(gathered.iter().enumerate().all(|(rank, bytes)| usize::from(bytes[0]) == rank));
                    group.close().unwrap();
                });
            }
        });
    }
}

#[test]
fn the_lowest_rank_that_fails_decides_for_all() {
    let error = |rank| Error::Os { rank, step: Step::Gather, source: OsError(5) };
    let outcomes = on_threads(Group::threads(4).unwrap(), |mut group| {
        let rank = group.rank();
        let own = if rank == 0 || rank == 3 { Ok(rank) } else { Err(error(rank)) };
        let first = group.agree(Step::Gather, own);
        (first, group.agree(Step::Gather, Ok(rank)))
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome, (Err(error(1)), Ok(rank)));
    }
}

#[test]
fn a_contribution_too_long_is_told_to_all() {
    let errors = on_threads(Group::threads(3).unwrap(), |mut group| {
        let len = if group.rank() == 1 { (1 << 20) + 1 } else { 1 << 20 };
        group.all_gather(&vec![0; len]).unwrap_err()
    });
    let expected = "the contribution of rank 1 to a collective step is 1048577 bytes, expected at most 1048576";
    assert!(errors.iter().all(|error| error.to_string() == expected), "{errors:?}");
}

#[test]
fn launchers_say_what_is_wrong_with_their_variables() {
    let usual = |name: &str| match name {
        "RANK" => Some("1"),
        "WORLD_SIZE" => Some("4"),
        "LOCAL_RANK" => Some("0"),
        "MASTER_ADDR" => Some("10.0.0.1"),
        "MASTER_PORT" => Some("29500"),
        _ => None,
    };
    let launch = |changed: &str, value: Option<&str>| {
        Launch::from_variables(|name| if name == changed { value } else { usual(name) }.map(str::to_owned))
    };
    let right = launch("", None).unwrap();
    assert_eq!((right.rank, right.world, right.local_rank), (1, 4, 0));
    for (variable, value) in [("TORCHELASTIC_RUN_ID", "a"), ("TORCHELASTIC_RESTART_COUNT", "1"), ("MASTER_PORT", "1")] {
        assert_ne!(launch(variable, Some(value)).unwrap().run, right.run, "another {variable} is another run");
    }
    let wrong = [
        ("RANK", Some("4"), "RANK is 4, expected a number below WORLD_SIZE = 4"),
        ("RANK", None, "RANK is not set, expected a number below WORLD_SIZE = 4"),
        ("RANK", Some("-1"), "RANK is -1, expected a number below WORLD_SIZE = 4"),
        ("WORLD_SIZE", Some("0"), "WORLD_SIZE is 0, expected a number of processes, at least 1"),
        ("WORLD_SIZE", Some("four"), "WORLD_SIZE is four, expected a number of processes, at least 1"),
        ("LOCAL_RANK", Some(""), "LOCAL_RANK is , expected a number below WORLD_SIZE = 4"),
        ("MASTER_PORT", Some("65536"), "MASTER_PORT is 65536, expected a port number, 0 to 65535"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not set, expected the address of the job's first node"),
    ];
    for (variable, value, message) in wrong {
        assert_eq!(launch(variable, value).unwrap_err().to_string(), message);
    }
}

#[test]
fn impossible_groups_are_refused_before_any_wait() {
    let launch = |rank, world| Launch { rank, world, local_rank: 0, run: "impossible".to_owned() };
    let invalid = |rendezvous: Rendezvous| match rendezvous.join().unwrap_err() {
        Error::Invalid { what, .. } => what,
        error => panic!("{error}"),
    };
    assert_eq!(invalid(Rendezvous::new(launch(0, 0), "a")), "the rank");
    assert_eq!(invalid(Rendezvous::new(launch(3, 3), "a")), "the rank");
    assert_eq!(invalid(Rendezvous::new(launch(3, usize::MAX), "a")), "the rank");
    assert_eq!(invalid(Rendezvous::new(launch(0, 5000), "a")), "the number of ranks within a node");
    assert_eq!(invalid(Rendezvous::new(launch(0, 3), "a").members(&[])), "the group's members");
    assert_eq!(invalid(Rendezvous::new(launch(0, 3), "a").members(&[1, 2])), "the group's members");
    assert_eq!(invalid(Rendezvous::new(launch(0, 3), "a").members(&[0, 3])), "a member");
    assert_eq!(invalid(Rendezvous::new(launch(0, 3), "a").members(&[0, 1, 0])), "a member");
    assert_eq!(invalid(Rendezvous::new(launch(0, 3), "a".repeat(10_000))), "what names the group");
    let long = format!("/tmp/{}", "long/".repeat(30));
    assert_eq!(invalid(Rendezvous::new(launch(0, 3), "a").directory(long)), "the path of the group's socket");
    assert!(Group::threads(0).is_err());
}

#[test]
fn groups_and_memory_go_where_threads_go() {
    fn sent<T: Send>() {}
    fn shared<T: Send + Sync>() {}
    sent::<Group>();
    shared::<HostMemory>();
    shared::<Error>();
}

/// A GPU of a machine that is made up.
struct Gpu {
    rank: usize,
    refuses: Option<(usize, Refusal)>,
}

impl Reach for Gpu {
    fn device(&self) -> Device {
        Device::Gpu { uuid: [u8::try_from(self.rank).expect("few ranks"); 16], descriptors: true, fabric: false }
    }

    fn reaches(&self, peer: &Peer) -> Result<(), Refusal> {
        assert_ne!(peer.rank, self.rank);
        assert_eq!((usize::from(peer.uuid[0]), peer.same_node), (peer.rank, true));
        match self.refuses {
            Some((refused, refusal)) if refused == peer.rank => Err(refusal),
            _ => Ok(()),
        }
    }
}

#[test]
fn one_device_out_of_reach_decides_for_all() {
    let decide = |refusing: Option<(usize, usize)>| {
        on_threads(Group::threads(4).unwrap(), |mut group| {
            let rank = group.rank();
            let refuses = refusing.filter(|&(by, _)| by == rank).map(|(_, peer)| (peer, Refusal::NoPath));
            group.peer_access(&Gpu { rank, refuses }).unwrap()
        })
    };
    assert_eq!(decide(None), [PeerAccess::Direct(Handle::Descriptor); 4]);
    for (rank, peer) in [(0, 3), (3, 0), (1, 2)] {
        let reason = Reason::Refused { rank, peer, refusal: Refusal::NoPath };
        assert_eq!(decide(Some((rank, peer))), [PeerAccess::Host(reason); 4]);
    }
    let mixed = on_threads(Group::threads(3).unwrap(), |mut group| {
        let rank = group.rank();
        let gpu = Gpu { rank, refuses: None };
        group.peer_access(if rank == 2 { &HostReach } else { &gpu }).unwrap_err().to_string()
    });
    let expected = "ranks disagree on the memory to share: rank 0 says device memory, rank 2 says host memory";
    assert!(mixed.iter().all(|error| error == expected), "{mixed:?}");
}
