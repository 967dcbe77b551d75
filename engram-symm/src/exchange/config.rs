//! What an exchange moves, and who owns it.

use std::sync::Arc;
use std::time::Duration;

use engram_core::Ownership;
use engram_ple::{FormatKind, TableFormat, TableSource};

use crate::{Error, Result};

/// One layer's table, as all ranks know it.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Format of the rows.
    pub format: TableFormat,
    /// Which rank owns which of them.
    pub ownership: Ownership,
}

/// The part of one layer's table that a rank serves.
#[derive(Clone)]
pub struct Part {
    /// Id of the source's first row.
    pub first_row: u64,
    /// The rows.
    pub source: Arc<dyn TableSource>,
}

impl Part {
    /// The source's row that `id` is, if it is one.
    pub(super) fn local(&self, id: i32) -> Option<i32> {
        let row = u64::try_from(id).ok()?.checked_sub(self.first_row)?;
        if row < self.source.rows() { i32::try_from(row).ok() } else { None }
    }
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rows = self.first_row..self.first_row.saturating_add(self.source.rows());
        f.debug_struct("Part").field("rows", &rows).finish_non_exhaustive()
    }
}

/// What becomes of the rows on the rank that asked for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Output {
    /// As they are in the table: `[token][layer][column][row_bytes]`.
    Packed,
    /// Numbers, `[layer][capacity][columns * width]`: decoded from a quantised table, or those of a BF16 table.
    Bf16,
    /// Numbers, `[layer][capacity][columns * width]`: decoded from a quantised table, or those of an F16 table.
    F16,
    /// The numbers of an F32 table, `[layer][capacity][columns * width]`.
    F32,
    /// E4M3 values, `[layer][capacity][columns * width]`, and E8M0 scales in the tiles of [`engram_ple::mx`].
    Mx,
}

impl Output {
    /// Whether rows of `kind` can become this. An unquantised table keeps its type.
    pub fn takes(self, kind: FormatKind) -> bool {
        let quantised = matches!(kind, FormatKind::E4m3Global | FormatKind::E4m3E8m0x32);
        match self {
            Self::Packed => true,
            Self::Bf16 => quantised || kind == FormatKind::Bf16,
            Self::F16 => quantised || kind == FormatKind::F16,
            Self::F32 => kind == FormatKind::F32,
            Self::Mx => kind == FormatKind::E4m3E8m0x32,
        }
    }
}

/// How an exchange goes about it. Both ways give the same rows, bit for bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Two barriers; rows are read from their owner's memory. The reference.
    Barrier,
    /// No barrier; ids and rows are written into the memory of whoever needs them.
    Push,
}

/// What an exchange moves. Alike on all ranks.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Ids of a token in each layer.
    pub columns: usize,
    /// The tables, in the order in which ids name them. All of one kind and width, and owned in the same way.
    pub layers: Vec<Layer>,
    /// Largest slot of an exchange, in tokens.
    pub capacity: u32,
    /// What becomes of the rows.
    pub output: Output,
    /// What identifies the tables' contents, such as a hash of their files; 0 where it is not known.
    pub tables: u128,
    /// How long each half of an exchange may be waited for. The one thing in which ranks may differ.
    pub deadline: Duration,
}

impl Config {
    /// The deadline unless another one is set: 10 seconds.
    pub const DEADLINE: Duration = Duration::from_secs(10);

    /// An exchange with the [default deadline](Self::DEADLINE).
    pub fn new(columns: usize, layers: Vec<Layer>, capacity: u32, output: Output) -> Self {
        Self { columns, layers, capacity, output, tables: 0, deadline: Self::DEADLINE }
    }

    /// The same with another deadline.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// The same for tables of which the contents are known.
    #[must_use]
    pub fn with_tables(self, tables: u128) -> Self {
        Self { tables, ..self }
    }

    /// A digest of all that ranks must have alike.
    pub(crate) fn digest(&self) -> u128 {
        let Self { columns, layers, capacity, output, tables, deadline: _ } = self;
        let mut text = format!("{columns} {capacity} {output:?} {tables}");
        for Layer { format, ownership } in layers {
            let scale = format.global_scale().map(f32::to_bits);
            text.push_str(&format!(" {} {} {scale:?} {ownership:?}", format.kind(), format.width()));
        }
        xxhash_rust::xxh3::xxh3_128(text.as_bytes())
    }

    /// What is the same in all layers, once it is known to be.
    pub(crate) fn check(&self, world: usize) -> Result<()> {
        if self.columns == 0 {
            return Err(invalid("columns", &0, "at least 1"));
        }
        if self.capacity == 0 || self.capacity > crate::protocol::Call::MAX_SLOT {
            return Err(invalid("capacity", &self.capacity, "1 to 2^24 - 1 tokens"));
        }
        let Some(first) = self.layers.first() else { return Err(invalid("layers", &0, "at least 1")) };
        let of = |format: &TableFormat| (format.kind(), format.width());
        for (index, Layer { format, ownership }) in self.layers.iter().enumerate() {
            if of(format) != of(&first.format) {
                let found = format!("{} of width {}", format.kind(), format.width());
                let expected =
                    format!("{} of width {} as in the first layer", first.format.kind(), first.format.width());
                return Err(invalid(&format!("format of layer {index}"), &found, &expected));
            }
            let alike = match (ownership, &first.ownership) {
                (Ownership::Heads(shards), Ownership::Heads(first)) => shards == first,
                (Ownership::Rows(_), Ownership::Rows(_)) => true,
                _ => false,
            };
            if !alike {
                let (found, expected) = (format!("{ownership:?}"), "heads of the same shape or rows in all layers");
                return Err(invalid(&format!("ownership of layer {index}"), &found, expected));
            }
            if ownership.ranks() != world {
                return Err(invalid(&format!("ranks that own layer {index}"), &ownership.ranks(), &world.to_string()));
            }
            if let Ownership::Heads(shards) = ownership
                && shards.columns() != self.columns
            {
                return Err(invalid("columns that are owned", &shards.columns(), &self.columns.to_string()));
            }
        }
        if !self.output.takes(first.format.kind()) {
            let found = format!("{:?}", self.output);
            return Err(invalid("output", &found, &format!("a form that {} rows can take", first.format.kind())));
        }
        Ok(())
    }
}

/// Refuses an argument.
pub(crate) fn invalid(what: &str, found: &dyn std::fmt::Display, expected: &str) -> Error {
    Error::Invalid { what: what.to_owned(), found: found.to_string(), expected: expected.to_owned() }
}
