//! Memory that the GPUs of several processes share.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use engram_cuda::{Device, raw};
use engram_symm::access::{Handle, PeerAccess, Reason, Refusal};
use engram_symm::cuda::{Segments, peer_access};
use engram_symm::{Error, Group, OsError, Step};

use crate::ranks::{Spread, die, run, run_with_victim};

const SIGNALS: usize = 5000;
const DATA: usize = (8 << 20) + 100;
const FILL: u8 = 0xa5;

/// As if the devices did not reach each other.
const HOST: PeerAccess = PeerAccess::Host(Reason::Refused { rank: 0, peer: 1, refusal: Refusal::Disabled });

/// What the group can have: what it has decided on, and host memory in any case.
fn accesses(group: &mut Group, device: &Device) -> Vec<PeerAccess> {
    let decided = peer_access(group, device).unwrap();
    let devices = group.all_gather(&device.uuid().unwrap()).unwrap();
    if devices.iter().all(|uuid| *uuid == devices[0]) {
        assert_eq!(decided, PeerAccess::Direct(Handle::Descriptor));
    }
    let fabric = group.all_gather(&[u8::from(device.shares_by_fabric().unwrap())]).unwrap();
    let mut accesses = vec![decided, HOST];
    if matches!(decided, PeerAccess::Direct(_)) && fabric.concat().iter().all(|&has| has == 1) {
        accesses.push(PeerAccess::Direct(Handle::Fabric));
    }
    accesses
}

fn allocate(group: &mut Group, device: &Device, access: PeerAccess) -> Result<Segments, Error> {
    Segments::allocate(group, device, access, SIGNALS, DATA, FILL)
}

fn read(device: &Device, address: u64, count: usize) -> Vec<u8> {
    // SAFETY: tests read what they have allocated, and nobody writes it meanwhile.
    unsafe { raw::read(device, address, count) }.unwrap()
}

fn write(device: &Device, address: u64, values: &[u64]) {
    // SAFETY: tests write what they have allocated, and nobody reads it meanwhile.
    unsafe { raw::write(device, address, values) }.unwrap();
}

/// Every rank writes to all segments, and finds in its own what each of the others wrote.
fn check_sharing(group: &mut Group, device: &Device, segments: &Segments, round: u64) {
    let (rank, world, last) = (group.rank(), group.world(), segments.data_bytes() - 64);
    let mark = |from: usize, to: usize| (round << 32) | (from as u64) << 16 | to as u64;
    group.barrier().unwrap();
    for to in 0..world {
        for place in [segments.signals(to) + 512, segments.data(to), segments.data(to) + last as u64] {
            write(device, place + 8 * rank as u64, &[mark(rank, to)]);
        }
    }
    group.barrier().unwrap();
    for of in 0..world {
        let expected: Vec<u8> = (0..world).flat_map(|from| mark(from, of).to_ne_bytes()).collect();
        for place in [segments.signals(of) + 512, segments.data(of), segments.data(of) + last as u64] {
            assert_eq!(read(device, place, 8 * world), expected, "rank {rank} of rank {of}");
        }
    }
    group.barrier().unwrap();
}

fn all_data_is_fresh(device: &Device, segments: &Segments, world: usize) {
    for rank in 0..world {
        assert!(read(device, segments.data(rank), segments.data_bytes()) == vec![FILL; segments.data_bytes()]);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn one_rank_needs_nobody() {
    let device = Device::new(0).unwrap();
    let mut group = Group::alone();
    for access in [PeerAccess::Direct(Handle::Descriptor), PeerAccess::Direct(Handle::Fabric), HOST] {
        let mut segments = allocate(&mut group, &device, access).unwrap();
        assert!(segments.data_bytes() >= DATA);
        assert_eq!(read(&device, segments.signals(0), SIGNALS), [0; SIGNALS]);
        all_data_is_fresh(&device, &segments, 1);
        check_sharing(&mut group, &device, &segments, 1);
        let addresses = (segments.signals(0), segments.data(0));
        assert_eq!(segments.reserve(&mut group), Err(Error::Awake));
        for round in 2..5 {
            segments.discard().unwrap();
            segments.discard().unwrap();
            segments.reserve(&mut group).unwrap();
            assert_eq!((segments.signals(0), segments.data(0)), addresses);
            all_data_is_fresh(&device, &segments, 1);
            // Signals stay.
            assert_eq!(read(&device, segments.signals(0) + 512, 8), ((round - 1_u64) << 32).to_ne_bytes());
            check_sharing(&mut group, &device, &segments, round);
        }
    }
    let none = PeerAccess::None(Reason::NoHandle { rank: 0 });
    assert!(matches!(allocate(&mut group, &device, none), Err(Error::Invalid { .. })));
}

#[test]
#[ignore = "needs a CUDA device"]
fn data_that_is_discarded_is_given_back() {
    const LARGE: usize = 256 << 20;
    /// What the driver may keep for itself.
    const SLACK: usize = 8 << 20;
    let device = Device::new(0).unwrap();
    let mut group = Group::alone();
    let free = || usize::try_from(device.memory().unwrap().0).unwrap();
    let access = PeerAccess::Direct(Handle::Descriptor);
    let mut segments = Segments::allocate(&mut group, &device, access, 1, LARGE, 0).unwrap();
    let with = free();
    segments.discard().unwrap();
    assert!(free() + SLACK >= with + LARGE);
    segments.reserve(&mut group).unwrap();
    assert!(free() <= with + SLACK);
    drop(segments);
    assert!(free() + SLACK >= with + LARGE);
}

#[test]
#[ignore = "needs a CUDA device"]
fn ranks_share_their_segments() {
    for world in [2, 3] {
        for spread in Spread::all(world) {
            run("segments::ranks_share_their_segments", world, spread, "share", share);
        }
    }
}

fn share(mut group: Group, device: Device) {
    let world = group.world();
    for access in accesses(&mut group, &device) {
        let segments = allocate(&mut group, &device, access).unwrap();
        for rank in 0..world {
            assert_eq!(read(&device, segments.signals(rank), SIGNALS), [0; SIGNALS]);
        }
        all_data_is_fresh(&device, &segments, world);
        check_sharing(&mut group, &device, &segments, 1);
    }
    group.close().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn addresses_survive_sleep_on_all_ranks() {
    for spread in Spread::all(2) {
        run("segments::addresses_survive_sleep_on_all_ranks", 2, spread, "sleep", sleep);
    }
}

fn sleep(mut group: Group, device: Device) {
    for access in accesses(&mut group, &device) {
        let mut segments = allocate(&mut group, &device, access).unwrap();
        let places = |segments: &Segments| [0, 1].map(|rank| (segments.signals(rank), segments.data(rank)));
        let before = places(&segments);
        check_sharing(&mut group, &device, &segments, 1);
        for round in 2..6 {
            segments.discard().unwrap();
            segments.reserve(&mut group).unwrap();
            assert_eq!(places(&segments), before);
            all_data_is_fresh(&device, &segments, 2);
            check_sharing(&mut group, &device, &segments, round);
        }
        // A rank that still has its data fails all, and loses nothing.
        if group.rank() == 1 {
            segments.discard().unwrap();
        }
        assert_eq!(segments.reserve(&mut group), Err(Error::Awake));
        segments.discard().unwrap();
        segments.reserve(&mut group).unwrap();
        check_sharing(&mut group, &device, &segments, 6);
    }
    group.close().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_step_that_fails_on_one_rank_fails_all_and_leaves_nothing() {
    for spread in Spread::all(2) {
        run("segments::a_step_that_fails_on_one_rank_fails_all_and_leaves_nothing", 2, spread, "fail", fail);
    }
}

/// The steps that a rank does by itself when it allocates, in their order, and when it reserves.
pub(crate) fn steps(access: PeerAccess) -> [&'static [Step]; 2] {
    use Step::{Addresses, Create, Export, Fill, Import, Map, MapPeers, Pin, Reserve, Room, Seal, Size};
    match access {
        PeerAccess::Direct(_) => {
            [&[Addresses, Create, Map, Fill, Export, Import, MapPeers], &[Create, Map, Fill, Export, Import, MapPeers]]
        }
        _ => [&[Room, Create, Size, Seal, Reserve, Map, MapPeers, Fill, Pin], &[Reserve, Fill, Pin]],
    }
}

/// Has the next such step fail once, on `victim`.
pub(crate) fn fail_next(group: &mut Group, victim: usize, step: Step) {
    let armed = AtomicBool::new(group.rank() == victim);
    group.set_probe(move |at| {
        let fails = at == step && armed.swap(false, Ordering::Relaxed);
        if fails { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    });
}

#[track_caller]
pub(crate) fn failed<T: std::fmt::Debug>(outcome: Result<T, Error>, victim: usize, at: Step) {
    let Err(Error::Memory { rank, step, source, .. }) = outcome else { panic!("{at:?}: {outcome:?}") };
    assert_eq!((rank, step, source), (victim, at, OsError(5)));
}

fn fail(mut group: Group, device: Device) {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    for access in accesses(&mut group, &device) {
        // The driver takes descriptors and memory of its own the first time.
        drop(allocate(&mut group, &device, access).unwrap());
        group.barrier().unwrap();
        let (open, free) = (descriptors(), device.memory().unwrap().0);
        group.barrier().unwrap();
        let [allocating, reserving] = steps(access);
        for (victim, &step) in [0, 1].into_iter().flat_map(|victim| allocating.iter().map(move |step| (victim, step))) {
            fail_next(&mut group, victim, step);
            failed(allocate(&mut group, &device, access), victim, step);
        }
        let mut segments = allocate(&mut group, &device, access).unwrap();
        let addresses = [0, 1].map(|rank| segments.data(rank));
        for (victim, &step) in [1, 0].into_iter().flat_map(|victim| reserving.iter().map(move |step| (victim, step))) {
            segments.discard().unwrap();
            fail_next(&mut group, victim, step);
            failed(segments.reserve(&mut group), victim, step);
            segments.reserve(&mut group).unwrap();
            assert_eq!([0, 1].map(|rank| segments.data(rank)), addresses);
            check_sharing(&mut group, &device, &segments, 1);
        }
        drop(segments);
        group.barrier().unwrap();
        assert_eq!(descriptors(), open, "{access}");
        let lost = free.saturating_sub(device.memory().unwrap().0);
        assert!(lost < 32 << 20, "{lost} bytes of device memory are lost: {access}");
        group.barrier().unwrap();
    }
    group.close().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_the_driver_refuses_one_rank_is_told_to_all() {
    for spread in Spread::all(2) {
        run("segments::what_the_driver_refuses_one_rank_is_told_to_all", 2, spread, "refuse", refuse);
    }
}

fn refuse(mut group: Group, device: Device) {
    let access = peer_access(&mut group, &device).unwrap();
    let outcome = Segments::allocate(&mut group, &device, access, SIGNALS, 1 << 40, FILL);
    match (access, &outcome) {
        (PeerAccess::Direct(_), Err(Error::Cuda { rank: 0, code: Some(2), doing, .. })) => {
            assert!(doing.contains("creating the segment"), "{doing}");
        }
        (PeerAccess::Host(_), Err(Error::Memory { rank: 0, step: Step::Room, .. })) => {}
        _ => panic!("{access}: {outcome:?}"),
    }
    let all = group.all_gather(format!("{outcome:?}").as_bytes()).unwrap();
    assert_eq!(all[0], all[1]);
    let bytes = DATA + group.rank();
    let outcome = Segments::allocate(&mut group, &device, access, SIGNALS, bytes, FILL);
    assert!(matches!(outcome, Err(Error::Disagreement { .. })), "{outcome:?}");
    let segments = allocate(&mut group, &device, access).unwrap();
    check_sharing(&mut group, &device, &segments, 1);
    group.close().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_outlives_the_rank_that_had_it() {
    for spread in Spread::all(2) {
        run_with_victim("segments::memory_outlives_the_rank_that_had_it", 2, spread, "leave", Some(1), leave);
    }
}

fn leave(mut group: Group, device: Device) {
    let all: Vec<_> = accesses(&mut group, &device)
        .into_iter()
        .map(|access| allocate(&mut group, &device, access).unwrap())
        .collect();
    for segments in &all {
        check_sharing(&mut group, &device, segments, 1);
    }
    if group.rank() == 1 {
        // With all of it mapped.
        die();
    }
    let error = group.barrier().unwrap_err();
    assert!(matches!(error, Error::Lost { rank: 1, .. }), "{error}");
    for segments in &all {
        write(&device, segments.data(1) + 4096, &[7]);
        assert_eq!(read(&device, segments.data(1) + 4096, 8), 7_u64.to_ne_bytes());
        assert_eq!(read(&device, segments.signals(1) + 512, 8), (1_u64 << 32 | 1).to_ne_bytes());
    }
    drop(all);
    device.synchronize().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_that_dies_while_it_allocates_is_named_and_leaves_nothing() {
    const NAME: &str = "segments::a_rank_that_dies_while_it_allocates_is_named_and_leaves_nothing";
    for step in [Step::Fill, Step::Export, Step::Share, Step::MapPeers] {
        run_with_victim(NAME, 2, Spread::One, &format!("{step:?}"), Some(1), |group, device| {
            survive(group, &device, step)
        });
    }
}

fn survive(mut group: Group, device: &Device, step: Step) {
    let access = peer_access(&mut group, device).unwrap();
    drop(allocate(&mut group, device, access).unwrap());
    group.barrier().unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    if group.rank() == 1 {
        group.set_probe(move |at| if at == step { die() } else { Ok(()) });
    }
    let error = allocate(&mut group, device, access).unwrap_err();
    assert!(matches!(error, Error::Lost { rank: 1, .. }), "{error}");
    // The group has failed, and its one connection is closed.
    assert_eq!(std::fs::read_dir("/proc/self/fd").unwrap().count(), open - 1);
    assert_eq!(allocate(&mut group, device, access).unwrap_err(), error);
    // The device works on, alone.
    let segments = allocate(&mut Group::alone(), device, access).unwrap();
    check_sharing(&mut Group::alone(), device, &segments, 1);
}

#[test]
#[ignore = "needs a CUDA device"]
fn fifty_allocations_leave_nothing() {
    run("segments::fifty_allocations_leave_nothing", 2, Spread::One, "fifty", fifty);
}

fn fifty(mut group: Group, device: Device) {
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let accesses = accesses(&mut group, &device);
    let round = |group: &mut Group| {
        for &access in &accesses {
            let mut segments = allocate(group, &device, access).unwrap();
            segments.discard().unwrap();
            segments.reserve(group).unwrap();
        }
        group.barrier().unwrap();
    };
    round(&mut group);
    let (open, free) = (count(), device.memory().unwrap().0);
    group.barrier().unwrap();
    (0..50).for_each(|_| round(&mut group));
    assert_eq!(count(), open);
    assert!(free.saturating_sub(device.memory().unwrap().0) < 64 << 20);
    group.barrier().unwrap();
    group.close().unwrap();
}
