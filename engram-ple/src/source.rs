//! Where rows come from: the seam between tables and those that use them.

use crate::{Error, TableFormat};
use std::fmt;
use std::ops::Range;

/// A table of packed rows, wherever they are kept.
///
/// ```
/// use engram_ple::{FormatKind, MemorySource, TableFormat, TableSource};
///
/// let format = TableFormat::new(FormatKind::Bf16, 1, None)?;
/// let table: Box<dyn TableSource> = Box::new(MemorySource::new(format, vec![1, 1, 2, 2, 3, 3])?);
/// let mut rows = [0; 6];
/// table.gather(&[2, -1, 0], &mut rows)?;
/// assert_eq!(rows, [3, 3, 0, 0, 1, 1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait TableSource: Send + Sync {
    /// The format of the rows.
    fn format(&self) -> &TableFormat;

    /// Rows of the table.
    fn rows(&self) -> u64;

    /// Reads rows that follow each other, packed. `out` is `rows * row_bytes` long.
    ///
    /// # Errors
    /// A range outside the table, an `out` of another length, or whatever keeps the rows from being read.
    fn read_range(&self, rows: Range<u64>, out: &mut [u8]) -> Result<(), SourceError>;

    /// Reads the rows of `ids`, packed, `[ids][row_bytes]`. The id -1 gives a zero row: all bytes 0, scales too.
    ///
    /// # Errors
    /// Any other id outside the table, an `out` of another length, or whatever keeps a row from being read. `out` is unspecified then.
    fn gather(&self, ids: &[i32], out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_gather(self.format(), self.rows(), ids, out)?;
        for (&id, row) in ids.iter().zip(out.chunks_exact_mut(self.format().row_bytes())) {
            match u64::try_from(id) {
                Ok(id) => self.read_range(id..id + 1, row)?,
                Err(_) => row.fill(0),
            }
        }
        Ok(())
    }
}

/// Why rows could not be read from a table.
#[derive(Debug)]
pub struct SourceError(Box<Kind>);

#[derive(Debug)]
enum Kind {
    Range { asked: Range<u64>, rows: u64 },
    Id { id: i32, position: usize, rows: u64 },
    Length { expected: Option<usize>, found: usize },
    Read { asked: Range<u64>, source: Box<dyn std::error::Error + Send + Sync> },
}

impl SourceError {
    /// Reading `rows` failed for a reason of the table's own, such as I/O.
    pub fn read(rows: Range<u64>, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(Box::new(Kind::Read { asked: rows, source: source.into() }))
    }

    /// What every [`TableSource::read_range`] has to check first, for a table of `rows` rows.
    ///
    /// # Errors
    /// A range that is reversed or outside the table, and an `out` that is not exactly its rows.
    pub fn check_range(format: &TableFormat, rows: u64, asked: &Range<u64>, out: &[u8]) -> Result<(), Self> {
        if asked.start > asked.end || asked.end > rows {
            return Err(Self(Box::new(Kind::Range { asked: asked.clone(), rows })));
        }
        check_length(format, asked.end - asked.start, out)
    }

    /// What every [`TableSource::gather`] has to check first, for a table of `rows` rows.
    ///
    /// # Errors
    /// An id other than -1 outside the table, and an `out` that is not exactly the rows of `ids`.
    pub fn check_gather(format: &TableFormat, rows: u64, ids: &[i32], out: &[u8]) -> Result<(), Self> {
        check_length(format, ids.len() as u64, out)?;
        let outside = |&id: &i32| id != -1 && u64::try_from(id).map_or(true, |id| id >= rows);
        match ids.iter().position(outside) {
            Some(position) => Err(Self(Box::new(Kind::Id { id: ids[position], position, rows }))),
            None => Ok(()),
        }
    }

    /// The rows that were asked for, where the request as such was sound or a range.
    pub fn rows(&self) -> Option<Range<u64>> {
        match &*self.0 {
            Kind::Range { asked, .. } | Kind::Read { asked, .. } => Some(asked.clone()),
            Kind::Id { .. } | Kind::Length { .. } => None,
        }
    }

    /// Whether a row outside the table was asked for.
    pub fn is_out_of_range(&self) -> bool {
        matches!(*self.0, Kind::Range { .. } | Kind::Id { .. })
    }

    /// Whether the output does not fit the rows asked for.
    pub fn is_length(&self) -> bool {
        matches!(*self.0, Kind::Length { .. })
    }

    /// Whether the table itself failed; [`source`](std::error::Error::source) says how.
    pub fn is_read(&self) -> bool {
        matches!(*self.0, Kind::Read { .. })
    }
}

fn check_length(format: &TableFormat, rows: u64, out: &[u8]) -> Result<(), SourceError> {
    let expected = usize::try_from(rows).ok().and_then(|rows| rows.checked_mul(format.row_bytes()));
    if expected == Some(out.len()) {
        return Ok(());
    }
    Err(SourceError(Box::new(Kind::Length { expected, found: out.len() })))
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Kind::Range { asked, rows } => {
                write!(f, "rows {}..{} are not inside the table's {rows} rows", asked.start, asked.end)
            }
            Kind::Id { id, position, rows } => write!(f, "id {id} at position {position} is no row of {rows}"),
            Kind::Length { expected: Some(expected), found } => {
                write!(f, "the rows take {expected} bytes, but the output has {found}")
            }
            Kind::Length { expected: None, found } => {
                write!(f, "the rows take more bytes than can be addressed, and the output has {found}")
            }
            Kind::Read { asked, .. } => write!(f, "rows {}..{} could not be read", asked.start, asked.end),
        }
    }
}

impl std::error::Error for SourceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.0 {
            Kind::Read { source, .. } => Some(&**source),
            Kind::Range { .. } | Kind::Id { .. } | Kind::Length { .. } => None,
        }
    }
}

/// A table in memory.
#[derive(Debug, Clone)]
pub struct MemorySource {
    format: TableFormat,
    packed: Vec<u8>,
}

impl MemorySource {
    /// A table of packed rows.
    ///
    /// # Errors
    /// [`Error::PartialRow`] when the bytes are not a whole number of rows.
    pub fn new(format: TableFormat, packed: Vec<u8>) -> Result<Self, Error> {
        let (bytes, row_bytes) = (packed.len(), format.row_bytes());
        if bytes.is_multiple_of(row_bytes) {
            Ok(Self { format, packed })
        } else {
            Err(Error::PartialRow { bytes, row_bytes })
        }
    }

    /// All rows, packed.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }
}

impl TableSource for MemorySource {
    fn format(&self) -> &TableFormat {
        &self.format
    }

    fn rows(&self) -> u64 {
        (self.packed.len() / self.format.row_bytes()) as u64
    }

    fn read_range(&self, rows: Range<u64>, out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_range(&self.format, self.rows(), &rows, out)?;
        #[expect(clippy::cast_possible_truncation, reason = "a row of a table in memory")]
        let start = rows.start as usize * self.format.row_bytes();
        out.copy_from_slice(&self.packed[start..][..out.len()]);
        Ok(())
    }
}
