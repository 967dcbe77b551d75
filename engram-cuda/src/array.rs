//! The tables of a model's layers, where kernels find them.

use std::sync::Arc;

use crate::device::Device;
use crate::error::Error;
use crate::kernels;
use crate::memory::DeviceBuffer;
use crate::table::{Entry, Placement, Table, format_mismatch};

/// An array of [`kernels::Table`] in device memory, one a layer, kept up to date by the tables' sleep and wake: a kernel that meets a table which
/// sleeps finds no rows there.
#[derive(Debug)]
pub struct TableArray {
    handles: Vec<Table>,
    array: Arc<DeviceBuffer>,
    /// The same as it was at construction.
    tables: Vec<kernels::Table>,
    _entries: Vec<Arc<Entry>>,
}

impl TableArray {
    /// An array of these tables, which kernels read; of none, if a rank owns nothing. They may differ in a scale that is a whole table's.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a table that kernels cannot, or do not always, read; [`Error::WrongDevice`] and [`Error::FormatMismatch`] for tables that
    /// differ; [`Error::Asleep`]; [`Error::Driver`].
    pub fn new(device: &Device, tables: &[Table]) -> Result<Self, Error> {
        let by_threads = |placement| !matches!(placement, Placement::Device | Placement::Pinned);
        if let Some(placement) = tables.iter().map(Table::placement).find(|&placement| by_threads(placement)) {
            let why = format!(
                "one is of placement {placement:?}, whose rows threads read: load it as {:?} or {:?}",
                Placement::Device,
                Placement::Pinned
            );
            return Err(Error::Invalid { what: "the tables", why });
        }
        Self::alike(device, tables)
    }

    /// An array of tables of one format, in any placement; kernels find no rows in those that only threads read.
    pub(crate) fn of(device: &Device, handles: &[Table]) -> Result<Self, Error> {
        if let Some(other) = handles.iter().find(|table| table.format() != handles[0].format()) {
            return Err(format_mismatch("a table of another layer", other.format(), handles[0].format()));
        }
        Self::alike(device, handles)
    }

    fn alike(device: &Device, handles: &[Table]) -> Result<Self, Error> {
        let rows = |table: &Table| (table.format().kind(), table.format().width());
        for table in handles {
            if table.device() != device {
                let found = format!("device {}", table.device().ordinal());
                return Err(Error::WrongDevice { what: "a table", found, expected: device.ordinal() });
            }
            if rows(table) != rows(&handles[0]) {
                return Err(format_mismatch("a table of another layer", table.format(), handles[0].format()));
            }
            if table.is_asleep() {
                return Err(Error::Asleep);
            }
        }
        let array = Arc::new(DeviceBuffer::new(device, size_of::<kernels::Table>() * handles.len())?);
        let entry = |(index, table): (usize, &Table)| {
            let entry = Arc::new(Entry { array: array.clone(), index });
            table.enter(&entry)?;
            Ok::<_, Error>(entry)
        };
        let entries = handles.iter().enumerate().map(entry).collect::<Result<_, _>>()?;
        let tables = handles.iter().map(Table::device_table).collect();
        Ok(Self { handles: handles.to_vec(), array, tables, _entries: entries })
    }

    /// Where kernels find the array.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.array.address()
    }

    /// The array as it was at construction: for the alignment of addresses and strides, which sleep and wake keep.
    #[must_use]
    pub fn tables(&self) -> &[kernels::Table] {
        &self.tables
    }

    /// The tables, one a layer.
    #[must_use]
    pub fn handles(&self) -> &[Table] {
        &self.handles
    }
}
