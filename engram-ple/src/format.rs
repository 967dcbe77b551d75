//! What a table's rows look like, and how to read and write them.

use crate::rows::{RowFormat, e4m3_e8m0x32::E4m3E8m0x32, e4m3_global::E4m3Global, plain};
use crate::{Error, NanRows};
use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Rows wider than this many elements are refused, so that no size of a row can overflow.
pub const MAX_WIDTH: usize = 1 << 20;

/// The table formats, by the names that commands and reports use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FormatKind {
    /// `bf16`: bfloat16, unquantised.
    Bf16,
    /// `f16`: IEEE half precision, unquantised.
    F16,
    /// `f32`: IEEE single precision, unquantised.
    F32,
    /// `e4m3-global`: E4M3FN values under one scale for the whole table.
    E4m3Global,
    /// `e4m3-e8m0-32`: E4M3FN values, one E8M0 scale per 32 of them.
    E4m3E8m0x32,
}

impl FormatKind {
    /// Every format.
    pub const ALL: [Self; 5] = [Self::Bf16, Self::F16, Self::F32, Self::E4m3Global, Self::E4m3E8m0x32];

    /// The format's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::E4m3Global => "e4m3-global",
            Self::E4m3E8m0x32 => "e4m3-e8m0-32",
        }
    }

    /// The type that rows of this format are stored in, if they are not quantised.
    pub const fn unquantized(self) -> Option<OutputType> {
        match self {
            Self::Bf16 => Some(OutputType::Bf16),
            Self::F16 => Some(OutputType::F16),
            Self::F32 => Some(OutputType::F32),
            Self::E4m3Global | Self::E4m3E8m0x32 => None,
        }
    }
}

impl fmt::Display for FormatKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for FormatKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| Error::UnknownFormat { name: name.to_owned() })
    }
}

/// The types that rows are decoded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OutputType {
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE half precision, 2 bytes.
    F16,
    /// IEEE single precision, 4 bytes.
    F32,
}

impl OutputType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The type's name: `bf16`, `f16` or `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}

impl fmt::Display for OutputType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for OutputType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = [Self::Bf16, Self::F16, Self::F32].into_iter().find(|output| output.name() == name);
        found.ok_or_else(|| Error::UnknownOutputType { name: name.to_owned() })
    }
}

/// The format of one table: kind, elements a row and, where the kind has one, the table's scale.
///
/// A *packed* row is the bytes of its values followed by those of its scales, with no padding: 264 bytes for 256 E4M3 elements with an
/// E8M0 scale per 32. A global scale is no part of a row.
///
/// Cheap to clone. Two formats are equal when they decode every row alike, that is, kind, width and the bits of the scale agree.
#[derive(Clone)]
pub struct TableFormat {
    kind: FormatKind,
    width: usize,
    global_scale: Option<f32>,
    /// Only for `E4m3Global`: what its 256 codes decode to under the scale.
    global: Option<Arc<E4m3Global>>,
}

impl TableFormat {
    /// The format of rows of `width` elements. `global_scale` is the table's scale for [`FormatKind::E4m3Global`] and absent elsewhere;
    /// a scale stored as bf16 or f16 is passed as the f32 of the same value. Its value is not judged here.
    ///
    /// # Errors
    /// [`Error::Width`] for a width of 0, past [`MAX_WIDTH`], or not a multiple of 32 where 32 elements share a scale;
    /// [`Error::GlobalScaleMissing`] and [`Error::GlobalScaleUnexpected`].
    pub fn new(kind: FormatKind, width: usize, global_scale: Option<f32>) -> Result<Self, Error> {
        let global = match (kind, global_scale) {
            (FormatKind::E4m3Global, Some(scale)) => Some(Arc::new(E4m3Global::new(scale))),
            (FormatKind::E4m3Global, None) => return Err(Error::GlobalScaleMissing { kind }),
            (_, Some(_)) => return Err(Error::GlobalScaleUnexpected { kind }),
            (_, None) => None,
        };
        let format = Self { kind, width, global_scale, global };
        let multiple = format.rows().multiple();
        if width == 0 || width > MAX_WIDTH || !width.is_multiple_of(multiple) {
            return Err(Error::Width { kind, width, multiple });
        }
        Ok(format)
    }

    fn rows(&self) -> &dyn RowFormat {
        match (&self.global, self.kind) {
            (Some(global), _) => &**global,
            (None, FormatKind::Bf16) => &plain::Bf16,
            (None, FormatKind::F16) => &plain::F16,
            (None, FormatKind::F32) => &plain::F32,
            (None, FormatKind::E4m3Global | FormatKind::E4m3E8m0x32) => &E4m3E8m0x32,
        }
    }

    /// The format's kind.
    pub fn kind(&self) -> FormatKind {
        self.kind
    }

    /// Elements a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The scale of the whole table, for [`FormatKind::E4m3Global`].
    pub fn global_scale(&self) -> Option<f32> {
        self.global_scale
    }

    /// Bytes that the values of a row take.
    pub fn value_bytes(&self) -> usize {
        self.rows().value_bytes(self.width)
    }

    /// Bytes that the scales of a row take; 0 for formats without scales in their rows.
    pub fn scale_bytes(&self) -> usize {
        self.rows().scale_bytes(self.width)
    }

    /// Bytes of a packed row, values and scales.
    pub fn row_bytes(&self) -> usize {
        self.value_bytes() + self.scale_bytes()
    }

    /// Decodes packed rows to bf16, exactly as the format defines. `rows` holds any number of rows, `out` `[rows][width]`.
    ///
    /// Results past the range are infinite, never saturated; NaN codes and NaN scales give NaN.
    ///
    /// # Panics
    /// When `rows` is not a whole number of rows or `out` has another number of elements.
    pub fn decode_bf16(&self, rows: &[u8], out: &mut [bf16]) {
        self.each_row(rows, out, |rows, values, scales, out| rows.decode_bf16(values, scales, out));
    }

    /// Decodes packed rows to f16; otherwise as [`decode_bf16`](Self::decode_bf16).
    ///
    /// # Panics
    /// As [`decode_bf16`](Self::decode_bf16).
    pub fn decode_f16(&self, rows: &[u8], out: &mut [f16]) {
        self.each_row(rows, out, |rows, values, scales, out| rows.decode_f16(values, scales, out));
    }

    /// Decodes packed rows to f32; otherwise as [`decode_bf16`](Self::decode_bf16).
    ///
    /// # Panics
    /// As [`decode_bf16`](Self::decode_bf16).
    pub fn decode_f32(&self, rows: &[u8], out: &mut [f32]) {
        self.each_row(rows, out, |rows, values, scales, out| rows.decode_f32(values, scales, out));
    }

    fn each_row<T>(&self, rows: &[u8], out: &mut [T], decode: impl Fn(&dyn RowFormat, &[u8], &[u8], &mut [T])) {
        let (format, value_bytes, row_bytes) = (self.rows(), self.value_bytes(), self.row_bytes());
        assert!(rows.len().is_multiple_of(row_bytes), "{} bytes are not whole rows of {row_bytes} bytes", rows.len());
        let count = rows.len() / row_bytes;
        assert!(out.len() == count * self.width, "{} elements for {count} rows of {}", out.len(), self.width);
        for (row, out) in rows.chunks_exact(row_bytes).zip(out.chunks_exact_mut(self.width)) {
            let (values, scales) = row.split_at(value_bytes);
            decode(format, values, scales, out);
        }
    }

    /// Encodes numbers, `[rows][width]`, to packed rows: the nearest codes, ties to the even code.
    ///
    /// E4M3 saturates at the code of 448, bf16 and f16 overflow to infinity; NaN stays NaN. E8M0 scales are the smallest power of two
    /// under which the largest magnitude of the 32 does not pass 448, and code 0 for 32 zeros, so that zeros give a row of zero bytes. A
    /// global scale has to be finite and not zero for the codes to mean anything.
    ///
    /// # Panics
    /// When `numbers` is not a whole number of rows or `rows` has another number of bytes.
    pub fn encode(&self, numbers: &[f32], rows: &mut [u8]) {
        let (format, value_bytes, row_bytes) = (self.rows(), self.value_bytes(), self.row_bytes());
        assert!(
            numbers.len().is_multiple_of(self.width),
            "{} numbers are not whole rows of {}",
            numbers.len(),
            self.width
        );
        let count = numbers.len() / self.width;
        assert!(rows.len() == count * row_bytes, "{} bytes for {count} rows of {row_bytes} bytes", rows.len());
        for (numbers, row) in numbers.chunks_exact(self.width).zip(rows.chunks_exact_mut(row_bytes)) {
            let (values, scales) = row.split_at_mut(value_bytes);
            format.encode(numbers, values, scales);
        }
    }

    /// Whether a packed row, or any of several, has a NaN among its values or scales.
    ///
    /// # Panics
    /// When `rows` is not a whole number of rows.
    pub fn has_nan(&self, rows: &[u8]) -> bool {
        self.nan_rows(rows).next().is_some()
    }

    /// The packed rows that have a NaN among their values or scales, ascending.
    ///
    /// # Panics
    /// When `rows` is not a whole number of rows.
    pub fn nan_rows<'a>(&'a self, rows: &'a [u8]) -> NanRows<'a> {
        NanRows::packed(self.rows(), self.value_bytes(), self.row_bytes(), rows)
    }

    /// The rows with a NaN among their values, of `values` `[rows][value_bytes]`: for tables whose values lie apart from their scales, as
    /// in a checkpoint. Clean bytes are passed at memory speed.
    ///
    /// # Panics
    /// When `values` is not a whole number of rows.
    pub fn nan_value_rows<'a>(&'a self, values: &'a [u8]) -> NanRows<'a> {
        NanRows::values(self.rows(), self.value_bytes(), values)
    }

    /// The rows with a NaN among their scales, of `scales` `[rows][scale_bytes]`; none for formats without scales in their rows.
    ///
    /// # Panics
    /// When `scales` is not a whole number of rows.
    pub fn nan_scale_rows<'a>(&'a self, scales: &'a [u8]) -> NanRows<'a> {
        NanRows::scales(self.rows(), self.scale_bytes(), scales)
    }
}

impl PartialEq for TableFormat {
    fn eq(&self, other: &Self) -> bool {
        let key = |format: &Self| (format.kind, format.width, format.global_scale.map(f32::to_bits));
        key(self) == key(other)
    }
}

impl Eq for TableFormat {}

impl fmt::Debug for TableFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, width, global_scale, global: _ } = self;
        f.debug_struct("TableFormat")
            .field("kind", kind)
            .field("width", width)
            .field("global_scale", global_scale)
            .finish()
    }
}
