//! A safetensors file of looked-up rows.

use crate::atomic::write_atomically;
use crate::headers::plan::{HeaderPlan, TensorPlan};
use crate::{Error, Progress};
use engram_ple::{OutputType, TableFormat, TableSource};
use half::{bf16, f16};
use safetensors::Dtype;
use std::io::Write;
use std::path::Path;

/// Packed rows that are looked up and decoded at a time, in bytes.
const PART_BYTES: usize = 4 << 20;

/// Looks rows up and writes them to the safetensors file `path`, decoded to `dtype`: for each table a tensor `layer.L.rows` of shape
/// `[tokens, columns, row width]`, where `L` is the table's 0-based backbone layer.
///
/// `ids` is `[tokens][tables][columns]`; the row of id -1 is zeros. Memory stays at a few MiB. The file appears when it is complete.
///
/// # Errors
/// [`Error::Rows`] when a table cannot be read or has no such row, [`Error::Layout`] for ids that are not whole tokens, [`Error::Io`].
pub fn write_rows_file(
    path: &Path,
    tables: &[(u32, &dyn TableSource)],
    columns: usize,
    ids: &[i32],
    dtype: OutputType,
    progress: &dyn Progress,
) -> Result<(), Error> {
    let per_token = tables.len() * columns;
    if per_token == 0 || !ids.len().is_multiple_of(per_token) {
        let message = format!("{} ids for tokens of {} tables and {columns} columns", ids.len(), tables.len());
        return Err(Error::Layout { path: path.to_owned(), message });
    }
    let tokens = ids.len() / per_token;
    let plan = |&(layer, table): &(u32, &dyn TableSource)| TensorPlan {
        name: format!("layer.{layer}.rows"),
        dtype: match dtype {
            OutputType::F32 => Dtype::F32,
            OutputType::F16 => Dtype::F16,
            _ => Dtype::BF16,
        },
        shape: vec![tokens, columns, table.format().width()],
    };
    let header = HeaderPlan::new(path, &tables.iter().map(plan).collect::<Vec<_>>())?;
    progress.begin("looking up", header.bytes - header.head.len() as u64);
    let written = write_atomically(path, |out| {
        let io = |source| Error::Io { path: path.to_owned(), source };
        out.write_all(&header.head).map_err(io)?;
        for (place, (_, table)) in tables.iter().enumerate() {
            let format = table.format();
            let part_tokens = (PART_BYTES / (columns * format.row_bytes())).max(1);
            let mut decoder = Decoder::new(format, dtype);
            let (mut part, mut packed) = (Vec::new(), Vec::new());
            for ids in ids.chunks(part_tokens * per_token) {
                part.clear();
                for token in ids.chunks_exact(per_token) {
                    part.extend_from_slice(&token[place * columns..][..columns]);
                }
                packed.resize(part.len() * format.row_bytes(), 0);
                table.gather(&part, &mut packed)?;
                let bytes = decoder.decode(&packed);
                out.write_all(bytes).map_err(io)?;
                progress.advance(bytes.len() as u64);
            }
        }
        Ok(())
    });
    progress.end();
    written
}

/// Decodes packed rows to little-endian bytes.
struct Decoder<'a> {
    format: &'a TableFormat,
    dtype: OutputType,
    bf16: Vec<bf16>,
    f16: Vec<f16>,
    f32: Vec<f32>,
    bytes: Vec<u8>,
}

impl<'a> Decoder<'a> {
    fn new(format: &'a TableFormat, dtype: OutputType) -> Self {
        Self { format, dtype, bf16: vec![], f16: vec![], f32: vec![], bytes: vec![] }
    }

    fn decode(&mut self, packed: &[u8]) -> &[u8] {
        let elements = packed.len() / self.format.row_bytes() * self.format.width();
        self.bytes.clear();
        match self.dtype {
            OutputType::F32 => {
                self.f32.resize(elements, 0.0);
                self.format.decode_f32(packed, &mut self.f32);
                self.bytes.extend(self.f32.iter().flat_map(|x| x.to_le_bytes()));
            }
            OutputType::F16 => {
                self.f16.resize(elements, f16::ZERO);
                self.format.decode_f16(packed, &mut self.f16);
                self.bytes.extend(self.f16.iter().flat_map(|x| x.to_le_bytes()));
            }
            _ => {
                self.bf16.resize(elements, bf16::ZERO);
                self.format.decode_bf16(packed, &mut self.bf16);
                self.bytes.extend(self.bf16.iter().flat_map(|x| x.to_le_bytes()));
            }
        }
        &self.bytes
    }
}
