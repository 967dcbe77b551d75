//! Lookups: rows by id, from the tables of all layers.

use std::time::Duration;

use engram_ple::TableFormat;

use crate::array::TableArray;
use crate::auto::Auto;
use crate::calibrate::Crossover;
use crate::device::Device;
use crate::error::Error;
use crate::ids::{IdShape, IdType, IdsError};
use crate::kernels;
use crate::rows::{self, Blocks, Fetch};
use crate::staged::{HostIds, Staged};
use crate::stream::StreamRef;
use crate::table::{Placement, Table};
use crate::view::{Ids, Output};

/// The tables of a model's layers, as kernels reach them.
#[derive(Debug)]
pub(crate) struct Layers {
    tables: TableArray,
    columns: usize,
}

impl Layers {
    pub(crate) fn new(tables: &[Table], columns: usize) -> Result<Self, Error> {
        let Some(first) = tables.first() else {
            return Err(Error::Invalid { what: "the tables", why: "a lookup needs at least one".to_owned() });
        };
        if columns == 0 {
            return Err(Error::Invalid { what: "the columns", why: "a lookup needs at least one".to_owned() });
        }
        Ok(Self { tables: TableArray::of(first.device(), tables)?, columns })
    }

    pub(crate) fn device(&self) -> &Device {
        self.tables.handles()[0].device()
    }

    pub(crate) fn format(&self) -> &TableFormat {
        self.tables.handles()[0].format()
    }

    pub(crate) fn tables(&self) -> &[Table] {
        self.tables.handles()
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Refuses ids of layers and columns that are not here, and tables that sleep.
    pub(crate) fn check(&self, shape: &IdShape) -> Result<(), Error> {
        let end = shape.first_layer.checked_add(shape.layers);
        if end.is_none_or(|end| end > self.tables().len()) || shape.columns != self.columns {
            return Err(Error::Ids(IdsError::Tables {
                first_layer: shape.first_layer,
                layers: shape.layers,
                columns: shape.columns,
                table_layers: self.tables().len(),
                table_columns: self.columns,
            }));
        }
        let layers = shape.first_layer..shape.first_layer + shape.layers;
        if self.tables()[layers].iter().any(Table::is_asleep) { Err(Error::Asleep) } else { Ok(()) }
    }

    /// Enqueues a lookup that kernels do by themselves.
    pub(crate) fn enqueue(
        &self,
        ids: &Ids<'_>,
        out: &Output<'_>,
        blocks: Blocks,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        let shape = ids.shape();
        let fetch = Fetch {
            ids: (ids.address(), shape.id_type == IdType::I64),
            token_stride: shape.token_stride,
            first: shape.first(),
            share: 1,
            tokens: shape.tokens,
            columns: self.columns,
            tables: self.tables.address() + (shape.first_layer * size_of::<kernels::Table>()) as u64,
            layers: &self.tables.tables()[shape.first_layer..shape.first_layer + shape.layers],
        };
        // SAFETY: `Ids` vouches for the ids; the tables' entries name their memory, or nothing while a table sleeps.
        unsafe { rows::enqueue(self.device(), self.format(), &fetch, out, blocks, stream) }
    }
}

/// How a lookup is run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LookupOptions {
    /// Multiprocessors that its kernels may fill, all by default. A lookup in the background of a model leaves it the others.
    pub multiprocessors: Option<u32>,
    /// Staged lookups: most tokens of a call, 8192 by default. Buffers are made for so many.
    pub max_tokens: usize,
    /// Staged lookups: threads that gather rows; by default one less than the machine runs at a time.
    pub threads: Option<usize>,
    /// Staged lookups: heads an n-gram order, whose rows repeat together; calls that bring mixes ([`Ids::with_mixes`]) need it. Without it, each
    /// column is looked through by itself for what repeats.
    pub heads: Option<usize>,
    /// Staged lookups: whether rows that a batch repeats are gathered once, true by default. Where batches do not repeat, this switches itself off.
    pub distinct: bool,
    /// Staged lookups: how long the device waits for the threads, 10 s by default. A lookup that they serve later gives zero rows, and the next
    /// call says so ([`GatherError::Late`](crate::GatherError::Late)).
    pub deadline: Duration,
}

impl Default for LookupOptions {
    fn default() -> Self {
        Self {
            multiprocessors: None,
            max_tokens: 8192,
            threads: None,
            heads: None,
            distinct: true,
            deadline: Duration::from_secs(10),
        }
    }
}

/// Fetches rows by id from one table a layer.
///
/// A call enqueues work on the caller's stream and returns: it neither allocates (but for shapes that a staged lookup meets the first time) nor
/// locks nor waits, and may be captured. Ids that no table owns, and -1, give zero rows.
#[derive(Debug)]
pub struct Lookup {
    layers: Layers,
    blocks: Blocks,
    path: Path,
}

#[derive(Debug)]
enum Path {
    /// Kernels read the tables.
    Kernels,
    /// Threads read them.
    Staged(Box<Staged>),
    /// Whichever is faster.
    Auto(Box<Auto>),
}

impl Lookup {
    /// A lookup of `columns` rows a token and layer, in `tables`, one a layer. The tables share device, format, and the way they are read.
    ///
    /// Tables of [`Placement::Auto`] are calibrated here, within 200 ms ([`Lookup::crossover`]).
    ///
    /// # Errors
    /// [`Error::Invalid`] without tables or columns, and for tables that are read in different ways; [`Error::WrongDevice`] and
    /// [`Error::FormatMismatch`] for tables that differ; [`Error::Asleep`]; [`Error::Driver`], [`Error::HostMemory`] and [`Error::Threads`].
    pub fn new(tables: &[Table], columns: usize, options: &LookupOptions) -> Result<Self, Error> {
        let layers = Layers::new(tables, columns)?;
        let blocks = Blocks::on(layers.device(), options.multiprocessors);
        let placement = |table: &Table| match table.placement() {
            // Kernels read both.
            Placement::Device | Placement::Pinned => Placement::Pinned,
            other => other,
        };
        if tables.iter().any(|table| placement(table) != placement(&tables[0])) {
            let why = "some are read by kernels and some by threads: use a lookup for each kind".to_owned();
            return Err(Error::Invalid { what: "the tables", why });
        }
        let path = match placement(&tables[0]) {
            Placement::Staged => Path::Staged(Box::new(Staged::new(&layers, options)?)),
            Placement::Auto => Path::Auto(Box::new(Auto::new(&layers, options, blocks)?)),
            Placement::Device | Placement::Pinned => Path::Kernels,
        };
        Ok(Self { layers, blocks, path })
    }

    /// The device that it runs on.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.layers.device()
    }

    /// The format of the tables.
    #[must_use]
    pub fn format(&self) -> &TableFormat {
        self.layers.format()
    }

    /// The tables, one a layer.
    #[must_use]
    pub fn tables(&self) -> &[Table] {
        self.layers.tables()
    }

    /// Rows a token and layer.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.layers.columns()
    }

    /// Which way batches go, for tables of [`Placement::Auto`].
    #[must_use]
    pub fn crossover(&self) -> Option<&Crossover> {
        match &self.path {
            Path::Auto(auto) => Some(&auto.crossover),
            Path::Kernels | Path::Staged(_) => None,
        }
    }

    /// Threads that gather, if the tables are read by threads.
    #[must_use]
    pub fn threads(&self) -> Option<usize> {
        self.staged().map(Staged::threads)
    }

    /// Share of n-grams (or ids, without mixes) that were distinct in the last staged batch, 1 where it did not look.
    #[must_use]
    pub fn distinct_share(&self) -> Option<f32> {
        self.staged().map(Staged::distinct_share)
    }

    /// N-gram orders of a layer, where mixes are of use.
    pub(crate) fn orders(&self) -> Option<usize> {
        self.staged().and_then(Staged::orders)
    }

    fn staged(&self) -> Option<&Staged> {
        match &self.path {
            Path::Kernels => None,
            Path::Staged(staged) => Some(staged),
            Path::Auto(auto) => Some(&auto.staged),
        }
    }

    /// Enqueues the lookup of `ids` into `out`. The output's layer 0 is the first layer of the ids' view.
    ///
    /// # Errors
    /// [`Error::Ids`] for a view that does not fit the tables, or more than 2^31 rows; [`Error::Output`] for a form that the format lacks;
    /// [`Error::TooSmall`] and [`Error::Capacity`] for an output that the rows do not fit, and for more tokens than a staged lookup was made
    /// for; [`Error::WrongDevice`]; [`Error::Asleep`]; [`Error::Gather`] for an earlier staged lookup that failed; [`Error::Driver`].
    pub fn run(&mut self, ids: &Ids<'_>, out: &Output<'_>, stream: StreamRef<'_>) -> Result<(), Error> {
        self.layers.check(ids.shape())?;
        ids.check_device(self.device())?;
        self.check_target(out, stream)?;
        self.check()?;
        match &mut self.path {
            // Kernels write zero rows where there are no ids.
            _ if ids.shape().tokens == 0 => self.layers.enqueue(ids, out, self.blocks, stream),
            Path::Kernels => self.layers.enqueue(ids, out, self.blocks, stream),
            Path::Staged(staged) => staged.run(&self.layers, ids, out, stream),
            Path::Auto(auto) => auto.run(&self.layers, ids, out, self.blocks, stream),
        }
    }

    /// Enqueues the lookup of ids that are on the host (hashed there, say), for tables that threads read. The ids are copied before the call
    /// returns; up to 4 such batches may be under way.
    ///
    /// # Errors
    /// [`Error::Invalid`] for arrays of another length, and for tables that only kernels read; [`Error::Capturing`]; [`Error::Capacity`] for a
    /// fifth batch; else as [`Lookup::run`].
    pub fn run_host(&mut self, ids: &HostIds<'_>, out: &Output<'_>, stream: StreamRef<'_>) -> Result<(), Error> {
        self.layers.check(&IdShape::dense(IdType::I32, ids.tokens, self.layers.tables().len(), self.layers.columns))?;
        self.check_target(out, stream)?;
        self.check()?;
        let staged = match &mut self.path {
            Path::Kernels => {
                let why = "kernels read these tables, and need the ids in device memory".to_owned();
                return Err(Error::Invalid { what: "run_host", why });
            }
            Path::Staged(staged) => staged,
            Path::Auto(auto) => &mut auto.staged,
        };
        staged.run_host(&self.layers, ids, out, stream)
    }

    fn check_target(&self, out: &Output<'_>, stream: StreamRef<'_>) -> Result<(), Error> {
        out.check_device(self.device())?;
        stream.check_device(self.device())
    }

    /// Reports an earlier staged lookup that failed, whose rows are zero rows, and a table that sleeps. Does not wait.
    ///
    /// # Errors
    /// [`Error::Gather`] and [`Error::Asleep`].
    pub fn check(&self) -> Result<(), Error> {
        if self.tables().iter().any(Table::is_asleep) {
            return Err(Error::Asleep);
        }
        self.staged().map_or(Ok(()), Staged::check)
    }
}
