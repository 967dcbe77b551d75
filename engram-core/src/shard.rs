//! Who owns which rows, and where each rank's tokens lie in a shared step.

use std::ops::Range;

use crate::layout::LayerLayout;

/// Why a division of work is impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// A group of no ranks.
    #[error("{what} is 0, expected at least 1")]
    Zero {
        /// Which number.
        what: &'static str,
    },
    /// Some ranks would own no column.
    #[error("{columns} columns over {ranks} ranks leave ranks from {first_empty} on without a column")]
    EmptyRanks {
        /// Columns to share out.
        columns: usize,
        /// Ranks to share them.
        ranks: usize,
        /// The first rank without a column.
        first_empty: usize,
    },
    /// One size is no multiple of another.
    #[error("{what} is {found}, expected a multiple of {of_what} {divisor}")]
    Indivisible {
        /// Name of the size.
        what: &'static str,
        /// The size.
        found: usize,
        /// Name of what must divide it.
        of_what: &'static str,
        /// What must divide it.
        divisor: usize,
    },
    /// Data-parallel ranks share a table, but their token counts were not given.
    #[error("a table shared by {ranks} data-parallel ranks needs the token count of each rank")]
    CountsMissing {
        /// Ranks that share the table.
        ranks: usize,
    },
    /// There is not one token count for each data-parallel rank.
    #[error("{found} token counts, expected one for each of {expected} data-parallel ranks")]
    CountsLength {
        /// Counts given.
        found: usize,
        /// Data-parallel ranks.
        expected: usize,
    },
    /// A rank outside its group.
    #[error("{what} is {found}, expected less than {ranks}")]
    Rank {
        /// Which rank.
        what: &'static str,
        /// The rank.
        found: usize,
        /// Size of the group.
        ranks: usize,
    },
    /// A rank has more tokens than its slot.
    #[error("{tokens} tokens exceed the slot of {slot}")]
    SlotExceeded {
        /// Tokens of this rank.
        tokens: usize,
        /// The slot.
        slot: usize,
    },
    /// A range of rows that starts below 0 or ends before it starts.
    #[error("rows {start} to {end} are no range")]
    RowRange {
        /// First row.
        start: i64,
        /// Row after the last one.
        end: i64,
    },
}

const fn positive(what: &'static str, value: usize) -> Result<usize, ShardError> {
    if value == 0 { Err(ShardError::Zero { what }) } else { Ok(value) }
}

/// Whole columns (heads) over ranks, `ceil(columns / ranks)` a rank: the last ones may own fewer, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShards {
    columns: usize,
    ranks: usize,
}

impl HeadShards {
    /// # Errors
    /// If `columns` or `ranks` is 0.
    pub const fn new(columns: usize, ranks: usize) -> Result<Self, ShardError> {
        match (positive("columns", columns), positive("ranks", ranks)) {
            (Ok(columns), Ok(ranks)) => Ok(Self { columns, ranks }),
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }

    /// The same, if every rank owns a column; vLLM refuses anything else.
    ///
    /// # Errors
    /// If a rank would be empty.
    pub const fn strict(self) -> Result<Self, ShardError> {
        let first_empty = self.columns.div_ceil(self.per_rank());
        if first_empty >= self.ranks {
            return Ok(self);
        }
        Err(ShardError::EmptyRanks { columns: self.columns, ranks: self.ranks, first_empty })
    }

    /// Columns shared out.
    pub const fn columns(self) -> usize {
        self.columns
    }

    /// Ranks that share them.
    pub const fn ranks(self) -> usize {
        self.ranks
    }

    /// Columns that a full rank owns; buffers of every rank have room for as many.
    pub const fn per_rank(self) -> usize {
        self.columns.div_ceil(self.ranks)
    }

    /// Columns that `rank` owns, maybe none.
    pub fn columns_of(self, rank: usize) -> Range<usize> {
        let bound = |rank: usize| rank.saturating_mul(self.per_rank()).min(self.columns);
        bound(rank)..bound(rank.saturating_add(1))
    }

    /// The rank that owns a column, if there is such a column.
    pub const fn owner_of_column(self, column: usize) -> Option<usize> {
        if column < self.columns { Some(column / self.per_rank()) } else { None }
    }

    /// The rank that owns a row id of a layer; `None` for -1 and for ids that no column has.
    pub fn owner_of_id(self, layer: &LayerLayout, id: i32) -> Option<usize> {
        let id = u32::try_from(id).ok()?;
        let mut extents = layer.offsets().iter().zip(layer.sizes());
        let column = extents.position(|(&offset, &size)| (offset..offset + size).contains(&id))?;
        self.owner_of_column(column)
    }

    /// Table rows that hold the columns of `rank`, maybe none.
    pub fn row_range(self, layer: &LayerLayout, rank: usize) -> Range<u32> {
        let columns = self.columns_of(rank);
        let extents = layer.offsets().iter().zip(layer.sizes()).take(columns.end).skip(columns.start);
        let bounds = extents.map(|(&offset, &size)| offset..offset + size);
        bounds.reduce(|all, next| all.start.min(next.start)..all.end.max(next.end)).unwrap_or(0..0)
    }
}

/// Rows over ranks, `ceil(rows / ranks)` a rank: the last ones may own fewer, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowShards {
    rows: u64,
    ranks: usize,
}

impl RowShards {
    /// # Errors
    /// If `ranks` is 0.
    pub const fn new(rows: u64, ranks: usize) -> Result<Self, ShardError> {
        match positive("ranks", ranks) {
            Ok(ranks) => Ok(Self { rows, ranks }),
            Err(error) => Err(error),
        }
    }

    /// Rows shared out.
    pub const fn rows(self) -> u64 {
        self.rows
    }

    /// Ranks that share them.
    pub const fn ranks(self) -> usize {
        self.ranks
    }

    /// Rows that a full rank owns.
    pub const fn per_rank(self) -> u64 {
        self.rows.div_ceil(self.ranks as u64)
    }

    /// Rows that `rank` owns, maybe none.
    pub fn range(self, rank: usize) -> Range<u64> {
        let bound = |rank: u64| rank.saturating_mul(self.per_rank()).min(self.rows);
        bound(rank as u64)..bound((rank as u64).saturating_add(1))
    }

    /// The rank that owns a row; `None` for negative rows and for rows past the table.
    pub fn owner_of(self, row: i64) -> Option<usize> {
        let row = u64::try_from(row).ok().filter(|&row| row < self.rows)?;
        usize::try_from(row / self.per_rank()).ok()
    }
}

/// How a table is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// Whole columns: Engram.
    Heads(HeadShards),
    /// Ranges of rows: PLE.
    Rows(RowShards),
}

impl Ownership {
    /// Ranks that share the table.
    pub const fn ranks(self) -> usize {
        match self {
            Self::Heads(shards) => shards.ranks,
            Self::Rows(shards) => shards.ranks,
        }
    }

    /// The rank that owns a row id of a layer; `None` if nobody does, so that its row is zero.
    pub fn owner_of_id(self, layer: &LayerLayout, id: i32) -> Option<usize> {
        match self {
            Self::Heads(shards) => shards.owner_of_id(layer, id),
            Self::Rows(shards) => shards.owner_of(id.into()),
        }
    }

    /// Columns of which `rank` may own rows: its own ones for heads, all `columns` for row ranges.
    pub fn columns_of(self, columns: usize, rank: usize) -> Range<usize> {
        match self {
            Self::Heads(shards) => shards.columns_of(rank),
            Self::Rows(_) => 0..columns,
        }
    }

    /// Table rows that `rank` must hold.
    pub fn row_range(self, layer: &LayerLayout, rank: usize) -> Range<u64> {
        match self {
            Self::Heads(shards) => {
                let rows = shards.row_range(layer, rank);
                rows.start.into()..rows.end.into()
            }
            Self::Rows(shards) => shards.range(rank),
        }
    }
}

/// The rows that a checkpoint shard and a rank's part of the table have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    /// First common row, counted from the start of the checkpoint shard.
    pub source_start: u64,
    /// The same row, counted from the start of the rank's part.
    pub destination_start: u64,
    /// Common rows, at least 1.
    pub rows: u64,
}

/// What of the table rows in `shard` belongs into the part `own`, or `None`.
///
/// # Errors
/// If a range starts below 0 or ends before it starts.
pub fn overlap(shard: Range<i64>, own: Range<i64>) -> Result<Option<Overlap>, ShardError> {
    let checked = |range: Range<i64>| match (u64::try_from(range.start), u64::try_from(range.end)) {
        (Ok(start), Ok(end)) if start <= end => Ok(start..end),
        _ => Err(ShardError::RowRange { start: range.start, end: range.end }),
    };
    let (shard, own) = (checked(shard)?, checked(own)?);
    let start = shard.start.max(own.start);
    let end = shard.end.min(own.end);
    Ok((start < end).then(|| Overlap {
        source_start: start - shard.start,
        destination_start: start - own.start,
        rows: end - start,
    }))
}

/// How many tensor- and data-parallel ranks share one copy of the tables.
///
/// `sharing` contiguous data-parallel ranks, each with `tensor` tensor-parallel ranks, form one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableGroups {
    tensor: usize,
    data: usize,
    sharing: usize,
}

impl TableGroups {
    /// Groups of `group` ranks in a world of `tensor` x `data` parallel ranks.
    ///
    /// # Errors
    /// If a size is 0, `group` is no multiple of `tensor`, or the groups do not tile the data-parallel ranks.
    pub const fn new(tensor: usize, data: usize, group: usize) -> Result<Self, ShardError> {
        match (
            positive("tensor-parallel size", tensor),
            positive("data-parallel size", data),
            positive("group size", group),
        ) {
            (Ok(_), Ok(_), Ok(_)) => {}
            (Err(error), _, _) | (_, Err(error), _) | (_, _, Err(error)) => return Err(error),
        }
        if !group.is_multiple_of(tensor) {
            let (what, of_what) = ("table group size", "the tensor-parallel size");
            return Err(ShardError::Indivisible { what, found: group, of_what, divisor: tensor });
        }
        let sharing = group / tensor;
        if !data.is_multiple_of(sharing) {
            let (what, of_what) = ("data-parallel size", "the data-parallel ranks of a table group,");
            return Err(ShardError::Indivisible { what, found: data, of_what, divisor: sharing });
        }
        Ok(Self { tensor, data, sharing })
    }

    /// Ranks of one group.
    pub const fn size(self) -> usize {
        self.tensor * self.sharing
    }

    /// Contiguous data-parallel ranks that share a table.
    pub const fn sharing(self) -> usize {
        self.sharing
    }

    /// Place in its group of a rank that owns whole heads: tensor-parallel rank first.
    ///
    /// # Errors
    /// If a rank is outside its size.
    pub const fn head_rank(self, tensor_rank: usize, data_rank: usize) -> Result<usize, ShardError> {
        match self.check(tensor_rank, data_rank) {
            Ok(()) => Ok(tensor_rank * self.sharing + data_rank % self.sharing),
            Err(error) => Err(error),
        }
    }

    /// Place in its group of a rank that owns a range of rows: data-parallel rank first.
    ///
    /// # Errors
    /// If a rank is outside its size.
    pub const fn row_rank(self, tensor_rank: usize, data_rank: usize) -> Result<usize, ShardError> {
        match self.check(tensor_rank, data_rank) {
            Ok(()) => Ok(data_rank % self.sharing * self.tensor + tensor_rank),
            Err(error) => Err(error),
        }
    }

    const fn check(self, tensor_rank: usize, data_rank: usize) -> Result<(), ShardError> {
        if tensor_rank >= self.tensor {
            return Err(ShardError::Rank { what: "tensor-parallel rank", found: tensor_rank, ranks: self.tensor });
        }
        if data_rank >= self.data {
            return Err(ShardError::Rank { what: "data-parallel rank", found: data_rank, ranks: self.data });
        }
        Ok(())
    }

    /// The slot of one step: `tokens` of every data-parallel rank of the world, seen from `data_rank`.
    ///
    /// # Errors
    /// If the table is shared and there are no counts, if there is not one count a rank, or `data_rank` is none.
    pub fn slot(self, tokens: &[usize], data_rank: usize) -> Result<Slot, ShardError> {
        if tokens.is_empty() && self.sharing > 1 {
            return Err(ShardError::CountsMissing { ranks: self.sharing });
        }
        if tokens.len() != self.data {
            return Err(ShardError::CountsLength { found: tokens.len(), expected: self.data });
        }
        self.check(0, data_rank)?;
        let place = data_rank % self.sharing;
        let group = &tokens[data_rank - place..][..self.sharing];
        let slot = group.iter().copied().max().unwrap_or(0);
        Ok(Slot { slot, offset: place * slot })
    }
}

/// Room for one rank's tokens in a step that several data-parallel ranks share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Tokens of the busiest rank; every rank is padded to as many.
    pub slot: usize,
    /// Where this rank's tokens start among those of its group.
    pub offset: usize,
}

impl Slot {
    /// The padding that `tokens` tokens need to fill the slot.
    ///
    /// # Errors
    /// If they do not fit.
    pub const fn padding(self, tokens: usize) -> Result<usize, ShardError> {
        match self.slot.checked_sub(tokens) {
            Some(padding) => Ok(padding),
            None => Err(ShardError::SlotExceeded { tokens, slot: self.slot }),
        }
    }
}
