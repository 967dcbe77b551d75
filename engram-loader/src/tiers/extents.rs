//! Where the rows of one table lie: runs of rows in files, values and scales apart.

use crate::{Error, TableFile};
use engram_ple::TableFormat;
use std::ops::Range;
use std::sync::Arc;

/// A run of rows without gaps in one file: one tensor, or one shard of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Index into the table's files.
    pub file: usize,
    /// Where the first of the rows begins, in bytes from the start of the file.
    pub offset: u64,
    /// The table's rows that lie here.
    pub rows: Range<u64>,
}

/// A table's format and the extents of all its rows: what a tier reads from.
///
/// Checked on construction: the extents tile the rows, and each lies inside its file.
#[derive(Debug, Clone)]
pub struct TableExtents {
    format: TableFormat,
    rows: u64,
    files: Arc<[TableFile]>,
    planes: Vec<Plane>,
}

/// One part of each row (its values, or its scales), and where that part lies.
#[derive(Debug, Clone)]
pub(crate) struct Plane {
    /// Bytes of a row in this plane.
    pub(crate) row_bytes: usize,
    /// Where this part begins within a packed row.
    packed_offset: usize,
    /// Sorted by rows, none empty.
    extents: Vec<Extent>,
    /// `first[b]` is the extent that holds row `b << shift`: a search looks at the few extents of one bucket, whatever their number is.
    first: Vec<u32>,
    shift: u32,
}

impl TableExtents {
    /// A table of `rows` rows whose values lie in `values`, and its scales, where the format has one per row or more, in `scales`.
    ///
    /// Extents may come in any order. Rows of `values` take `format.value_bytes()` each, rows of `scales` `format.scale_bytes()`.
    ///
    /// # Errors
    /// [`Error::Extents`] when the extents leave out a row, hold one twice, name a file that is not listed, or end past their file.
    pub fn new(
        format: TableFormat,
        rows: u64,
        files: impl Into<Arc<[TableFile]>>,
        values: Vec<Extent>,
        scales: Vec<Extent>,
    ) -> Result<Self, Error> {
        let files = files.into();
        let mut planes = vec![Plane::new(rows, &files, format.value_bytes(), 0, values)?];
        if format.scale_bytes() > 0 {
            planes.push(Plane::new(rows, &files, format.scale_bytes(), format.value_bytes(), scales)?);
        } else if !scales.is_empty() {
            return Err(Error::Extents { message: format!("{} rows carry no scales of their own", format.kind()) });
        }
        Ok(Self { format, rows, files, planes })
    }

    /// A table that is all of one file, from its first byte on; bytes past the last whole row are left out.
    ///
    /// # Errors
    /// [`Error::Extents`] when the format keeps scales beside the values.
    pub fn whole_file(format: TableFormat, file: TableFile) -> Result<Self, Error> {
        let rows = file.bytes / format.value_bytes() as u64;
        Self::new(format, rows, vec![file], vec![Extent { file: 0, offset: 0, rows: 0..rows }], vec![])
    }

    /// The format of the rows.
    #[must_use]
    pub fn format(&self) -> &TableFormat {
        &self.format
    }

    /// How many rows the table has.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The files that the extents name.
    #[must_use]
    pub fn files(&self) -> &[TableFile] {
        &self.files
    }

    /// Bytes of all rows, scales included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // The planes were checked to end inside their files, so neither product overflows, and no two files make 2^64 bytes.
        self.planes.iter().map(|plane| self.rows * plane.row_bytes as u64).sum()
    }

    /// In how many extents the values lie.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.planes[0].extents.len()
    }

    pub(crate) fn planes(&self) -> &[Plane] {
        &self.planes
    }
}

impl Plane {
    fn new(
        rows: u64,
        files: &[TableFile],
        row_bytes: usize,
        packed_offset: usize,
        mut extents: Vec<Extent>,
    ) -> Result<Self, Error> {
        let fault = |message| Err(Error::Extents { message });
        extents.retain(|extent| !extent.rows.is_empty());
        extents.sort_by_key(|extent| extent.rows.start);
        let mut next = 0;
        for Extent { file, offset, rows } in &extents {
            if rows.start != next {
                return fault(format!("rows {next} to {} are in no extent or in two", rows.start));
            }
            next = rows.end;
            let Some(file) = files.get(*file) else { return fault(format!("there is no file number {file}")) };
            let end =
                (rows.end - rows.start).checked_mul(row_bytes as u64).and_then(|bytes| bytes.checked_add(*offset));
            if end.is_none_or(|end| end > file.bytes) {
                return fault(format!("rows {rows:?} end past {} ({} bytes)", file.path.display(), file.bytes));
            }
        }
        if next != rows {
            return fault(format!("the extents hold {next} rows, not {rows}"));
        }
        let Ok(count) = u32::try_from(extents.len()) else { return fault(format!("{} extents", extents.len())) };
        // Four buckets an extent, so that most buckets lie inside one extent.
        let buckets = (u64::from(count) * 4).next_power_of_two();
        let shift = (u64::BITS - rows.leading_zeros()).saturating_sub(buckets.trailing_zeros());
        let mut first = Vec::new();
        let mut extent = 0;
        for start in (0..=rows >> shift).map(|bucket| bucket << shift) {
            while extent + 1 < count && extents[extent as usize].rows.end <= start {
                extent += 1;
            }
            first.push(extent);
        }
        first.push(count.saturating_sub(1));
        Ok(Self { row_bytes, packed_offset, extents, first, shift })
    }

    /// The extent that holds `row`, which is below the table's number of rows.
    #[inline]
    pub(crate) fn find(&self, row: u64) -> &Extent {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a bucket number, at most eight times the number of extents"
        )]
        let bucket = (row >> self.shift) as usize;
        let (from, to) = (self.first[bucket] as usize, self.first[bucket + 1] as usize);
        if from == to {
            return &self.extents[from];
        }
        &self.extents[from + self.extents[from..to].partition_point(|extent| extent.rows.end <= row)]
    }

    /// This part of a packed row.
    pub(crate) fn part(&self) -> Range<usize> {
        self.packed_offset..self.packed_offset + self.row_bytes
    }

    /// Where the part of `row` begins in the file of its extent.
    #[inline]
    pub(crate) fn locate(&self, row: u64) -> (usize, u64) {
        let extent = self.find(row);
        (extent.file, extent.offset + (row - extent.rows.start) * self.row_bytes as u64)
    }

    /// The runs of `rows` that lie in one extent each, in order: file, offset in bytes, rows.
    pub(crate) fn runs(&self, rows: Range<u64>) -> impl Iterator<Item = (usize, u64, Range<u64>)> {
        let mut next = rows.start;
        std::iter::from_fn(move || {
            (next < rows.end).then(|| {
                let (file, offset) = self.locate(next);
                let run = next..self.find(next).rows.end.min(rows.end);
                next = run.end;
                (file, offset, run)
            })
        })
    }
}
