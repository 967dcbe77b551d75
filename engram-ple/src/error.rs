//! The one error type of this crate; tables report theirs as [`SourceError`](crate::SourceError).

use crate::FormatKind;

/// Why a format could not be made or used, a quantization config not be read, or no format follow from it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No format has this name.
    #[error("no table format is named `{name}`; there are bf16, f16, f32, e4m3-global and e4m3-e8m0-32")]
    UnknownFormat {
        /// The name that was asked for.
        name: String,
    },
    /// No output type has this name.
    #[error("rows are not decoded to `{name}`; there are bf16, f16 and f32")]
    UnknownOutputType {
        /// The name that was asked for.
        name: String,
    },
    /// A row of this width cannot be stored in the format.
    #[error(
        "rows of {width} elements cannot be {kind}: a width is 1 to {}, and a multiple of {multiple} here",
        crate::MAX_WIDTH
    )]
    Width {
        /// The format.
        kind: FormatKind,
        /// Elements a row.
        width: usize,
        /// What the width has to be a multiple of.
        multiple: usize,
    },
    /// The format needs the table's one scale, and none was given.
    #[error("{kind} needs the table's global scale")]
    GlobalScaleMissing {
        /// The format.
        kind: FormatKind,
    },
    /// A global scale was given for a format that has none.
    #[error("{kind} has no global scale")]
    GlobalScaleUnexpected {
        /// The format.
        kind: FormatKind,
    },
    /// MX output was asked of a format that does not carry one E8M0 scale per 32 elements.
    #[error("{kind} rows carry no E8M0 scale per 32 elements, so they have no MX form")]
    NoMxScales {
        /// The format.
        kind: FormatKind,
    },
    /// The packed rows of a table are not a whole number of rows.
    #[error("{bytes} bytes are not a whole number of rows of {row_bytes} bytes")]
    PartialRow {
        /// Bytes given.
        bytes: usize,
        /// Bytes a row.
        row_bytes: usize,
    },
    /// The quantization config is not JSON.
    #[error("the quantization config is not JSON: {message}")]
    NotJson {
        /// What the parser said, with line and column.
        message: String,
    },
    /// A key stands twice in one object of the quantization config.
    #[error("the quantization config has the key `{key}` twice")]
    DuplicateKey {
        /// The key, as written.
        key: String,
    },
    /// A field of the quantization config is missing or of the wrong type.
    #[error("quantization config: `{field}` is {found}, not {expected}")]
    Field {
        /// Path of the field, with dots.
        field: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// A pattern of the quantization config is not a regular expression, or one that is too large.
    #[error("quantization config: the pattern `{pattern}` cannot be used: {message}")]
    Pattern {
        /// The pattern, as written.
        pattern: String,
        /// What the regex engine said.
        message: String,
    },
    /// `ple_embedding_dtype` names a packed format that this crate does not read.
    #[error("`ple_embedding_dtype` is `{dtype}`, a table format that is not supported")]
    EmbeddingDtype {
        /// The dtype, as written.
        dtype: String,
    },
    /// The checkpoint's quantization method says nothing about how this table would be stored.
    #[error("no table format of `{prefix}` follows from the quantization method `{method}`")]
    UnsupportedMethod {
        /// The method, as the config names it.
        method: String,
        /// Module name of the table.
        prefix: String,
    },
    /// An FP8 config that quantises while loading; a table has to be stored in FP8 already.
    #[error("`{prefix}` would be quantised to FP8 while loading; only serialised FP8 tables can be read")]
    NotSerialized {
        /// Module name of the table.
        prefix: String,
    },
    /// Of a fused module some parts are ignored and some are not.
    #[error("`{prefix}` is fused from parts of which `{ignored}` is ignored and `{quantized}` is not")]
    PartlyIgnored {
        /// Module name of the fused module.
        prefix: String,
        /// A part that is ignored.
        ignored: String,
        /// A part that is not.
        quantized: String,
    },
}
