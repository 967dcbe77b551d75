//! Lookups: rows by id, from the tables of all layers.

use std::sync::Arc;

use engram_ple::TableFormat;

use crate::device::Device;
use crate::error::Error;
use crate::ids::{IdShape, IdsError};
use crate::kernels;
use crate::memory::DeviceBuffer;
use crate::rows::{self, Blocks, Fetch};
use crate::stream::StreamRef;
use crate::table::{Entry, Table, format_mismatch};
use crate::view::{Ids, Output};

/// The tables of a model's layers, as kernels reach them.
#[derive(Debug)]
pub(crate) struct Layers {
    tables: Vec<Table>,
    columns: usize,
    /// An array of [`kernels::Table`], kept up to date by the tables' sleep and wake.
    array: Arc<DeviceBuffer>,
    /// The same as it was at construction, for its alignment, which sleep and wake keep.
    host: Vec<kernels::Table>,
    _entries: Vec<Arc<Entry>>,
}

impl Layers {
    pub(crate) fn new(tables: &[Table], columns: usize) -> Result<Self, Error> {
        let Some(first) = tables.first() else {
            return Err(Error::Invalid { what: "the tables", why: "a lookup needs at least one".to_owned() });
        };
        if columns == 0 {
            return Err(Error::Invalid { what: "the columns", why: "a lookup needs at least one".to_owned() });
        }
        for table in tables {
            if table.device() != first.device() {
                let found = format!("device {}", table.device().ordinal());
                return Err(Error::WrongDevice { what: "a table", found, expected: first.device().ordinal() });
            }
            if table.format() != first.format() {
                return Err(format_mismatch("a table of another layer", table.format(), first.format()));
            }
            if table.is_asleep() {
                return Err(Error::Asleep);
            }
        }
        let array = Arc::new(DeviceBuffer::new(first.device(), size_of::<kernels::Table>() * tables.len())?);
        let entry = |(index, table): (usize, &Table)| {
            let entry = Arc::new(Entry { array: array.clone(), index });
            table.enter(&entry)?;
            Ok::<_, Error>(entry)
        };
        let entries = tables.iter().enumerate().map(entry).collect::<Result<_, _>>()?;
        let host = tables.iter().map(Table::device_table).collect();
        Ok(Self { tables: tables.to_vec(), columns, array, host, _entries: entries })
    }

    pub(crate) fn device(&self) -> &Device {
        self.tables[0].device()
    }

    pub(crate) fn format(&self) -> &TableFormat {
        self.tables[0].format()
    }

    pub(crate) fn tables(&self) -> &[Table] {
        &self.tables
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Refuses ids of layers and columns that are not here, and tables that sleep.
    pub(crate) fn check(&self, shape: &IdShape) -> Result<(), Error> {
        let end = shape.first_layer.checked_add(shape.layers);
        if end.is_none_or(|end| end > self.tables.len()) || shape.columns != self.columns {
            return Err(Error::Ids(IdsError::Tables {
                first_layer: shape.first_layer,
                layers: shape.layers,
                columns: shape.columns,
                table_layers: self.tables.len(),
                table_columns: self.columns,
            }));
        }
        let layers = shape.first_layer..shape.first_layer + shape.layers;
        if self.tables[layers].iter().any(Table::is_asleep) { Err(Error::Asleep) } else { Ok(()) }
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
            ids: (ids.address(), shape.id_type == crate::ids::IdType::I64),
            token_stride: shape.token_stride,
            first: shape.first(),
            share: 1,
            tokens: shape.tokens,
            columns: self.columns,
            tables: self.array.address() + (shape.first_layer * size_of::<kernels::Table>()) as u64,
            layers: &self.host[shape.first_layer..shape.first_layer + shape.layers],
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
}

#[expect(clippy::derivable_impls, reason = "the defaults are part of the documentation above, one by one")]
impl Default for LookupOptions {
    fn default() -> Self {
        Self { multiprocessors: None }
    }
}

/// Fetches rows by id from one table a layer.
///
/// A call enqueues work on the caller's stream and returns: it neither allocates nor locks nor waits, and may be captured. Ids that no table
/// owns, and -1, give zero rows.
#[derive(Debug)]
pub struct Lookup {
    layers: Layers,
    blocks: Blocks,
}

impl Lookup {
    /// A lookup of `columns` rows a token and layer, in `tables`, one a layer. The tables share device and format.
    ///
    /// # Errors
    /// [`Error::Invalid`] without tables or columns; [`Error::WrongDevice`] and [`Error::FormatMismatch`] for tables that differ;
    /// [`Error::Asleep`]; [`Error::Driver`].
    pub fn new(tables: &[Table], columns: usize, options: &LookupOptions) -> Result<Self, Error> {
        let layers = Layers::new(tables, columns)?;
        let blocks = Blocks::on(layers.device(), options.multiprocessors);
        Ok(Self { layers, blocks })
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

    /// Enqueues the lookup of `ids` into `out`. The output's layer 0 is the first layer of the ids' view.
    ///
    /// # Errors
    /// [`Error::Ids`] for a view that does not fit the tables, or more than 2^31 rows; [`Error::Output`] for a form that the format lacks;
    /// [`Error::TooSmall`] and [`Error::Capacity`] for an output that the rows do not fit; [`Error::Asleep`]; [`Error::Driver`].
    pub fn run(&mut self, ids: &Ids<'_>, out: &Output<'_>, stream: StreamRef<'_>) -> Result<(), Error> {
        self.layers.check(ids.shape())?;
        self.layers.enqueue(ids, out, self.blocks, stream)
    }
}
