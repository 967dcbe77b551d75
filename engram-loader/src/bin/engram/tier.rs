//! The tiers by name.

use anyhow::Result;
use clap::ValueEnum;
use engram_loader::{Direct, Mapped, Pool, Progress, Resident, TableExtents};
use engram_ple::TableSource;
use std::sync::Arc;

/// Where rows are read from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Tier {
    /// The page cache, through a mapping of the files
    Mapped,
    /// The device, past the page cache
    Direct,
    /// Memory of its own, loaded first
    Resident,
}

impl Tier {
    pub(crate) const ALL: [Self; 3] = [Self::Mapped, Self::Direct, Self::Resident];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::Direct => "direct",
            Self::Resident => "resident",
        }
    }

    /// Opens a table. `readers` is how many reads the direct tier keeps in flight; 0 for its default.
    pub(crate) fn open(
        self,
        table: &TableExtents,
        pool: &Arc<Pool>,
        readers: usize,
        progress: &dyn Progress,
    ) -> Result<OpenTable> {
        let (table, pool) = (table.clone(), Arc::clone(pool));
        Ok(match self {
            Self::Mapped => OpenTable::Mapped(Mapped::new(table, pool)),
            Self::Direct => OpenTable::Direct(Direct::new(table, readers)),
            Self::Resident => OpenTable::Resident(Resident::load(&table, pool, progress)?),
        })
    }
}

/// A table in one of the tiers.
pub(crate) enum OpenTable {
    Mapped(Mapped),
    Direct(Direct),
    Resident(Resident),
}

impl OpenTable {
    pub(crate) fn source(&self) -> &dyn TableSource {
        match self {
            Self::Mapped(table) => table,
            Self::Direct(table) => table,
            Self::Resident(table) => table,
        }
    }

    /// Threads that a gather runs on.
    pub(crate) fn threads(&self, pool: &Pool) -> usize {
        match self {
            Self::Mapped(_) | Self::Resident(_) => pool.threads(),
            Self::Direct(table) => table.readers(),
        }
    }

    /// How the rows that were read so far came in, as far as the tier's name leaves that open.
    pub(crate) fn access(&self) -> Option<String> {
        match self {
            Self::Mapped(_) => None,
            Self::Direct(table) => Some(table.access().to_string()),
            Self::Resident(table) => {
                let huge = table.huge_page_bytes();
                Some(if huge > 0 {
                    format!("{} in huge pages", crate::text::bytes(huge))
                } else {
                    "no huge pages".to_owned()
                })
            }
        }
    }
}
