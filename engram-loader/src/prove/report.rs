use std::fmt;

use engram_core::Family;
use engram_ple::FormatKind;
use serde::{Serialize, Serializer};

/// What [`validate`](crate::validate) found, complete: every fault, not only the first.
///
/// Serialises to the JSON of `engram validate --format json`. The order of everything in it is a function of the checkpoint alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// No fault of severity [`Severity::Error`] was found.
    pub ok: bool,
    /// The model family; `None` where the config does not tell.
    pub family: Option<Family>,
    /// The tables whose tensors are all there and agree with the config, in the order of the config's layout.
    pub tables: Vec<TableSummary>,
    /// The safetensors files that were judged, by name.
    pub files: Vec<FileSummary>,
    /// What was not looked at, and why, one sentence each.
    pub not_checked: Vec<String>,
    /// Every fault: of the config and the index first, then file by file, then table by table.
    pub faults: Vec<Fault>,
}

/// One table of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TableSummary {
    /// 0-based backbone layer that the table feeds.
    pub layer: u32,
    /// Rows on disk.
    pub rows: u64,
    /// Elements a row.
    pub row_width: u64,
    /// How rows are stored.
    #[serde(serialize_with = "displayed")]
    pub format: FormatKind,
    /// Bytes of all rows, values and row scales.
    pub bytes: u64,
    /// Tensors that the values are cut into; 1 for a whole table.
    pub shards: u64,
}

/// One file of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FileSummary {
    /// Name inside the checkpoint's folder.
    pub file: String,
    /// Length in bytes.
    pub bytes: u64,
    /// XXH3-128 of the whole file as lower-case hex, where every byte was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xxh3: Option<String>,
    /// SHA-256 of the whole file as lower-case hex, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// One thing wrong with a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Fault {
    /// The kind of fault.
    pub code: FaultCode,
    /// Whether the checkpoint must not be used.
    pub severity: Severity,
    /// The file at fault, by its name inside the checkpoint's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The tensor at fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// What is wrong: what was expected and what was found.
    pub message: String,
}

impl Fault {
    /// A fault of the severity that its code has by itself.
    pub(crate) fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self { code, severity: code.severity(), file: None, tensor: None, message: message.into() }
    }

    pub(crate) fn file(mut self, file: &str) -> Self {
        self.file = Some(file.to_owned());
        self
    }

    pub(crate) fn tensor(mut self, tensor: &str) -> Self {
        self.tensor = Some(tensor.to_owned());
        self
    }

    pub(crate) fn severity(mut self, severity: Severity) -> Self {
        self.severity = severity;
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]: ", self.severity, self.code)?;
        if let Some(file) = &self.file {
            write!(f, "{}: ", OneLine(file))?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, "{}: ", OneLine(tensor))?;
        }
        write!(f, "{}", OneLine(&self.message))
    }
}

/// Text that names what a file says, and so may hold anything: control characters are shown, not sent to the terminal.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .chars()
            .try_for_each(|c| if c.is_control() { write!(f, "{}", c.escape_default()) } else { write!(f, "{c}") })
    }
}

/// How much a fault matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth a look; the checkpoint is usable.
    Warning,
    /// The checkpoint must not be used.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

macro_rules! fault_codes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// The kinds of fault. `Display` and `FromStr` use the stable names of the command line and of JSON, such as `header-json`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum FaultCode {
            $($(#[$doc])* $variant,)*
        }

        impl FaultCode {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The stable name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

fault_codes! {
    /// Not a safetensors file at all: a Git LFS pointer, HTML, an archive, a pickle, a compressed or empty file, a folder, a device, a FIFO.
    NotSafetensors = "not-safetensors",
    /// The 8-byte length prefix is missing, points past the file or exceeds the cap.
    HeaderLength = "header-length",
    /// The header is not a JSON object of the right types.
    HeaderJson = "header-json",
    /// A name occurs twice in one header, index, entry or config.
    DuplicateKey = "duplicate-key",
    /// The same tensor is in two files.
    DuplicateTensor = "duplicate-tensor",
    /// Byte ranges overlap, leave a gap, end before they begin or overflow.
    BadOffsets = "bad-offsets",
    /// Shape times dtype is not the byte length, or overflows.
    SizeMismatch = "size-mismatch",
    /// The last tensor ends past the end of the file.
    Truncated = "truncated",
    /// The file goes on after the last tensor.
    TrailingBytes = "trailing-bytes",
    /// A dtype that nobody defined. An error on a tensor that a table needs, a warning elsewhere.
    UnknownDtype = "unknown-dtype",
    /// The index is not JSON, not a map of names to files, or names a path outside the folder.
    IndexJson = "index-json",
    /// The index names a file that is not there.
    MissingFile = "missing-file",
    /// The index places a tensor in a file that lacks it.
    IndexStale = "index-stale",
    /// The index omits a tensor that a table needs.
    UnindexedTensor = "unindexed-tensor",
    /// A safetensors file that the index does not name (warning).
    StrayFile = "stray-file",
    /// There is no config.json, or it is not JSON.
    ConfigMissing = "config-missing",
    /// A config field is missing, mistyped or out of bounds.
    ConfigField = "config-field",
    /// The config names neither family.
    FamilyUnknown = "family-unknown",
    /// There is no tensor of a table.
    TableMissing = "table-missing",
    /// A table exists in two layouts or under two prefixes.
    TableAmbiguous = "table-ambiguous",
    /// Shards of a table are missing.
    ShardMissing = "shard-missing",
    /// A shard beyond the last.
    ShardUnexpected = "shard-unexpected",
    /// A shard has other rows or another width, or a table another width, than config and primes give.
    ShardShape = "shard-shape",
    /// Shards of different dtypes, or of one that no format has.
    ShardDtype = "shard-dtype",
    /// A table that is one tensor has other rows than config and primes give.
    RowsMismatch = "rows-mismatch",
    /// An FP8 table without a scale.
    ScaleMissing = "scale-missing",
    /// Two candidates for the scale of one table.
    ScaleAmbiguous = "scale-ambiguous",
    /// The scale's shape fits neither the whole table nor blocks of 32.
    ScaleShape = "scale-shape",
    /// The scale's dtype cannot be a scale of its shape.
    ScaleDtype = "scale-dtype",
    /// The global scale is zero, negative, NaN, infinite or a loader's "never loaded" sentinel.
    ScaleValue = "scale-value",
    /// Stored hash constants differ from those that the config gives.
    ConstantsMismatch = "constants-mismatch",
    /// Stored hash constants that no table can have.
    ConstantsInvalid = "constants-invalid",
    /// The tokenizer's compressed vocabulary is not the config's.
    VocabMismatch = "vocab-mismatch",
    /// The tensors' format is not what the config announces (warning).
    FormatMismatch = "format-mismatch",
    /// A row holds NaN, in its values or its scales.
    RowNan = "row-nan",
    /// A tensor under a table's prefix that nothing understood. An error where its name says that it is a scale, else a warning.
    UnreadTensor = "unread-tensor",
}

impl FaultCode {
    /// Whether [`Options::allow`](crate::Options::allow) may turn the error into a warning.
    #[must_use]
    pub const fn can_be_allowed(self) -> bool {
        matches!(
            self,
            Self::ConstantsMismatch | Self::VocabMismatch | Self::ScaleValue | Self::RowNan | Self::UnreadTensor
        )
    }

    const fn severity(self) -> Severity {
        match self {
            Self::StrayFile | Self::FormatMismatch => Severity::Warning,
            _ => Severity::Error,
        }
    }
}

impl fmt::Display for FaultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for FaultCode {
    type Err = UnknownFaultCode;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.iter().copied().find(|code| code.name() == name).ok_or_else(|| UnknownFaultCode(name.to_owned()))
    }
}

impl Serialize for FaultCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A name that is no [`FaultCode`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no fault code is named {0:?}")]
pub struct UnknownFaultCode(String);

fn displayed<S: Serializer>(value: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}
