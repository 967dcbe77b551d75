//! Judging the scale of an E4M3 table.

use half::{bf16, f16};
use safetensors::Dtype;

use crate::error::Error;
use crate::prove::report::{Fault, FaultCode};
use crate::prove::table::Sound;

/// Elements that share an E8M0 scale.
const BLOCK: u64 = 32;

/// How an E4M3 table is scaled.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scale<'a> {
    /// One factor for all values.
    Global(f32),
    /// An E8M0 factor for each 32 values of a row.
    Blocks(Sound<'a>),
}

/// Whether a tensor has one element for each [`BLOCK`] values of a table of this shape.
pub(crate) fn is_per_block(tensor: &Sound<'_>, rows: u64, width: u64) -> bool {
    width.is_multiple_of(BLOCK) && *tensor.info.shape() == [rows, width / BLOCK]
}

/// Decides by shape and dtype what kind of scale a tensor is, and reads it if it is a single number.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn judge<'a>(
    tensor: Sound<'a>,
    rows: u64,
    width: u64,
    faults: &mut Vec<Fault>,
) -> Result<Option<Scale<'a>>, Error> {
    let (dtype, shape) = (tensor.info.dtype(), tensor.info.shape());
    let single = matches!(shape, [] | [1]);
    let blocks = is_per_block(&tensor, rows, width);
    match tensor.dtype() {
        Some(dtype @ (Dtype::F32 | Dtype::BF16 | Dtype::F16)) if single => {
            let value = number(dtype, &tensor.file.read(tensor.info.byte_range())?);
            if let Some(found) = unfit(value) {
                let message = format!("expected a finite scale above zero, found {found}");
                faults.push(tensor.fault(FaultCode::ScaleValue, message));
            }
            Ok(Some(Scale::Global(value)))
        }
        // Some exporters keep E8M0 codes in bytes.
        Some(Dtype::F8_E8M0 | Dtype::U8) if blocks => Ok(Some(Scale::Blocks(tensor))),
        _ if single => {
            let message = format!("expected F32, BF16 or F16 for one scale of the whole table, found {dtype}");
            faults.push(tensor.fault(FaultCode::ScaleDtype, message));
            Ok(None)
        }
        _ if blocks => {
            let message = format!("expected F8_E8M0 (or U8) for a scale per {BLOCK} values, found {dtype}");
            faults.push(tensor.fault(FaultCode::ScaleDtype, message));
            Ok(None)
        }
        _ => {
            let per_block = match width.is_multiple_of(BLOCK) {
                true => format!("[{rows}, {}] or one number", width / BLOCK),
                false => "one number".to_owned(),
            };
            faults.push(tensor.fault(FaultCode::ScaleShape, format!("expected {per_block}, found shape {shape:?}")));
            Ok(None)
        }
    }
}

/// The number in the bytes of one little-endian element.
fn number(dtype: Dtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        // A sound tensor of one element has as many bytes as its dtype.
        _ => f32::NAN,
    }
}

/// What is wrong with a global scale, in words.
fn unfit(value: f32) -> Option<String> {
    // Loaders fill the parameter with the lowest number of its type and look whether it is still there.
    let sentinels = [f32::MIN, bf16::MIN.to_f32(), f16::MIN.to_f32()];
    if sentinels.contains(&value) {
        return Some(format!("{value:e}, the mark of a scale that was never loaded"));
    }
    (!(value > 0.0 && value.is_finite())).then(|| format!("{value:e}"))
}
