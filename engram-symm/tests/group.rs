//! Groups whose ranks are threads of this process.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use engram_symm::{Group, HostMemory, Launch, Memory, Rendezvous};

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
