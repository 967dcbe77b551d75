//! The shape of ids and of the rows that a lookup writes, and the bytes that each needs.

use engram_ple::{FormatKind, OutputType, TableFormat, mx};

use crate::error::Error;

/// The integer type of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdType {
    /// 32 bits, as the hash kernels write.
    I32,
    /// 64 bits, as many frameworks index.
    I64,
}

impl IdType {
    /// Bytes of one id.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

/// The shape of an id array `[tokens][layers][columns]`, and which of its layers a call is about.
///
/// The id of (token, layer, column) lies at `token * token_stride + (first_layer + layer) * columns + column`, counted in ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdShape {
    /// Type of the ids.
    pub id_type: IdType,
    /// Tokens, 0 allowed.
    pub tokens: usize,
    /// From a token's ids to the next token's, in ids; at least the layers' columns together.
    pub token_stride: usize,
    /// First layer of the view.
    pub first_layer: usize,
    /// Layers of the view.
    pub layers: usize,
    /// Columns a layer.
    pub columns: usize,
}

/// Why ids cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdsError {
    /// The array is smaller than its shape says.
    #[error("ids of this shape need {needed} bytes, but there are {found}: {shape:?}")]
    TooShort {
        /// The shape.
        shape: IdShape,
        /// Bytes there.
        found: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The view has no layer or no column, or its layers do not fit the token stride.
    #[error("{columns} columns of layers {first_layer}..{end} do not fit a token stride of {stride} ids", end = .first_layer + .layers, stride = .token_stride, columns = .columns)]
    Stride {
        /// First layer.
        first_layer: usize,
        /// Layers.
        layers: usize,
        /// Columns.
        columns: usize,
        /// The stride.
        token_stride: usize,
    },
    /// The address is not a multiple of the id's size.
    #[error("ids at {address:#x} are not aligned to {bytes} bytes")]
    Misaligned {
        /// The address.
        address: u64,
        /// Bytes of an id.
        bytes: usize,
    },
    /// The view asks for layers or columns that the tables do not have.
    #[error("ids of layers {first_layer}..{end} with {columns} columns do not fit {table_layers} tables of {table_columns} columns", end = .first_layer + .layers)]
    Tables {
        /// First layer of the view.
        first_layer: usize,
        /// Layers of the view.
        layers: usize,
        /// Columns of the view.
        columns: usize,
        /// Tables that the lookup has, one a layer.
        table_layers: usize,
        /// Columns a table serves.
        table_columns: usize,
    },
    /// Ids of another type than the buffers were made for.
    #[error("ids of type {found:?}, but the buffers were made for {expected:?}")]
    Type {
        /// Type of the ids.
        found: IdType,
        /// Type that was announced.
        expected: IdType,
    },
    /// More rows than one call can take.
    #[error("{rows} rows in one call, but at most 2^31 fit: split the tokens")]
    TooMany {
        /// Rows asked for.
        rows: u64,
    },
}

impl IdShape {
    /// A whole array `[tokens][layers][columns]` without gaps.
    #[must_use]
    pub const fn dense(id_type: IdType, tokens: usize, layers: usize, columns: usize) -> Self {
        Self { id_type, tokens, token_stride: layers * columns, first_layer: 0, layers, columns }
    }

    /// Ids that a view reads from a token's first on.
    pub(crate) fn first(&self) -> usize {
        self.first_layer * self.columns
    }

    /// Ids of one token that the view covers.
    pub(crate) fn across(&self) -> usize {
        self.layers * self.columns
    }

    /// Refuses shapes that cannot be, or whose ids do not fit `bytes` bytes at `address`.
    pub(crate) fn check(&self, address: u64, bytes: u64) -> Result<(), IdsError> {
        let Self { id_type, tokens, token_stride, first_layer, layers, columns } = *self;
        let end = first_layer.checked_add(layers).and_then(|layers| layers.checked_mul(columns));
        let Some(end) = end.filter(|&end| layers > 0 && columns > 0 && (tokens <= 1 || end <= token_stride)) else {
            return Err(IdsError::Stride { first_layer, layers, columns, token_stride });
        };
        if !address.is_multiple_of(id_type.bytes() as u64) {
            return Err(IdsError::Misaligned { address, bytes: id_type.bytes() });
        }
        if tokens == 0 {
            return Ok(());
        }
        let rows = (tokens as u64).saturating_mul(self.across() as u64);
        if rows > 1 << 31 {
            return Err(IdsError::TooMany { rows });
        }
        let ids = (tokens as u64 - 1).saturating_mul(token_stride as u64).saturating_add(end as u64);
        let needed = ids.saturating_mul(id_type.bytes() as u64);
        if needed > bytes {
            return Err(IdsError::TooShort { shape: *self, found: bytes, needed });
        }
        Ok(())
    }
}

/// The forms in which rows can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RowForm {
    /// `u8 [token][layer][column][row_bytes]`: stored bytes, values then scales.
    Packed,
    /// `[layer][capacity][columns * width]` of this type: E4M3 rows decoded to bf16 or f16, or unquantised rows in their own type.
    Dense(OutputType),
    /// Values `u8 [layer][capacity][columns * width]` and E8M0 scales in tiles of 128 tokens by 4 groups ([`engram_ple::mx`]).
    Mx,
}

impl RowForm {
    fn name(self) -> &'static str {
        match self {
            Self::Packed => "packed",
            Self::Dense(OutputType::Bf16) => "bf16",
            Self::Dense(OutputType::F16) => "f16",
            Self::Dense(_) => "f32",
            Self::Mx => "MX",
        }
    }

    /// Refuses forms that tables of this format cannot give on the GPU.
    pub(crate) fn check(self, format: &TableFormat) -> Result<(), Error> {
        let refuse = |why| Err(Error::Output { format: format.kind(), output: self.name(), why });
        match (self, format.kind().unquantized()) {
            (Self::Packed, _) => Ok(()),
            (Self::Dense(wanted), Some(stored)) if wanted == stored => Ok(()),
            (Self::Dense(_), Some(_)) => {
                refuse("unquantised rows pass unconverted, in the type that they are stored in")
            }
            (Self::Dense(OutputType::Bf16 | OutputType::F16), None) => Ok(()),
            (Self::Dense(_), None) => refuse("quantised rows are decoded to bf16 or f16"),
            (Self::Mx, _) if format.kind() == FormatKind::E4m3E8m0x32 => Ok(()),
            (Self::Mx, _) => refuse("MX rows need E4M3 values with one E8M0 scale per 32"),
        }
    }

    /// Bytes that the rows of `tokens` tokens (as many as the memory has room for) take, and bytes of their MX scales.
    pub(crate) fn bytes(self, format: &TableFormat, layers: usize, columns: usize, tokens: usize) -> (u64, u64) {
        let product =
            |element: usize| [layers, tokens, columns, element].iter().fold(1u64, |n, &x| n.saturating_mul(x as u64));
        match self {
            Self::Packed => (product(format.row_bytes()), 0),
            Self::Dense(output) => (product(format.width().saturating_mul(output.bytes())), 0),
            Self::Mx => (product(format.value_bytes()), layers as u64 * self.scale_stride(format, columns, tokens)),
        }
    }

    /// Bytes from a layer's MX scales to the next layer's.
    pub(crate) fn scale_stride(self, format: &TableFormat, columns: usize, tokens: usize) -> u64 {
        match self {
            Self::Mx => mx::layer_bytes(tokens, columns * format.width()) as u64,
            Self::Packed | Self::Dense(_) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(tokens: usize, token_stride: usize, first_layer: usize, layers: usize, columns: usize) -> IdShape {
        IdShape { id_type: IdType::I32, tokens, token_stride, first_layer, layers, columns }
    }

    #[test]
    fn the_last_id_of_a_strided_view_decides_the_bytes() {
        // Tokens 100 ids apart, layers 1..3 of 24 columns: the last id is the 100 + 72nd.
        let view = shape(2, 100, 1, 2, 24);
        assert_eq!(view.check(0, 4 * 172), Ok(()));
        assert!(matches!(view.check(0, 4 * 172 - 1), Err(IdsError::TooShort { needed: 688, .. })));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        assert!(matches!(shape(2, 47, 0, 2, 24).check(0, 1 << 20), Err(IdsError::Stride { .. })));
        assert!(matches!(shape(1, 48, 0, 0, 24).check(0, 1 << 20), Err(IdsError::Stride { .. })));
        assert!(matches!(shape(1, 48, usize::MAX, 1, 24).check(0, 1 << 20), Err(IdsError::Stride { .. })));
        assert!(matches!(shape(1, 48, 0, 2, 24).check(2, 1 << 20), Err(IdsError::Misaligned { .. })));
        assert!(matches!(shape(1 << 27, 48, 0, 2, 24).check(0, u64::MAX), Err(IdsError::TooMany { .. })));
        assert_eq!(shape(0, 0, 0, 2, 24).check(0, 0), Ok(()));
    }

    #[test]
    fn forms_that_a_format_lacks_are_refused_by_name() {
        let bf16 = TableFormat::new(FormatKind::Bf16, 160, None).unwrap();
        let global = TableFormat::new(FormatKind::E4m3Global, 160, Some(0.5)).unwrap();
        let blocks = TableFormat::new(FormatKind::E4m3E8m0x32, 256, None).unwrap();
        for (format, form, text) in [
            (&bf16, RowForm::Dense(OutputType::F16), "a bf16 table cannot give f16 rows"),
            (&bf16, RowForm::Mx, "a bf16 table cannot give MX rows"),
            (&global, RowForm::Mx, "a e4m3-global table cannot give MX rows"),
            (&global, RowForm::Dense(OutputType::F32), "a e4m3-global table cannot give f32 rows"),
        ] {
            assert!(form.check(format).unwrap_err().to_string().starts_with(text));
        }
        for form in [RowForm::Packed, RowForm::Dense(OutputType::Bf16), RowForm::Dense(OutputType::F16), RowForm::Mx] {
            form.check(&blocks).unwrap();
        }
    }

    #[test]
    fn mx_scales_are_padded_to_tiles() {
        let blocks = TableFormat::new(FormatKind::E4m3E8m0x32, 256, None).unwrap();
        // 24 columns of 8 groups: 48 tiles across; 129 tokens: 2 tiles down.
        assert_eq!(RowForm::Mx.bytes(&blocks, 2, 24, 129), (2 * 129 * 24 * 256, 2 * 2 * 48 * 512));
        assert_eq!(RowForm::Packed.bytes(&blocks, 2, 24, 129), (129 * 2 * 24 * 264, 0));
    }
}
