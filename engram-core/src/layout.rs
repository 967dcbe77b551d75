//! Which rows a table has: multipliers, table sizes, offsets and row counts of every layer, from the config alone.

use crate::config::{ConfigError, EngramConfig, Family, ModelConfig, PleConfig, TableConfig};
use crate::primes::Primes;
use crate::random::{NumpyRng, SPLITMIX_GAMMA, splitmix64};

/// The hash constants of a model's tables.
///
/// Column `c = (order - 2) * heads + head`: the 2-grams' heads come first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    family: Family,
    ngram_size: usize,
    heads: usize,
    /// Tokens that hash lie below this.
    vocab_size: u32,
    layers: Vec<LayerLayout>,
}

/// One layer's hash constants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerLayout {
    layer: u32,
    multipliers: Vec<i64>,
    sizes: Vec<u32>,
    offsets: Vec<u32>,
    total_rows: u32,
    padded_rows: u32,
}

/// Why hash constants cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConstantsError {
    /// The n-gram size is not 2 to 8, the columns are not 1 to 1,024, or there are no or too many layers.
    #[error("{what} is {found}, expected {low} to {high}")]
    Bound {
        /// What is out of bounds.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The least that is accepted.
        low: u64,
        /// The most that is accepted.
        high: u64,
    },
    /// A list has another length than the n-gram size and the heads call for.
    #[error("{found} {what}, expected {expected}")]
    Length {
        /// `multipliers`, `sizes` or `offsets`.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits.
        expected: usize,
    },
    /// A multiplier is even, which loses a bit of every token.
    #[error("multiplier {place} is {value}, expected an odd number")]
    EvenMultiplier {
        /// Look-back distance of the multiplier.
        place: usize,
        /// Its value.
        value: i64,
    },
    /// An Engram multiplier is negative or may overflow a 63-bit product.
    #[error("multiplier {place} is {value}, expected 1 to {high}")]
    MultiplierRange {
        /// Look-back distance of the multiplier.
        place: usize,
        /// Its value.
        value: i64,
        /// The largest one that cannot overflow.
        high: i64,
    },
    /// A column's size is not 1 to 2^31 - 1.
    #[error("size of column {column} is {value}, expected 1 to 2147483647")]
    Size {
        /// The column.
        column: usize,
        /// Its size.
        value: i64,
    },
    /// A column's rows do not lie in the table.
    #[error("column {column} has rows {offset} to {offset} + {size}, expected them inside 0 to {rows}")]
    PastTable {
        /// The column.
        column: usize,
        /// Its first row.
        offset: i64,
        /// Its row count.
        size: i64,
        /// Rows of the table.
        rows: u32,
    },
}

impl Layout {
    /// The layout that a config calls for.
    ///
    /// # Errors
    /// If a bound is broken, a table would have 2^31 rows or more, or `engram_num_embeddings` is not the sum of the
    /// layer's primes.
    pub fn from_config(config: &ModelConfig) -> Result<Self, ConfigError> {
        match &config.table {
            TableConfig::Engram(config) => Self::engram(config),
            TableConfig::Ple(config) => Self::ple(config),
        }
    }

    /// The layout of DeepSeek-V4.1 tables.
    ///
    /// Multipliers are numpy's `default_rng(10007 * layer).integers(0, bound)` doubled plus one, where `bound` keeps
    /// every product below 2^63. Sizes are the primes from `vocab_size` on, each used once over all layers.
    ///
    /// # Errors
    /// As [`Layout::from_config`].
    pub fn engram(config: &EngramConfig) -> Result<Self, ConfigError> {
        let layout = engram_layout(config)?;
        for (place, (layer, &rows)) in layout.layers.iter().zip(&config.num_embeddings).enumerate() {
            if layer.total_rows != rows {
                let expected = format!("{}, the sum of the primes of layer {}", layer.total_rows, layer.layer);
                return Err(ConfigError::field(&format!("engram_num_embeddings[{place}]"), rows, expected));
            }
        }
        Ok(layout)
    }

    /// The layout of Qwen4Exp tables.
    ///
    /// Multipliers come from SplitMix64 seeded by `seed + 10007 * place`, sizes are the primes from `vocab_base` on, each
    /// used once; `place` is the layer's place among the sorted layers, not its number.
    ///
    /// # Errors
    /// As [`Layout::from_config`].
    pub fn ple(config: &PleConfig) -> Result<Self, ConfigError> {
        config.check()?;
        let (ngram_size, heads) = (config.ngram_size as usize, config.heads_per_ngram as usize);
        let bound = multiplier_bound(config.vocab_size);
        let mut primes = Primes::from(config.vocab_base);
        let mut layers = Vec::with_capacity(config.layer_ids.len());
        for (place, &layer) in (0_u64..).zip(&config.layer_ids) {
            let seed = config.seed.wrapping_add(10_007 * place);
            let multiplier = |distance: u64| {
                let draw = splitmix64(seed.wrapping_add(SPLITMIX_GAMMA.wrapping_mul(distance + 1)));
                odd(draw % bound)
            };
            let multipliers = (0..u64::from(config.ngram_size)).map(multiplier).collect();
            let columns = (ngram_size - 1) * heads;
            layers.push(
                LayerLayout::from_primes(layer, multipliers, primes.by_ref().take(columns), config.divisor)
                    .ok_or_else(|| ConfigError::field("ngram_vocab_size_base", config.vocab_base, TOO_MANY_ROWS))?,
            );
        }
        Ok(Self { family: Family::Ple, ngram_size, heads, vocab_size: 1 << 31, layers })
    }

    /// A layout of given constants, for tables that no config describes.
    ///
    /// `vocab_size` bounds the tokens of an Engram layout: they lie in `0..vocab_size`. A PLE layout takes any token
    /// from 0 to 2^31 - 1 and ignores it.
    ///
    /// # Errors
    /// If the dimensions are out of bounds, a layer has another number of constants, or an Engram product may overflow.
    pub fn from_layers(
        family: Family,
        ngram_size: usize,
        heads: usize,
        vocab_size: u32,
        layers: Vec<LayerLayout>,
    ) -> Result<Self, ConstantsError> {
        bound("n-gram size", ngram_size, 2, crate::config::MAX_NGRAM_SIZE as usize)?;
        bound("number of heads", heads, 1, crate::config::MAX_COLUMNS as usize / (ngram_size - 1))?;
        bound("number of layers", layers.len(), 1, crate::config::MAX_LAYERS)?;
        let vocab_size = match family {
            Family::Engram => vocab_size,
            Family::Ple => 1 << 31,
        };
        bound("vocabulary size", vocab_size as usize, 1, 1 << 31)?;
        for layer in &layers {
            length("multipliers", layer.multipliers.len(), ngram_size)?;
            length("sizes", layer.sizes.len(), (ngram_size - 1) * heads)?;
            if family == Family::Engram {
                let high = i64::MAX / i64::from(vocab_size);
                let outside = layer.multipliers.iter().position(|multiplier| !(1..=high).contains(multiplier));
                if let Some(place) = outside {
                    return Err(ConstantsError::MultiplierRange { place, value: layer.multipliers[place], high });
                }
            }
        }
        Ok(Self { family, ngram_size, heads, vocab_size, layers })
    }

    /// This layout with one layer's constants replaced, as stored constants replace computed ones.
    ///
    /// # Errors
    /// As [`Layout::from_layers`], and if `place` is not the place of a layer.
    pub fn with_layer(mut self, place: usize, layer: LayerLayout) -> Result<Self, ConstantsError> {
        bound("place of the layer", place, 0, self.layers.len() - 1)?;
        self.layers[place] = layer;
        Self::from_layers(self.family, self.ngram_size, self.heads, self.vocab_size, self.layers)
    }

    /// The family, which decides how histories are read.
    pub const fn family(&self) -> Family {
        self.family
    }

    /// Longest n-gram, 2 to 8. A token's rows depend on it and on the `ngram_size - 1` tokens before it.
    pub const fn ngram_size(&self) -> usize {
        self.ngram_size
    }

    /// Columns of one n-gram order.
    pub const fn heads(&self) -> usize {
        self.heads
    }

    /// Row ids a token and layer: `(ngram_size - 1) * heads`.
    pub const fn columns(&self) -> usize {
        (self.ngram_size - 1) * self.heads
    }

    /// The layers, in the order of every output: the config's for Engram, ascending for PLE.
    pub fn layers(&self) -> &[LayerLayout] {
        &self.layers
    }

    /// Tokens that hash lie in `0..vocab_size()`: the compressed vocabulary for Engram, 2^31 for PLE.
    pub const fn vocab_size(&self) -> u32 {
        self.vocab_size
    }
}

impl LayerLayout {
    /// Constants as a checkpoint stores them, checked against its table of `rows` rows.
    ///
    /// `multipliers[s]` belongs to the token `s` places back; `sizes[c]` and `offsets[c]` to column `c`. Columns may share
    /// rows: that is an address like any other.
    ///
    /// # Errors
    /// If a multiplier is even, a size zero, a column past the table, or lengths disagree.
    pub fn from_constants(
        layer: u32,
        multipliers: &[i64],
        sizes: &[i64],
        offsets: &[i64],
        rows: u32,
    ) -> Result<Self, ConstantsError> {
        bound("number of multipliers", multipliers.len(), 2, crate::config::MAX_NGRAM_SIZE as usize)?;
        bound("number of sizes", sizes.len(), 1, crate::config::MAX_COLUMNS as usize)?;
        bound("number of rows", rows as usize, 1, ROWS_MAX as usize)?;
        length("offsets", offsets.len(), sizes.len())?;
        if let Some(place) = multipliers.iter().position(|multiplier| multiplier % 2 == 0) {
            return Err(ConstantsError::EvenMultiplier { place, value: multipliers[place] });
        }
        let mut extents = Vec::with_capacity(sizes.len());
        for (column, (&size, &offset)) in sizes.iter().zip(offsets).enumerate() {
            let past = ConstantsError::PastTable { column, offset, size, rows };
            let narrow_size = u32::try_from(size).ok().filter(|size| (1..=ROWS_MAX).contains(size));
            let narrow_size = narrow_size.ok_or(ConstantsError::Size { column, value: size })?;
            let Ok(narrow_offset) = u32::try_from(offset) else { return Err(past) };
            match narrow_offset.checked_add(narrow_size) {
                Some(end) if end <= rows => extents.push((narrow_offset, end)),
                _ => return Err(past),
            }
        }
        let (sizes, offsets) = extents.iter().map(|&(offset, end)| (end - offset, offset)).unzip();
        let total_rows = extents.iter().map(|&(_, end)| end).max().unwrap_or(0);
        Ok(Self { layer, multipliers: multipliers.to_vec(), sizes, offsets, total_rows, padded_rows: rows })
    }

    /// `None` if the padded table has 2^31 rows or more.
    fn from_primes(layer: u32, multipliers: Vec<i64>, primes: impl Iterator<Item = u64>, divisor: u32) -> Option<Self> {
        let (mut sizes, mut offsets, mut total_rows) = (Vec::new(), Vec::new(), 0_u32);
        for prime in primes {
            let size = u32::try_from(prime).ok()?;
            sizes.push(size);
            offsets.push(total_rows);
            total_rows = total_rows.checked_add(size).filter(|&rows| rows <= ROWS_MAX)?;
        }
        let padded_rows = total_rows.checked_next_multiple_of(divisor).filter(|&rows| rows <= ROWS_MAX)?;
        Some(Self { layer, multipliers, sizes, offsets, total_rows, padded_rows })
    }

    /// The backbone layer, counted from 0.
    pub const fn layer(&self) -> u32 {
        self.layer
    }

    /// Multiplier of the token `s` places back, for `s` from 0 to `ngram_size - 1`; all odd.
    pub fn multipliers(&self) -> &[i64] {
        &self.multipliers
    }

    /// Rows of each column.
    pub fn sizes(&self) -> &[u32] {
        &self.sizes
    }

    /// First row of each column.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Rows that ids can reach: they lie in `0..total_rows()`.
    pub const fn total_rows(&self) -> u32 {
        self.total_rows
    }

    /// Rows of the stored table; rows from `total_rows` on are padding.
    pub const fn padded_rows(&self) -> u32 {
        self.padded_rows
    }
}

/// Row ids are `i32`, and -1 means none.
const ROWS_MAX: u32 = i32::MAX.unsigned_abs();
const TOO_MANY_ROWS: &str = "a number whose primes sum to fewer than 2^31 rows a layer";

/// The rows of each layer that the other fields call for.
pub(crate) fn engram_row_counts(config: &EngramConfig) -> Result<Vec<u32>, ConfigError> {
    Ok(engram_layout(config)?.layers.iter().map(LayerLayout::total_rows).collect())
}

fn engram_layout(config: &EngramConfig) -> Result<Layout, ConfigError> {
    config.check()?;
    let (ngram_size, heads) = (config.max_ngram_size as usize, config.heads as usize);
    let bound = multiplier_bound(config.compressed_vocab_size);
    // The reference restarts its search at `vocab_size` for every layer and order, but skips every prime handed out
    // before: all in all one ascending sequence.
    let mut primes = Primes::from(config.vocab_size);
    let mut layers = Vec::with_capacity(config.layer_ids.len());
    for &layer in &config.layer_ids {
        let mut rng = NumpyRng::new(10_007 * u64::from(layer));
        let multipliers = (0..ngram_size).map(|_| odd(rng.integer(bound))).collect();
        let columns = (ngram_size - 1) * heads;
        layers.push(
            LayerLayout::from_primes(layer, multipliers, primes.by_ref().take(columns), 1)
                .ok_or_else(|| ConfigError::field("engram_vocab_size", config.vocab_size, TOO_MANY_ROWS))?,
        );
    }
    Ok(Layout { family: Family::Engram, ngram_size, heads, vocab_size: config.compressed_vocab_size, layers })
}

/// Half of what a multiplier may be, so that `token * (2 * draw + 1)` stays below 2^63 for `draw` below it.
fn multiplier_bound(vocab_size: u32) -> u64 {
    (i64::MAX.unsigned_abs() / u64::from(vocab_size) / 2).max(1)
}

/// `2 * draw + 1`; `draw` lies below 2^62.
const fn odd(draw: u64) -> i64 {
    (draw * 2 + 1).cast_signed()
}

fn bound(what: &'static str, found: usize, low: usize, high: usize) -> Result<(), ConstantsError> {
    if (low..=high).contains(&found) {
        return Ok(());
    }
    Err(ConstantsError::Bound { what, found: found as u64, low: low as u64, high: high as u64 })
}

const fn length(what: &'static str, found: usize, expected: usize) -> Result<(), ConstantsError> {
    if found == expected { Ok(()) } else { Err(ConstantsError::Length { what, found, expected }) }
}
