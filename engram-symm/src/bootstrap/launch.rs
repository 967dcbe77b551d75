use crate::error::{Error, Result};

/// What a launcher tells each process of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process's number in the job, `0..world`.
    pub rank: usize,
    /// Processes in the job.
    pub world: usize,
    /// This process's number on its node.
    pub local_rank: usize,
    /// What tells this run from all others, equal in all its processes. It becomes part of names only.
    pub run: String,
}

impl Launch {
    /// Reads what torchrun sets: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`, and where the job
    /// is elastic `TORCHELASTIC_RUN_ID` and `TORCHELASTIC_RESTART_COUNT`. The address is never bound or connected to.
    ///
    /// # Errors
    /// [`Error::Launch`] naming the variable that is not set or cannot be used.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// The same from any source of variables.
    ///
    /// # Errors
    /// [`Error::Launch`] naming the variable that is not set or cannot be used.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |name: &str, expected: &str, fits: &dyn Fn(usize) -> bool| {
            let found = variable(name);
            match found.as_deref().and_then(|text| text.parse().ok()).filter(|&number| fits(number)) {
                Some(number) => Ok(number),
                None => Err(Error::Launch { variable: name.to_owned(), found, expected: expected.to_owned() }),
            }
        };
        let world = number("WORLD_SIZE", "a number of processes, at least 1", &|world| world >= 1)?;
        let below = format!("a number below WORLD_SIZE = {world}");
        let rank = number("RANK", &below, &|rank| rank < world)?;
        let local_rank = number("LOCAL_RANK", &below, &|local_rank| local_rank < world)?;
        let port = number("MASTER_PORT", "a port number, 0 to 65535", &|port| port <= usize::from(u16::MAX))?;
        let address = variable("MASTER_ADDR").filter(|address| !address.is_empty()).ok_or_else(|| Error::Launch {
            variable: "MASTER_ADDR".to_owned(),
            found: variable("MASTER_ADDR"),
            expected: "the address of the job's first node".to_owned(),
        })?;
        let id = variable("TORCHELASTIC_RUN_ID").unwrap_or_default();
        let restarts = variable("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        Ok(Self { rank, world, local_rank, run: format!("{address}:{port} {id:?} {restarts:?}") })
    }
}
