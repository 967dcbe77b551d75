//! What one rank does, told by the test to a process of its own.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use engram_symm::access::{HostReach, Reason};
use engram_symm::{
    Error, Group, HostMemory, Launch, Memory, PeerAccess, Registration, Rendezvous, Result, Step, TcpStore,
};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, Signal};
use serde::{Deserialize, Serialize};

/// Where a rank's script meets the others.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) enum Place {
    #[default]
    Name,
    Directory(PathBuf),
    Tcp(SocketAddr),
}

/// What befalls a rank when it comes to a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Event {
    Die,
    Fail(i32),
    Sleep(Duration),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Action {
    /// Sleeps.
    Sleep(Duration),
    /// Limits the descriptors of the process.
    LimitFiles(u64),
    /// Leaves the process this many free descriptors.
    SpareFiles(u64),
    /// Limits the size of files.
    LimitSize(u64),
    /// Joins a group and puts it last.
    Join { key: String, members: Option<Vec<usize>>, limit: Duration },
    /// A barrier of the last group.
    Barrier,
    /// Gathers these bytes in the last group; all must bring the same.
    GatherSame(Vec<u8>),
    /// Gathers as many bytes as these, and checks what the others brought.
    GatherMuch(usize),
    /// Registers buffers in the last group.
    Register(Vec<Registration>),
    /// Asks for the host backend's peer access in the last group.
    PeerAccess,
    /// Allocates memory in the last group, proves that all ranks share it, and keeps it.
    Allocate(usize),
    /// Does what must fail; that error is reported, and the script goes on.
    Vainly(Box<Action>),
    /// Joins, allocates and closes again and again.
    Cycles { count: usize, limit: Duration },
    /// Closes the last group.
    Close,
    /// Drops the last group.
    Drop,
    /// Starts a child that outlives this process.
    LeaveChild,
    /// Connects to a socket and says something.
    Knock { path: PathBuf, words: Vec<u8> },
    /// Listens at a path for a while.
    Listen { path: PathBuf, time: Duration },
    /// Kills this process.
    Die,
    /// Closes all groups and frees all memory.
    CloseAll,
}

impl Action {
    pub(crate) fn vainly(action: Self) -> Self {
        Self::Vainly(Box::new(action))
    }
}

/// One rank's part in a test.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Script {
    pub place: Place,
    pub event: Option<(Step, usize, Event)>,
    pub actions: Vec<Action>,
}

/// What a rank reports: the error that ended its script, and what it still held at the end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub outcome: Result<()>,
    /// Errors that the script expected.
    pub expected: Vec<Error>,
    /// Descriptors more than at the start.
    pub descriptors: i64,
    /// Mapped segments.
    pub segments: usize,
}

impl Script {
    pub(crate) fn run(&self) -> Report {
        let launch = Launch::from_env().expect("the test sets the launcher's variables");
        let before = descriptors();
        let mut rank = Rank {
            script: self,
            launch,
            groups: Vec::new(),
            memories: Vec::new(),
            expected: Vec::new(),
            times: Arc::default(),
        };
        let outcome = self.actions.iter().try_for_each(|action| rank.act(action));
        let Rank { groups, memories, expected, .. } = rank;
        drop((groups, memories));
        // Counting takes a descriptor.
        let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
        let limit = Rlimit { current: maximum, maximum };
        rustix::process::setrlimit(Resource::Nofile, limit).expect("a limit can be raised as far as it was");
        Report { outcome, expected, descriptors: descriptors() - before, segments: segments() }
    }
}

struct Rank<'a> {
    script: &'a Script,
    launch: Launch,
    groups: Vec<Group>,
    memories: Vec<HostMemory>,
    expected: Vec<Error>,
    /// How often this rank has come to the step of the event.
    times: Arc<AtomicUsize>,
}

impl Rank<'_> {
    fn act(&mut self, action: &Action) -> Result<()> {
        match action {
            Action::Sleep(time) => std::thread::sleep(*time),
            Action::LimitFiles(count) => limit(Resource::Nofile, *count),
            Action::SpareFiles(spare) => {
                // The one that this takes is the next that is free: all below it are open.
                let next = std::fs::File::open("/dev/null").expect("a descriptor is free");
                let next = u64::try_from(next.as_raw_fd()).expect("a descriptor");
                let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
                let limit = Rlimit { current: Some(next + spare), maximum };
                rustix::process::setrlimit(Resource::Nofile, limit).expect("a limit can be lowered");
            }
            Action::LimitSize(bytes) => limit(Resource::Fsize, *bytes),
            Action::Join { key, members, limit } => {
                let members = members.clone().unwrap_or_else(|| (0..self.launch.world).collect());
                let group = self.rendezvous(key, *limit).members(&members).join()?;
                assert_eq!(members[group.rank()], self.launch.rank);
                assert_eq!(group.world(), members.len());
                self.groups.push(group);
            }
            Action::Barrier => self.last().barrier()?,
            Action::GatherSame(bytes) => {
                let gathered = self.last().all_gather(bytes)?;
                assert!(gathered.iter().all(|other| other == bytes), "{gathered:?} where all have {bytes:?}");
            }
            Action::GatherMuch(len) => {
                let bytes = |rank: usize| vec![u8::try_from(rank).expect("few ranks"); *len + rank];
                let group = self.last();
                let gathered = group.all_gather(&bytes(group.rank()))?;
                assert!(gathered.iter().enumerate().all(|(rank, other)| *other == bytes(rank)));
            }
            Action::Register(buffers) => self.last().register(buffers)?,
            Action::PeerAccess => {
                let group = self.last();
                let (access, one_node) = (group.peer_access(&HostReach)?, group.one_node());
                // Ranks on different nodes have no host memory in common.
                let expected = if one_node { PeerAccess::Host } else { PeerAccess::None };
                assert_eq!(access, expected(Reason::HostBackend));
            }
            Action::Allocate(bytes) => {
                let memory = HostMemory::allocate(self.last(), *bytes)?;
                prove(self.last(), &memory)?;
                self.memories.push(memory);
            }
            Action::Vainly(action) => {
                let error = self.act(action).expect_err("the action must fail");
                self.expected.push(error);
            }
            Action::Cycles { count, limit } => {
                for _ in 0..*count {
                    let mut group = self.rendezvous("cycle", *limit).join()?;
                    let memory = HostMemory::allocate(&mut group, 1)?;
                    prove(&mut group, &memory)?;
                    group.close()?;
                }
            }
            Action::Close => self.groups.pop().expect("a group is open").close()?,
            Action::Drop => drop(self.groups.pop()),
            Action::LeaveChild => {
                let child = std::process::Command::new("sleep").arg("20").stdout(std::process::Stdio::null()).spawn();
                drop(child.expect("there is a sleep command"));
            }
            Action::Knock { path, words } => {
                let socket = socket();
                // Bound, but perhaps not listening yet.
                let address = SocketAddrUnix::new(path).expect("a short path");
                while rustix::net::connect(&socket, &address) == Err(rustix::io::Errno::CONNREFUSED) {}
                // It may have been sent away already.
                let _ = rustix::net::send(&socket, words, SendFlags::NOSIGNAL);
                std::thread::sleep(Duration::from_millis(200));
            }
            Action::Listen { path, time } => {
                let socket = socket();
                rustix::net::bind(&socket, &SocketAddrUnix::new(path).expect("a short path"))
                    .expect("the path is free");
                rustix::net::listen(&socket, 1).expect("a bound socket");
                rustix::fs::chmod(path, 0o777.into()).expect("the socket is ours");
                std::thread::sleep(*time);
            }
            Action::Die => die(),
            Action::CloseAll => {
                self.memories.clear();
                while let Some(group) = self.groups.pop() {
                    group.close()?;
                }
            }
        }
        Ok(())
    }

    fn last(&mut self) -> &mut Group {
        self.groups.last_mut().expect("a group is open")
    }

    fn rendezvous(&self, key: &str, limit: Duration) -> Rendezvous {
        let rendezvous = Rendezvous::new(self.launch.clone(), key).timeout(limit);
        let rendezvous = match &self.script.place {
            Place::Name => rendezvous,
            Place::Directory(directory) => rendezvous.directory(directory),
            Place::Tcp(address) => rendezvous.store(Arc::new(TcpStore::new(*address))),
        };
        let Some((at, nth, event)) = self.script.event.clone() else { return rendezvous };
        let times = self.times.clone();
        rendezvous.probe(move |step| {
            if step != at || times.fetch_add(1, Relaxed) != nth {
                return Ok(());
            }
            match event {
                Event::Die => die(),
                Event::Fail(code) => return Err(io::Error::from_raw_os_error(code)),
                Event::Sleep(time) => std::thread::sleep(time),
            }
            Ok(())
        })
    }
}

fn limit(resource: Resource, limit: u64) {
    let limit = Rlimit { current: Some(limit), maximum: Some(limit) };
    rustix::process::setrlimit(resource, limit).expect("a limit can be lowered");
}

fn socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket")
}

fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).expect("a process may kill itself");
    unreachable!("killed")
}

/// Proves that the segments were zero, and that what each rank writes to each segment reaches all ranks.
fn prove(group: &mut Group, memory: &HostMemory) -> Result<()> {
    for rank in 0..memory.world() {
        assert!((0..memory.bytes()).all(|at| byte(memory, rank, at).load(Relaxed) == 0));
    }
    group.barrier()?;
    for rank in 0..memory.world() {
        let mark = u8::try_from(memory.rank() + 1).expect("few ranks");
        byte(memory, rank, memory.rank()).store(mark, Relaxed);
    }
    group.barrier()?;
    for rank in 0..memory.world() {
        for writer in 0..memory.world() {
            assert_eq!(usize::from(byte(memory, rank, writer).load(Relaxed)), writer + 1);
        }
    }
    Ok(())
}

/// A byte of the segment of `rank`.
fn byte(memory: &HostMemory, rank: usize, at: usize) -> &AtomicU8 {
    assert!(at < memory.bytes());
    // SAFETY: the offset is within the segment.
    let byte = unsafe { memory.segment(rank).add(at) };
    // SAFETY: the segment is mapped for as long as `memory` lives, and all accesses here are atomic.
    unsafe { AtomicU8::from_ptr(byte.as_ptr()) }
}

/// Open descriptors of this process.
fn descriptors() -> i64 {
    let count = std::fs::read_dir("/proc/self/fd").expect("procfs is mounted").count();
    i64::try_from(count).expect("a small number")
}

/// Segments that this process has mapped.
fn segments() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs is mounted");
    maps.lines().filter(|line| line.contains("memfd:engram-symm")).count()
}
