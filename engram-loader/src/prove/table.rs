//! Judging the tables: which tensors make each of them up, and whether these agree with the config and with each other.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use engram_core::{Layout, ModelConfig, TableConfig};
use engram_ple::{FormatKind, TableFormat};
use safetensors::Dtype;

use crate::checkpoint::catalog::CatalogTable;
use crate::checkpoint::folder::{CheckpointFile, Listing};
use crate::checkpoint::names::{Constant, Leaf, SCALES, ShardStyle, TableName};
use crate::checkpoint::tensors::{Tensor, Tensors};
use crate::error::Error;
use crate::headers::header::TensorInfo;
use crate::prove::announced::Announced;
use crate::prove::constants::Stored;
use crate::prove::report::{Fault, FaultCode, Severity};
use crate::prove::scale::{self, Scale};
use crate::tiers::extents::{Extent, TableExtents};
use crate::tiers::file::TableFile;

/// A tensor of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    name: &'a str,
    tensor: Tensor<'a>,
}

/// A part without a fault of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sound<'a> {
    pub(crate) name: &'a str,
    pub(crate) file: &'a CheckpointFile,
    pub(crate) info: &'a TensorInfo,
}

impl Sound<'_> {
    /// A fault of this tensor.
    pub(crate) fn fault(&self, code: FaultCode, message: impl Into<String>) -> Fault {
        Fault::new(code, message).file(self.file.name()).tensor(self.name)
    }

    /// The dtype; sound tensors have one that is defined.
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        self.info.dtype().defined()
    }
}

/// Everything under the table prefixes of one layer.
#[derive(Debug, Default)]
struct Group<'a> {
    /// Prefixes that have more than unknown names.
    prefixes: BTreeSet<&'a str>,
    whole: Option<Part<'a>>,
    shards: BTreeMap<ShardStyle, BTreeMap<u64, Part<'a>>>,
    scales: Vec<Part<'a>>,
    constants: BTreeMap<Constant, Part<'a>>,
    unknown: Vec<(Part<'a>, Severity)>,
}

/// What a table should be by the config.
#[derive(Debug, Clone, Copy)]
struct Expected {
    rows: u64,
    width: u64,
    /// Shards, where the family has them.
    shards: Option<u64>,
}

/// The values that were found.
#[derive(Debug, Default)]
struct Values<'a> {
    /// The dtype of most of them, where it is one that a format has.
    dtype: Option<Dtype>,
    /// The first that can be relied on.
    first: Option<Sound<'a>>,
    /// Rows and tensors, where nothing is missing or at fault.
    pieces: Option<Vec<(Range<u64>, Sound<'a>)>>,
}

/// What tables are judged by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Judge<'a> {
    pub(crate) config: &'a ModelConfig,
    /// The layout that the config gives.
    pub(crate) layout: &'a Layout,
    pub(crate) files: &'a [CheckpointFile],
    pub(crate) listing: &'a Listing,
    pub(crate) tensors: &'a Tensors<'a>,
    pub(crate) announced: &'a Announced,
    /// Stored constants that differ are used, not refused.
    pub(crate) allow_stored: bool,
}

impl<'a> Judge<'a> {
    /// Judges all tables: those in order, and the layout that ids are computed by.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn judge(&self, faults: &mut Vec<Fault>) -> Result<(Vec<CatalogTable>, Layout), Error> {
        let layers = self.layout.layers();
        let mut groups: Vec<Group<'a>> = Vec::new();
        groups.resize_with(layers.len(), Group::default);
        let mut foreign: BTreeMap<&str, (usize, Sound<'a>)> = BTreeMap::new();
        for (name, parsed, tensor) in self.tensors.of_tables() {
            let part = Part { name, tensor };
            let layer = parsed.layer.filter(|_| parsed.family == self.layout.family());
            match layer.and_then(|layer| layers.iter().position(|known| known.layer() == layer)) {
                Some(place) => groups[place].add(&parsed, part),
                None if parsed.leaf == Leaf::Legacy => {}
                None => {
                    if let Some(sound) = self.sound(part) {
                        foreign.entry(parsed.table).or_insert((0, sound)).0 += 1;
                    }
                }
            }
        }

        let mut tables = Vec::new();
        let mut layout = self.layout.clone();
        for (place, group) in groups.iter().enumerate() {
            let constants = |constant| group.constants.get(&constant).and_then(|part| self.sound(*part));
            let expected = self.expected(place);
            if let Some(fault) = self.ambiguity(group, layers[place].layer()) {
                faults.push(fault);
            } else {
                tables.extend(self.table(place, group, expected, faults)?);
                let stored = Stored { layer: &layers[place], tensor: &constants };
                if let Some(used) = stored.judge(self.allow_stored, faults)? {
                    match layout.clone().with_layer(place, used) {
                        Ok(replaced) => layout = replaced,
                        Err(error) => faults.push(Fault::new(FaultCode::ConstantsInvalid, error.to_string())),
                    }
                }
            }
            for &(part, severity) in &group.unknown {
                if let Some(sound) = self.sound(part) {
                    let message = "expected only tensors that belong to the table under its prefix, found this one, which nothing reads";
                    faults.push(sound.fault(FaultCode::UnreadTensor, message).severity(severity));
                }
            }
        }
        for (table, (count, first)) in foreign {
            let message = format!(
                "expected tables of the config's layers only, found {table} with {count} tensors, which nothing reads"
            );
            faults.push(first.fault(FaultCode::UnreadTensor, message).severity(Severity::Warning));
        }
        Ok((tables, layout))
    }

    fn sound(&self, part: Part<'a>) -> Option<Sound<'a>> {
        match part.tensor {
            Tensor::Sound { file, info } => Some(Sound { name: part.name, file: &self.files[file], info }),
            Tensor::Faulty => None,
        }
    }

    fn expected(&self, place: usize) -> Expected {
        let rows = u64::from(self.layout.layers()[place].padded_rows());
        match &self.config.table {
            TableConfig::Engram(config) => Expected { rows, width: config.head_dim.into(), shards: None },
            TableConfig::Ple(config) => {
                Expected { rows, width: config.row_width().into(), shards: Some(config.split_parts.into()) }
            }
        }
    }

    fn ambiguity(&self, group: &Group<'a>, layer: u32) -> Option<Fault> {
        let ways: Vec<String> = if group.prefixes.len() > 1 {
            group.prefixes.iter().map(|prefix| format!("{prefix}*")).collect()
        } else {
            let prefix = group.prefixes.first().copied().unwrap_or_default();
            let whole = group.whole.iter().map(|part| part.name.to_owned());
            let shards = group.shards.keys().map(|style| match style {
                ShardStyle::Underscore => format!("{prefix}ngram_embedding.shard_*"),
                ShardStyle::Dot => format!("{prefix}ngram_embedding.shards.*"),
            });
            whole.chain(shards).collect()
        };
        (ways.len() > 1).then(|| {
            let message = format!("expected one table for layer {layer}, found {}", ways.join(" and "));
            let first = group.whole.iter().chain(group.shards.values().flat_map(BTreeMap::values)).chain(&group.scales);
            let first = first.copied().find_map(|part| self.sound(part));
            first.map_or_else(
                || Fault::new(FaultCode::TableAmbiguous, message.clone()),
                |first| first.fault(FaultCode::TableAmbiguous, message.clone()),
            )
        })
    }

    /// The table of one layer, if nothing is wrong with it.
    fn table(
        &self,
        place: usize,
        group: &Group<'a>,
        expected: Expected,
        faults: &mut Vec<Fault>,
    ) -> Result<Option<CatalogTable>, Error> {
        let layer = self.layout.layers()[place].layer();
        let values = self.values(group, layer, expected, faults);
        let Some(dtype) = values.dtype else { return Ok(None) };

        let kind = match dtype {
            Dtype::BF16 => Some(FormatKind::Bf16),
            Dtype::F16 => Some(FormatKind::F16),
            Dtype::F32 => Some(FormatKind::F32),
            _ => None,
        };
        let (kind, global, scales) = match kind {
            Some(kind) => {
                for scale in group.scales.iter().filter_map(|part| self.sound(*part)) {
                    let message =
                        format!("expected no scale beside a {kind} table, found this one, which nothing reads");
                    faults.push(scale.fault(FaultCode::UnreadTensor, message));
                }
                (kind, None, None)
            }
            None => match self.scale(group, &values, expected, faults)? {
                Some(Scale::Global(scale)) => (FormatKind::E4m3Global, Some(scale), None),
                Some(Scale::Blocks(scales)) => (FormatKind::E4m3E8m0x32, None, Some(scales)),
                None => return Ok(None),
            },
        };
        let Some(pieces) = values.pieces else { return Ok(None) };
        let width = usize::try_from(expected.width).unwrap_or(usize::MAX);
        let format = TableFormat::new(kind, width, global)?;

        let prefix = group.prefixes.first().copied().unwrap_or_default();
        let module = match &self.config.table {
            TableConfig::Engram(_) => prefix.trim_end_matches('.').to_owned(),
            TableConfig::Ple(_) => format!("{prefix}ngram_embedding"),
        };
        if let (Some(expected), Some(first)) = (self.announced.other_than(kind, self.config, &module), values.first) {
            faults.push(first.fault(FaultCode::FormatMismatch, format!("expected {expected}, found {kind}")));
        }

        let mut files = TableFiles::default();
        let values = pieces.into_iter().map(|(rows, piece)| files.extent(rows, &piece)).collect();
        let scales = scales.iter().map(|scales| files.extent(0..expected.rows, scales)).collect();
        let extents = TableExtents::new(format, expected.rows, files.files, values, scales)?;
        Ok(Some(CatalogTable { layer, extents }))
    }

    /// Finds the tensors of the values and judges their dtypes and shapes.
    fn values(&self, group: &Group<'a>, layer: u32, expected: Expected, faults: &mut Vec<Fault>) -> Values<'a> {
        let mut complete = true;
        let mut pieces = Vec::new();
        if let Some(whole) = group.whole {
            pieces.push((0..expected.rows, whole));
        } else if let (Some((&style, shards)), Some(count)) = (group.shards.first_key_value(), expected.shards) {
            if let Some(fault) = self.other_cut(shards, expected, count) {
                faults.push(fault);
                complete = false;
            } else {
                complete &= self.missing_shards(group, (style, shards), expected, count, faults);
                for (&number, &part) in shards {
                    if number < count {
                        pieces.push((shard_rows(expected.rows, count, number), part));
                    } else if let Some(shard) = self.sound(part) {
                        let message =
                            format!("expected shards 0 to {} by split_ngram_parts, found one more", count - 1);
                        faults.push(shard.fault(FaultCode::ShardUnexpected, message));
                        complete = false;
                    }
                }
            }
        } else {
            if self.tensors.complete {
                faults.push(self.table_missing(group, layer));
            }
            return Values::default();
        }

        let sound: Vec<_> = pieces.iter().filter_map(|(rows, part)| Some((rows.clone(), self.sound(*part)?))).collect();
        complete &= sound.len() == pieces.len();
        let Some(dtype) = common_dtype(&sound) else { return Values::default() };
        let odd: Vec<_> = sound.iter().map(|(_, piece)| piece).filter(|piece| piece.dtype() != Some(dtype)).collect();
        if let Some(first) = odd.first() {
            let (found, count) = (first.info.dtype(), odd.len());
            let message = format!("expected {dtype} as most shards are, found {found} (shards that differ: {count})");
            faults.push(first.fault(FaultCode::ShardDtype, message));
            complete = false;
        }
        if !matches!(dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32 | Dtype::F8_E4M3) {
            if let (true, Some((_, first))) = (odd.is_empty(), sound.first()) {
                let message =
                    format!("expected BF16, F16, F32 or F8_E4M3, found {}", unsupported(dtype, first.info.shape()));
                faults.push(first.fault(FaultCode::ShardDtype, message));
            }
            return Values::default();
        }
        for (rows, piece) in sound.iter().filter(|(_, piece)| piece.dtype() == Some(dtype)) {
            if let Some(fault) = shape_fault(piece, rows, expected, group.whole.is_some()) {
                faults.push(fault);
                complete = false;
            }
        }
        Values { dtype: Some(dtype), first: sound.first().map(|(_, first)| *first), pieces: complete.then_some(sound) }
    }

    /// One fault for shards that fit each other, but are cut for another number of shards or for a table of another size.
    fn other_cut(&self, shards: &BTreeMap<u64, Part<'a>>, expected: Expected, count: u64) -> Option<Fault> {
        let sound: Vec<_> = shards.values().map(|&part| self.sound(part)).collect::<Option<_>>()?;
        let mut rows = Vec::with_capacity(sound.len());
        for shard in &sound {
            match shard.info.shape() {
                &[found, width] if width == expected.width => rows.push(found),
                _ => return None,
            }
        }
        let found = sound.len() as u64;
        let total = rows.iter().try_fold(0u64, |total, &rows| total.checked_add(rows))?;
        let each = |total, count, number| {
            let range = shard_rows(total, count, number);
            range.end - range.start
        };
        let fits = shards.keys().copied().eq(0..found)
            && (0..).zip(&rows).all(|(number, &rows)| rows == each(total, found, number));
        let odd = (0..).zip(&rows).position(|(number, &rows)| rows != each(expected.rows, count, number))?;
        let message = if found == count {
            let (expected, each) = (expected.rows, each(expected.rows, count, odd as u64));
            format!(
                "expected {each} rows of {expected} by the config, found {}: the shards fit a table of {total} rows",
                rows[odd]
            )
        } else if odd == 0 {
            let each = each(expected.rows, count, 0);
            format!(
                "expected {count} shards of {each} rows by split_ngram_parts, found {found} shards that fit split_ngram_parts {found}"
            )
        } else {
            return None;
        };
        fits.then(|| sound[odd].fault(FaultCode::ShardShape, message))
    }

    /// One fault for each run of shards that are not there; false where there is any, whether or not that can be blamed.
    fn missing_shards(
        &self,
        group: &Group<'a>,
        (style, shards): (ShardStyle, &BTreeMap<u64, Part<'a>>),
        expected: Expected,
        count: u64,
        faults: &mut Vec<Fault>,
    ) -> bool {
        let missing =
            |number: &u64| !shards.contains_key(number) && !shard_rows(expected.rows, count, *number).is_empty();
        let mut numbers = (0..count).filter(missing).peekable();
        let none = numbers.peek().is_none();
        while let Some(first) = numbers.next() {
            let mut last = first;
            while let Some(next) = numbers.next_if_eq(&(last + 1)) {
                last = next;
            }
            let found = if first == last { format!("shard {first}") } else { format!("shards {first} to {last}") };
            let message = format!("expected shards 0 to {} by split_ngram_parts, found no {found}", count - 1);
            if self.tensors.complete {
                faults.push(Fault::new(FaultCode::ShardMissing, message).tensor(&group.shard_name(style, first)));
            }
        }
        none
    }

    fn table_missing(&self, group: &Group<'a>, layer: u32) -> Fault {
        let torch = self.listing.torch.first().filter(|_| self.files.is_empty());
        let hint = if let Some(torch) = torch {
            format!("; there are only PyTorch files ({torch}), which have to be converted to safetensors first")
        } else if let Some((unknown, _)) = group.unknown.first() {
            format!("; {} belongs to no format that is known here", unknown.name)
        } else {
            self.listing.interrupted("")
        };
        let name = match &self.config.table {
            TableConfig::Engram(_) => format!("layers.{layer}.engram.embed.weight"),
            TableConfig::Ple(_) => format!("layers.{layer}.ple.ple_embedding.ngram_embedding.shard_*.weight"),
        };
        Fault::new(FaultCode::TableMissing, format!("expected a table for layer {layer}, found none{hint}"))
            .tensor(&name)
    }

    /// The scale of an E4M3 table; `None` after a fault, or where it cannot be known.
    fn scale(
        &self,
        group: &Group<'a>,
        values: &Values<'a>,
        expected: Expected,
        faults: &mut Vec<Fault>,
    ) -> Result<Option<Scale<'a>>, Error> {
        match group.scales[..] {
            [] => {
                if self.tensors.complete {
                    let message = format!("expected a scale beside F8_E4M3 values ({}), found none", SCALES.join(", "));
                    let fault = Fault::new(FaultCode::ScaleMissing, message);
                    faults.push(values.first.map_or(fault.clone(), |first| first.fault(fault.code, fault.message)));
                }
                Ok(None)
            }
            [part] => match self.sound(part) {
                Some(tensor) => {
                    // A table of another shape than the config's may have scales to match, and that is no second fault.
                    let whole = group.whole.and_then(|part| self.sound(part)).map(|whole| whole.info.shape());
                    let (rows, width) = match whole {
                        Some(&[rows, width]) if !scale::is_per_block(&tensor, expected.rows, expected.width) => {
                            (rows, width)
                        }
                        _ => (expected.rows, expected.width),
                    };
                    scale::judge(tensor, rows, width, faults)
                }
                None => Ok(None),
            },
            [first, second, ..] => {
                let message = format!("expected one scale, found {} too", first.name);
                let fault = Fault::new(FaultCode::ScaleAmbiguous, message.clone()).tensor(second.name);
                faults
                    .push(self.sound(second).map_or(fault, |second| second.fault(FaultCode::ScaleAmbiguous, message)));
                Ok(None)
            }
        }
    }
}

impl<'a> Group<'a> {
    fn add(&mut self, name: &TableName<'a>, part: Part<'a>) {
        match name.leaf {
            Leaf::Legacy => return,
            Leaf::Unknown { scale } => {
                let severity = if scale { Severity::Error } else { Severity::Warning };
                self.unknown.push((part, severity));
                return;
            }
            Leaf::Whole => self.whole = Some(part),
            Leaf::Shard { style, number } => {
                self.shards.entry(style).or_default().insert(number, part);
            }
            Leaf::Scale => self.scales.push(part),
            Leaf::Constant(constant) => {
                self.constants.insert(constant, part);
            }
        }
        self.prefixes.insert(name.table);
    }

    fn shard_name(&self, style: ShardStyle, number: u64) -> String {
        let prefix = self.prefixes.first().copied().unwrap_or_default();
        match style {
            ShardStyle::Underscore => format!("{prefix}ngram_embedding.shard_{number}.weight"),
            ShardStyle::Dot => format!("{prefix}ngram_embedding.shards.{number}.weight"),
        }
    }
}

/// The files of one table, each listed once.
#[derive(Debug, Default)]
struct TableFiles<'a> {
    files: Vec<TableFile>,
    positions: BTreeMap<&'a Path, usize>,
}

impl<'a> TableFiles<'a> {
    fn extent(&mut self, rows: Range<u64>, tensor: &Sound<'a>) -> Extent {
        let file = *self.positions.entry(tensor.file.path()).or_insert_with(|| {
            self.files.push(TableFile { path: tensor.file.path().to_owned(), bytes: tensor.file.bytes() });
            self.files.len() - 1
        });
        Extent { file, offset: tensor.info.byte_range().start, rows }
    }
}

/// The rows of one shard: each has as many as the first, but for the last that has any.
fn shard_rows(rows: u64, shards: u64, number: u64) -> Range<u64> {
    let each = rows.div_ceil(shards);
    let start = |number: u64| number.saturating_mul(each).min(rows);
    start(number)..start(number.saturating_add(1))
}

/// The dtype of most tensors; among equals, that of the lower shard.
fn common_dtype(pieces: &[(Range<u64>, Sound<'_>)]) -> Option<Dtype> {
    let mut counts: BTreeMap<Dtype, (usize, Reverse<usize>)> = BTreeMap::new();
    for (place, (_, piece)) in pieces.iter().enumerate() {
        counts.entry(piece.dtype()?).or_insert((0, Reverse(place))).0 += 1;
    }
    counts.into_iter().max_by_key(|&(_, count)| count).map(|(dtype, _)| dtype)
}

fn shape_fault(piece: &Sound<'_>, rows: &Range<u64>, expected: Expected, whole: bool) -> Option<Fault> {
    let rows = rows.end - rows.start;
    let found = piece.info.shape();
    if *found == [rows, expected.width] {
        return None;
    }
    let right_width = matches!(found, [_, width] if *width == expected.width);
    let code = if whole && right_width { FaultCode::RowsMismatch } else { FaultCode::ShardShape };
    Some(piece.fault(code, format!("expected shape [{rows}, {}] by the config, found {found:?}", expected.width)))
}

/// Names a dtype that no format has, and what it is usually a sign of.
fn unsupported(dtype: Dtype, shape: &[u64]) -> String {
    let sign = match dtype {
        Dtype::U8 | Dtype::F4 => "; packed 4-bit or 6-bit tables are not supported",
        Dtype::I8 => "; INT8 tables are not supported",
        Dtype::I16 => "; trellis-coded tables are not supported",
        Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ => "; FNUZ values have another exponent bias",
        _ => "",
    };
    format!("{dtype} of shape {shape:?}{sign}")
}
