//! A meeting of ranks on different nodes, which share nothing but a store of keys and values.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::deadline::Deadline;
use super::group::Probe;
use super::mesh::{CONTRIBUTION, Head, unreadable};
use super::rendezvous::VERSION;
use crate::error::{Error, Result, Step};

/// Pause between two looks at a key.
const PAUSE: Duration = Duration::from_millis(10);

/// How long a rank waits for a key before it looks whether the group has failed.
const GLANCE: Duration = Duration::from_millis(200);

/// What a store may take to answer even when a deadline is near: else a rank would blame the store, not who is missing.
const ANSWER: Duration = Duration::from_secs(2);

/// A store of keys and values that all ranks reach: what launchers offer between nodes.
///
/// Values appear whole, and once a key has been set every later read sees that value or a newer one. Nothing is ever
/// deleted; keys of different groups and runs never collide.
pub trait Store: Debug + Send + Sync {
    /// Sets a key, whether or not it has a value.
    ///
    /// # Errors
    /// When the store cannot be reached within `timeout`.
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> io::Result<()>;

    /// The value of a key, if it has one.
    ///
    /// # Errors
    /// When the store cannot be reached within `timeout`.
    fn get(&self, key: &str, timeout: Duration) -> io::Result<Option<Vec<u8>>>;

    /// Waits until a key has a value; `None` when it has none after `timeout`.
    ///
    /// # Errors
    /// When the store cannot be reached.
    fn wait(&self, key: &str, timeout: Duration) -> io::Result<Option<Vec<u8>>> {
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            if let Some(value) = self.get(key, timeout.max(ANSWER))? {
                return Ok(Some(value));
            }
            std::thread::sleep(PAUSE.min(left));
        }
    }
}

/// A [`Store`] within this process, for ranks that are threads.
#[derive(Debug, Default)]
pub struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8], _: Duration) -> io::Result<()> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned(), value.to_owned());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, _: Duration) -> io::Result<Option<Vec<u8>>> {
        Ok(self.values.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned())
    }

    fn wait(&self, key: &str, timeout: Duration) -> io::Result<Option<Vec<u8>>> {
        let values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let absent = |values: &mut HashMap<String, Vec<u8>>| !values.contains_key(key);
        let (values, _) =
            self.changed.wait_timeout_while(values, timeout, absent).unwrap_or_else(PoisonError::into_inner);
        Ok(values.get(key).cloned())
    }
}

/// A rank's access to a group's keys.
#[derive(Debug)]
pub(crate) struct Link {
    store: Arc<dyn Store>,
    prefix: String,
    rank: usize,
    world: usize,
    calls: u32,
}

/// What a rank leaves for the others to find. The number tells one attempt of a rank from its next.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    version: u32,
    group: String,
    world: usize,
    attempt: u64,
}

impl Link {
    /// Meets the other ranks.
    ///
    /// A rank may find what an earlier attempt of another one left. So the group's keys follow from what all ranks left,
    /// and a meeting is complete when all ranks have said so under the same key: then each has seen the same attempts.
    pub(crate) fn meet(
        store: Arc<dyn Store>,
        group: &str,
        name: &str,
        rank: usize,
        world: usize,
        deadline: Deadline,
        probe: &Probe,
    ) -> Result<Self> {
        let before = |step| probe.before(step).map_err(|source| Error::Os { rank, step, source });
        before(Step::Find)?;
        let attempt = RandomState::new().hash_one(std::process::id());
        let own = Hello { version: VERSION, group: group.to_owned(), world, attempt };
        let own = serde_json::to_vec(&own).expect("plain data has a JSON form");
        let mut link = Self { store, prefix: name.to_owned(), rank, world, calls: 0 };
        link.set(Step::Meet, &format!("hello/{rank}"), &own, deadline)?;
        before(Step::Meet)?;
        loop {
            let mut digest = Xxh3::new();
            let mut missing = Vec::new();
            for other in 0..world {
                match link.get(Step::Meet, &format!("hello/{other}"), deadline)? {
                    None => missing.push(other),
                    Some(hello) if other == rank && hello != own => return Err(Error::DuplicateRank { rank }),
                    Some(hello) => {
                        link.judge(group, other, &hello)?;
                        digest.update(&hello);
                    }
                }
            }
            if missing.is_empty() {
                let prefix = format!("{name}/{:032x}", digest.digest128());
                let outer = std::mem::replace(&mut link.prefix, prefix);
                link.set(Step::Meet, &format!("here/{rank}"), &[], deadline)?;
                for other in 0..world {
                    if link.get(Step::Meet, &format!("here/{other}"), deadline)?.is_none() {
                        missing.push(other);
                    }
                }
                if missing.is_empty() {
                    return Ok(link);
                }
                link.prefix = outer;
            }
            let Some(left) = deadline.left() else {
                return Err(Error::Missing { step: Step::Meet, waited: deadline.limit(), ranks: missing });
            };
            std::thread::sleep(PAUSE.min(left));
        }
    }

    fn judge(&self, group: &str, other: usize, hello: &[u8]) -> Result<()> {
        let Ok(hello) = serde_json::from_slice::<Hello>(hello) else {
            return Err(unreadable(other, Step::Meet, "not a rank's words"));
        };
        let differ = |what: &str, ours: String, theirs: String| {
            Err(Error::disagreement(what, (self.rank, ours), (other, theirs)))
        };
        if hello.version != VERSION {
            return differ("the version of the bootstrap", VERSION.to_string(), hello.version.to_string());
        }
        if hello.group != group {
            return differ("the group", group.to_owned(), hello.group);
        }
        if hello.world != self.world {
            return differ("the world size", self.world.to_string(), hello.world.to_string());
        }
        Ok(())
    }

    /// Leaves `fault` for the others to find.
    pub(crate) fn tell(&self, fault: &Error) {
        let words = serde_json::to_vec(fault).expect("plain data has a JSON form");
        let _ = self.store.set(&format!("{}/fault", self.prefix), &words, ANSWER);
    }

    /// Gives `own` to all other ranks and returns what each of them gave.
    pub(crate) fn gather(&mut self, step: Step, own: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        if own.len() > CONTRIBUTION {
            return Err(Error::too_long(self.rank, step, own.len(), CONTRIBUTION));
        }
        let head = Head { call: self.calls, step: step.to_string(), last: true };
        let key = |rank: usize| format!("{}/{rank}", self.calls);
        let mut value = head.to_bytes();
        value.extend_from_slice(own);
        self.set(step, &key(self.rank), &value, deadline)?;
        let mut parts = Vec::with_capacity(self.world);
        while parts.len() < self.world {
            let other = parts.len();
            if deadline.left().is_none() {
                let mut ranks = Vec::new();
                for rank in other..self.world {
                    if self.get(step, &key(rank), deadline)?.is_none() {
                        ranks.push(rank);
                    }
                }
                // Else they have come at the last moment.
                if !ranks.is_empty() {
                    return Err(Error::Missing { step, waited: deadline.limit(), ranks });
                }
            }
            let name = self.name(&key(other));
            match self.store.wait(&name, GLANCE).map_err(|error| self.broken(step, name, &error))? {
                Some(value) => match Head::parse(&value) {
                    Some((theirs, body)) if theirs == head => parts.push(body.to_vec()),
                    Some((theirs, _)) => return Err(head.unlike(self.rank, &theirs, other)),
                    None => return Err(unreadable(other, step, "not a contribution")),
                },
                None => {
                    if let Some(words) = self.get(step, "fault", deadline)? {
                        return Err(serde_json::from_slice(&words)
                            .unwrap_or_else(|_| unreadable(other, step, "a fault that cannot be read")));
                    }
                }
            }
        }
        self.calls = self.calls.wrapping_add(1);
        Ok(parts)
    }

    fn set(&self, step: Step, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let key = self.name(key);
        let left = deadline.left().unwrap_or_default().max(ANSWER);
        self.store.set(&key, value, left).map_err(|error| self.broken(step, key, &error))
    }

    fn get(&self, step: Step, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        let key = self.name(key);
        let left = deadline.left().unwrap_or_default().max(ANSWER);
        self.store.get(&key, left).map_err(|error| self.broken(step, key, &error))
    }

    fn name(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn broken(&self, step: Step, key: String, error: &io::Error) -> Error {
        Error::Store { rank: self.rank, step, key, reason: error.to_string() }
    }
}
