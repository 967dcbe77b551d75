use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_128;

use super::deadline::Deadline;
use super::group::{Group, Probe, RENDEZVOUS};
use super::launch::Launch;
use super::rendezvous::Meeting;
use super::socket::Address;
use super::store::{self, Store};
use crate::error::{Error, Result, Step};

/// Groups of each name that this process has created.
static CREATED: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);

/// Ranks that can meet at a socket: each has a connection to each other one.
const MOST: usize = 1024;

/// Processes of a job.
const MOST_AT_ALL: usize = 1 << 20;

/// Bytes of what names a group, which every rank tells every other.
const LONGEST: usize = 8 << 10;

/// Where ranks meet.
#[derive(Debug, Clone)]
enum Place {
    /// At an abstract socket name.
    Name,
    /// At a socket file in this directory.
    Directory(PathBuf),
    /// In this store.
    Store(Arc<dyn Store>),
}

/// How a group's ranks find each other.
///
/// ```no_run
/// use engram_symm::{Launch, Rendezvous};
///
/// # fn main() -> engram_symm::Result<()> {
/// let launch = Launch::from_env()?;
/// let mut group = Rendezvous::new(launch, "exchange").join()?;
/// group.barrier()?;
/// group.close()
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "ranks meet in `join`"]
pub struct Rendezvous {
    launch: Launch,
    key: String,
    /// All ranks of the job unless given.
    members: Option<Vec<usize>>,
    generation: Option<u64>,
    place: Place,
    limit: Duration,
    probe: Probe,
}

impl Rendezvous {
    /// A meeting of all ranks of the job. `key` tells it from the job's other groups.
    pub fn new(launch: Launch, key: impl Into<String>) -> Self {
        Self {
            launch,
            key: key.into(),
            members: None,
            generation: None,
            place: Place::Name,
            limit: RENDEZVOUS,
            probe: Probe::default(),
        }
    }

    /// Only these ranks of the job meet; they are numbered in this order within the group. Groups of different members
    /// never meet each other, whatever their keys.
    pub fn members(mut self, ranks: &[usize]) -> Self {
        self.members = Some(ranks.to_vec());
        self
    }

    /// Which group of this key and these members it is. Without this each process counts the ones it has created, which
    /// is the same number on all ranks as long as each creates them in the same order.
    pub fn generation(mut self, generation: u64) -> Self {
        self.generation = Some(generation);
        self
    }

    /// Ranks meet at a socket file in `directory` rather than at an abstract name, which only processes of one network
    /// namespace share. The file is removed when all have met; one that a crashed run left is replaced.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.place = Place::Directory(directory.into());
        self
    }

    /// Ranks meet through a store, and may be on different nodes. Such a group cannot pass descriptors, and it learns of
    /// a dead rank by the deadline only.
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.place = Place::Store(store);
        self
    }

    /// How long to wait for the other ranks, here and in each collective call of the group; 300 s unless set.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// See [`Group::set_probe`]; covers the rendezvous too.
    pub fn probe(mut self, probe: impl Fn(Step) -> io::Result<()> + Send + Sync + 'static) -> Self {
        self.probe = Probe::new(probe);
        self
    }

    /// Meets the other ranks. Collective over the members.
    ///
    /// # Errors
    /// * [`Error::Invalid`] when this process is no member, a member is not in the job, or the directory's path is too
    ///   long for a socket;
    /// * [`Error::Missing`] at the deadline, naming exactly the ranks that have not come;
    /// * [`Error::Lost`], [`Error::DuplicateRank`], [`Error::Disagreement`] for a rank that died, came twice, or counts
    ///   another world, on all ranks;
    /// * [`Error::ForeignPeer`] when another user holds the group's name; [`Error::Os`] for the system's refusals.
    pub fn join(self) -> Result<Group> {
        let (rank, world) = self.own_place()?;
        let name = self.name();
        // Ranks may be threads of one process: each has its own count.
        let counted = format!("rank {rank} of {name}");
        let generation = self.generation.unwrap_or_else(|| created(&counted, 0));
        let identity = format!("{name} generation {generation}");
        if identity.len() > LONGEST {
            let found = format!("{} bytes", identity.len());
            return invalid("what names the group", found, format!("at most {LONGEST}"));
        }
        let short = format!("engram-symm-{:032x}", xxh3_128(identity.as_bytes()));
        let (deadline, probe) = (Deadline::after(self.limit), &self.probe);
        let mut group = match self.place {
            _ if world == 1 => Group::alone(),
            Place::Store(store) => {
                let link = store::Link::meet(store, &identity, &short, rank, world, deadline, probe)?;
                Group::of_store(rank, world, link)
            }
            Place::Name | Place::Directory(_) => {
                if world > MOST {
                    let found = world.to_string();
                    return invalid("the number of ranks within a node", found, format!("at most {MOST}"));
                }
                let address = self.place.address(&short)?;
                let meeting = Meeting { address: &address, group: &identity, rank, world, deadline, probe };
                Group::of_mesh(rank, world, meeting.attend()?)
            }
        };
        group.set_timeout(self.limit);
        group.replace_probe(self.probe);
        group.confirm(deadline)?;
        if self.generation.is_none() {
            created(&counted, 1);
        }
        Ok(group)
    }

    /// This rank's number in the group, and the number of its ranks.
    fn own_place(&self) -> Result<(usize, usize)> {
        let Launch { rank, world, .. } = self.launch;
        if world > MOST_AT_ALL || rank >= world {
            return invalid("the rank", format!("{rank} of {world}"), format!("a rank of at most {MOST_AT_ALL}"));
        }
        let Some(members) = &self.members else { return Ok((rank, world)) };
        let mut seen = vec![false; world];
        for &member in members {
            match seen.get_mut(member) {
                None => return invalid("a member", member.to_string(), format!("below the world size, {world}")),
                Some(true) => return invalid("a member", format!("{member} twice"), "each once".to_owned()),
                Some(seen) => *seen = true,
            }
        }
        match members.iter().position(|&member| member == rank) {
            Some(place) => Ok((place, members.len())),
            None => invalid("the group's members", format!("{members:?}"), format!("{rank}, this rank, among them")),
        }
    }

    /// What tells the group from all others but those before and after it.
    fn name(&self) -> String {
        // The size of the job stays out of the name: ranks that disagree on it should meet, and be told.
        let members = match &self.members {
            Some(members) if !members.iter().copied().eq(0..self.launch.world) => format!("{members:?}"),
            _ => "all".to_owned(),
        };
        format!("{:?} group {:?} of {members}", self.launch.run, self.key)
    }
}

impl Place {
    /// The socket's address. Names are shared by all users of a machine.
    fn address(&self, name: &str) -> Result<Address> {
        let name = format!("{name}-{}", rustix::process::geteuid().as_raw());
        let Self::Directory(directory) = self else { return Ok(Address::Abstract(name)) };
        let bytes = directory.join(&name).as_os_str().len();
        if bytes > Address::LONGEST {
            let found = format!("{bytes} bytes in {}", directory.display());
            return invalid("the path of the group's socket", found, format!("at most {}", Address::LONGEST));
        }
        Ok(Address::File { directory: directory.clone(), name })
    }
}

fn invalid<T>(what: &str, found: String, expected: String) -> Result<T> {
    Err(Error::Invalid { what: what.to_owned(), found, expected })
}

/// Adds to the count of groups of this name and returns what it was.
fn created(name: &str, more: u64) -> u64 {
    let mut created = CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    let count = created.get_or_insert_default().entry(name.to_owned()).or_default();
    let before = *count;
    *count += more;
    before
}
