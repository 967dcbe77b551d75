//! Checkpoints made up: the official layout and names of both families, of any size.

use crate::atomic::{parent, partial_name};
use crate::headers::plan::{HeaderPlan, TensorPlan};
use crate::tiers::gather::FirstError;
use crate::{Error, Extent, Pool, Progress, TableExtents, TableFile};
use engram_core::{LayerLayout, Layout, ModelConfig, Preset, TableConfig};
use engram_ple::{FormatKind, SynthSource, TableFormat, TableSource};
use safetensors::Dtype;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

/// What one thread makes and writes before it takes more, in bytes.
const PART_BYTES: usize = 1 << 20;

/// The scale of synthetic tables that have one: with it, E4M3 codes reach to 1.75.
const GLOBAL_SCALE: f32 = 1.0 / 256.0;

/// A checkpoint to be made up: tables as they would be, and next to nothing of the rest of the model.
///
/// Rows are those of [`SynthSource`] with the table's layer and number of rows, so whoever knows preset, scale and seed knows every row.
#[derive(Debug, Clone)]
pub struct Synth {
    config: ModelConfig,
    layout: Layout,
    kind: FormatKind,
    seed: u64,
    files: usize,
}

/// A tensor and what it holds.
struct Tensor {
    plan: TensorPlan,
    content: Content,
}

enum Content {
    Bytes(Vec<u8>),
    /// The values of some rows of a table.
    Values {
        table: usize,
        rows: Range<u64>,
    },
    /// The scales of all rows of a table.
    Scales {
        table: usize,
        rows: u64,
    },
}

impl Synth {
    /// A checkpoint like `preset`, with `engram_vocab_size` or `ngram_vocab_size_base` times `scale`. `kind` is the tables' format, by
    /// default the official one.
    ///
    /// # Errors
    /// [`Error::Config`] for a scale that gives no table, [`Error::Format`] for a format that cannot hold the rows.
    pub fn new(preset: Preset, scale: f64, kind: Option<FormatKind>, seed: u64) -> Result<Self, Error> {
        let mut config = preset.config().scaled(scale)?;
        let kind = kind.unwrap_or(match config.table {
            TableConfig::Engram(_) => FormatKind::E4m3E8m0x32,
            TableConfig::Ple(_) => FormatKind::Bf16,
        });
        announce(&mut config, kind);
        let files = match preset {
            Preset::DeepseekV41Flash => 48,
            Preset::Qwen38FlashNext => 131,
            _ => 3,
        };
        let synth = Self { layout: Layout::from_config(&config)?, config, kind, seed, files };
        synth.format()?;
        Ok(synth)
    }

    /// The model's configuration, as it is written.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where ids come from.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The tables, in the order of the layout's layers.
    ///
    /// # Errors
    /// [`Error::Format`], as [`Synth::new`] would have said.
    pub fn tables(&self) -> Result<Vec<SynthSource>, Error> {
        let format = self.format()?;
        let table = |layer: &LayerLayout| {
            SynthSource::new(format.clone(), self.seed, layer.layer(), layer.padded_rows().into())
        };
        Ok(self.layout.layers().iter().map(table).collect())
    }

    fn format(&self) -> Result<TableFormat, Error> {
        let scale = (self.kind == FormatKind::E4m3Global).then_some(GLOBAL_SCALE);
        Ok(TableFormat::new(self.kind, self.config.row_width() as usize, scale)?)
    }

    /// Writes the checkpoint as the folder `out`, which must not exist, or be empty. The folder appears when it is complete.
    ///
    /// Memory stays at a few MiB a thread of `pool`, whatever the size.
    ///
    /// # Errors
    /// [`Error::Exists`] for a folder that holds something, and [`Error::Io`]. Nothing is left behind then.
    pub fn write(&self, out: &Path, pool: &Pool, progress: &dyn Progress) -> Result<(), Error> {
        refuse_existing(out)?;
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { path, source }
        };
        let prefix = partial_name(out);
        let mut builder = tempfile::Builder::new();
        // What a folder that is created in the usual way would get; the process's mask applies.
        builder.prefix(&prefix).permissions(Permissions::from_mode(0o777));
        let partial = builder.tempdir_in(parent(out)).map_err(io(out))?;
        self.write_into(partial.path(), pool, progress)?;
        match std::fs::rename(partial.path(), out) {
            Ok(()) => {
                let _renamed = partial.keep();
                Ok(())
            }
            Err(error) if matches!(error.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists) => {
                Err(Error::Exists { path: out.to_owned() })
            }
            Err(error) => Err(io(out)(error)),
        }
    }

    fn write_into(&self, folder: &Path, pool: &Pool, progress: &dyn Progress) -> Result<(), Error> {
        let files = self.files();
        let name = |file: usize| format!("model-{:05}-of-{:05}.safetensors", file + 1, files.len());
        let mut weight_map = BTreeMap::new();
        let mut total_size = 0;
        let mut table_files = Vec::new();
        let mut extents = vec![(Vec::new(), Vec::new()); self.layout.layers().len()];
        for (file, tensors) in files.iter().enumerate() {
            let path = folder.join(name(file));
            let plans: Vec<TensorPlan> = tensors.iter().map(|tensor| tensor.plan.clone()).collect();
            let header = HeaderPlan::new(&path, &plans)?;
            let io = |source| Error::Io { path: path.clone(), source };
            let out = File::create_new(&path).map_err(io)?;
            out.set_len(header.bytes).map_err(io)?;
            out.write_all_at(&header.head, 0).map_err(io)?;
            for (tensor, &offset) in tensors.iter().zip(&header.offsets) {
                weight_map.insert(tensor.plan.name.clone(), name(file));
                let extent = |rows: &Range<u64>| Extent { file, offset, rows: rows.clone() };
                match &tensor.content {
                    Content::Bytes(bytes) => out.write_all_at(bytes, offset).map_err(io)?,
                    Content::Values { table, rows } => extents[*table].0.push(extent(rows)),
                    Content::Scales { table, rows } => extents[*table].1.push(extent(&(0..*rows))),
                }
            }
            total_size += header.bytes - header.head.len() as u64;
            table_files.push(TableFile { path, bytes: header.bytes });
        }
        let sources = self.tables()?;
        progress.begin("writing", sources.iter().map(|table| table.rows() * table.format().row_bytes() as u64).sum());
        for (source, (values, scales)) in sources.iter().zip(extents) {
            let table = TableExtents::new(source.format().clone(), source.rows(), table_files.clone(), values, scales)?;
            write_table(&table, source, pool, progress)?;
        }
        progress.end();
        let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        let texts = [("config.json", self.config.to_json()), ("model.safetensors.index.json", format!("{index:#}\n"))];
        for (name, text) in texts {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(|source| Error::Io { path, source })?;
        }
        Ok(())
    }

    /// The tensors of each file, spread as in the official checkpoints.
    fn files(&self) -> Vec<Vec<Tensor>> {
        let mut files: Vec<Vec<Tensor>> = Vec::new();
        // Other weights fill the other files: one small tensor stands for them.
        files.resize_with(self.files, Vec::new);
        for (number, file) in files.iter_mut().enumerate() {
            let (layer, expert) = (number % 4, number / 4);
            let name = format!("{}layers.{layer}.mlp.experts.{expert}.down_proj.weight", self.prefix());
            file.push(filler(name, vec![4, 8]));
        }
        match &self.config.table {
            // Each table has a file of its own, at the end.
            TableConfig::Engram(_) => {
                let first = self.files - self.layout.layers().len();
                for (file, tensors) in files[first..].iter_mut().zip(self.engram_tables()) {
                    *file = tensors;
                }
            }
            // Shards lie in all files, in the order of their names as text.
            TableConfig::Ple(config) => {
                let mut tensors = self.ple_tables(config.split_parts.into());
                tensors.sort_by(|a, b| a.plan.name.cmp(&b.plan.name));
                let count = tensors.len();
                for (place, tensor) in tensors.into_iter().enumerate() {
                    files[place * self.files / count].push(tensor);
                }
            }
        }
        // As safetensors writes them: wide elements first, so that all are aligned.
        for file in &mut files {
            file.sort_by(|a, b| (b.plan.dtype.cmp(&a.plan.dtype)).then_with(|| a.plan.name.cmp(&b.plan.name)));
        }
        files
    }

    fn prefix(&self) -> &'static str {
        match self.config.table {
            TableConfig::Engram(_) => "",
            TableConfig::Ple(_) => "model.language_model.",
        }
    }

    fn engram_tables(&self) -> Vec<Vec<Tensor>> {
        let table = |(place, layer): (usize, &LayerLayout)| {
            let module = format!("{}layers.{}.engram", self.prefix(), layer.layer());
            let rows = u64::from(layer.padded_rows());
            let mut tensors = vec![filler(format!("{module}.q_weight"), vec![4, 8])];
            tensors.push(self.values(format!("{module}.embed.weight"), place, 0..rows));
            tensors.extend(self.scale(format!("{module}.embed.scale"), place, rows));
            tensors
        };
        self.layout.layers().iter().enumerate().map(table).collect()
    }

    fn ple_tables(&self, parts: u64) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        for (place, layer) in self.layout.layers().iter().enumerate() {
            let module = format!("{}layers.{}.ple.ple_embedding", self.prefix(), layer.layer());
            let rows = u64::from(layer.padded_rows());
            let shard_rows = rows.div_ceil(parts);
            for (shard, first) in (0..rows).step_by(usize::try_from(shard_rows).unwrap_or(usize::MAX)).enumerate() {
                let name = format!("{module}.ngram_embedding.shard_{shard}.weight");
                tensors.push(self.values(name, place, first..rows.min(first + shard_rows)));
            }
            tensors.extend(self.scale(format!("{module}.ngram_embedding.weight_scale"), place, rows));
            let widen = |numbers: &[u32]| numbers.iter().map(|&number| number.into()).collect::<Vec<i64>>();
            tensors.push(constants(format!("{module}.layer_multipliers"), layer.multipliers()));
            tensors.push(constants(format!("{module}.ngram_heads_vocab_sizes"), &widen(layer.sizes())));
            tensors.push(constants(format!("{module}.ngram_heads_offsets"), &widen(layer.offsets())));
        }
        tensors
    }

    fn values(&self, name: String, table: usize, rows: Range<u64>) -> Tensor {
        let dtype = match self.kind {
            FormatKind::Bf16 => Dtype::BF16,
            FormatKind::F16 => Dtype::F16,
            FormatKind::F32 => Dtype::F32,
            _ => Dtype::F8_E4M3,
        };
        let shape = vec![count(rows.end - rows.start), self.config.row_width() as usize];
        Tensor { plan: TensorPlan { name, dtype, shape }, content: Content::Values { table, rows } }
    }

    fn scale(&self, name: String, table: usize, rows: u64) -> Option<Tensor> {
        let (dtype, shape, content) = match self.kind {
            FormatKind::E4m3Global => (Dtype::F32, vec![1], Content::Bytes(GLOBAL_SCALE.to_le_bytes().to_vec())),
            FormatKind::E4m3E8m0x32 => {
                let groups = self.config.row_width() as usize / 32;
                (Dtype::F8_E8M0, vec![count(rows), groups], Content::Scales { table, rows })
            }
            _ => return None,
        };
        Some(Tensor { plan: TensorPlan { name, dtype, shape }, content })
    }
}

/// Makes the config say what the tables are, as inference engines understand it where they know such tables.
fn announce(config: &mut ModelConfig, kind: FormatKind) {
    let fp8 = |block: u32| json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]});
    let quantization = match (&mut config.table, kind) {
        (TableConfig::Engram(_), FormatKind::E4m3E8m0x32) => {
            let mut quantization = fp8(32);
            quantization["scale_fmt"] = "ue8m0".into();
            Some(quantization)
        }
        (TableConfig::Engram(engram), kind) => {
            engram.engram_dtype = Some(kind.name().to_owned());
            let mut quantization = fp8(32);
            quantization["engram_dtype"] = kind.name().into();
            Some(quantization)
        }
        (TableConfig::Ple(_), FormatKind::E4m3Global) => Some(fp8(128)),
        (TableConfig::Ple(ple), FormatKind::E4m3E8m0x32) => {
            ple.embedding_dtype = Some(kind.name().to_owned());
            None
        }
        (TableConfig::Ple(_), _) => None,
    };
    config.quantization = quantization.map(|quantization| quantization.to_string());
}

fn count(rows: u64) -> usize {
    usize::try_from(rows).unwrap_or(usize::MAX)
}

fn filler(name: String, shape: Vec<usize>) -> Tensor {
    let bytes = vec![0; shape.iter().product::<usize>() * 2];
    Tensor { plan: TensorPlan { name, dtype: Dtype::BF16, shape }, content: Content::Bytes(bytes) }
}

fn constants(name: String, numbers: &[i64]) -> Tensor {
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    Tensor { plan: TensorPlan { name, dtype: Dtype::I64, shape: vec![numbers.len()] }, content: Content::Bytes(bytes) }
}

fn refuse_existing(out: &Path) -> Result<(), Error> {
    let io = |source| Error::Io { path: out.to_owned(), source };
    match std::fs::symlink_metadata(out) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io(error)),
        Ok(found) if found.is_dir() && std::fs::read_dir(out).map_err(io)?.next().is_none() => Ok(()),
        Ok(_) => Err(Error::Exists { path: out.to_owned() }),
    }
}

/// Makes the rows of a table part by part and writes them to their extents.
fn write_table(table: &TableExtents, source: &SynthSource, pool: &Pool, progress: &dyn Progress) -> Result<(), Error> {
    let open = |file: &TableFile| {
        File::options().write(true).open(&file.path).map_err(|source| Error::Io { path: file.path.clone(), source })
    };
    let files = table.files().iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let row_bytes = table.format().row_bytes();
    let part_rows = (PART_BYTES / row_bytes).max(1) as u64;
    let failure = FirstError::default();
    pool.run(count(table.rows().div_ceil(part_rows)), &|_, part| {
        if failure.is_set() {
            return;
        }
        let first = part as u64 * part_rows;
        let rows = first..table.rows().min(first + part_rows);
        let mut packed = vec![0; count(rows.end - rows.start) * row_bytes];
        failure.keep(write_rows(table, source, &files, rows, &mut packed));
        progress.advance(packed.len() as u64);
    });
    failure.into_result()
}

fn write_rows(
    table: &TableExtents,
    source: &SynthSource,
    files: &[File],
    rows: Range<u64>,
    packed: &mut [u8],
) -> Result<(), Error> {
    source.read_range(rows.clone(), packed)?;
    let row_bytes = table.format().row_bytes();
    let mut part = Vec::new();
    for plane in table.planes() {
        let mut packed = packed.chunks_exact(row_bytes);
        for (file, offset, run) in plane.runs(rows.clone()) {
            part.clear();
            for row in packed.by_ref().take(count(run.end - run.start)) {
                part.extend_from_slice(&row[plane.part()]);
            }
            let io = |source| Error::Io { path: table.files()[file].path.clone(), source };
            files[file].write_all_at(&part, offset).map_err(io)?;
        }
    }
    Ok(())
}
