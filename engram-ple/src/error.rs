//! The one error type of this crate; tables report theirs as [`SourceError`](crate::SourceError).

use crate::FormatKind;

/// Why a format could not be made or used.
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
}
