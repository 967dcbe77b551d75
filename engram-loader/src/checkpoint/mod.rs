//! A checkpoint's folder, read and judged as a whole.

pub(crate) mod catalog;
pub(crate) mod folder;
pub(crate) mod index;
pub(crate) mod names;
pub(crate) mod tensors;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use engram_core::{ConfigError, Family, Layout, ModelConfig, TokenMap};

use crate::checkpoint::catalog::{Catalog, CatalogTable};
use crate::checkpoint::folder::{CheckpointFile, Listing};
use crate::checkpoint::index::{Index, Indexed};
use crate::checkpoint::names::{Leaf, TableName};
use crate::checkpoint::tensors::Tensors;
use crate::error::Error;
use crate::headers::header::{self, Header};
use crate::headers::regular::{self, Opened, RegularFile};
use crate::options::Options;
use crate::pool::Pool;
use crate::prove::announced::Announced;
use crate::prove::deep;
use crate::prove::report::{Fault, FaultCode, FileSummary, Report, Severity, TableSummary};
use crate::prove::table::Judge;
use crate::prove::vocabulary;

/// A checkpoint as far as it can be understood, and the [`Report`] on what is wrong with it.
///
/// Opening reads config, index, headers and a few small tensors, never a table; memory grows with the headers.
#[derive(Debug)]
pub struct Checkpoint {
    config: Option<ModelConfig>,
    layout: Option<Layout>,
    token_map: Option<TokenMap>,
    files: Vec<CheckpointFile>,
    catalog: Catalog,
    /// Files that hold no tensor of a table by the index, whatever is wrong with them.
    without_tables: BTreeSet<String>,
    report: Report,
}

/// Judges a checkpoint's folder.
///
/// # Errors
/// The folder or a file in it cannot be read, or [`Options::allow`] names a code that cannot be allowed. What is wrong with the
/// checkpoint itself is no error of this function but in the report.
pub fn validate(folder: &Path, options: &Options<'_>) -> Result<Report, Error> {
    Ok(Checkpoint::open(folder, options)?.into_report())
}

impl Checkpoint {
    /// Opens and judges a checkpoint's folder.
    ///
    /// # Errors
    /// As [`validate`].
    pub fn open(folder: &Path, options: &Options<'_>) -> Result<Self, Error> {
        options.check()?;
        let metadata = fs::metadata(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
        if !metadata.is_dir() {
            return Err(Error::NotAFolder { path: folder.to_owned() });
        }
        let listing = Listing::read(folder)?;
        let mut faults = Vec::new();
        let (family, config, layout) = match read_config(folder)? {
            Ok((config, layout)) => (Some(config.family()), Some(config), Some(layout)),
            Err((fault, family)) => {
                faults.push(fault);
                (family, None, None)
            }
        };
        let index = read_index(folder, &listing, options, &mut faults)?;
        let (files, all_parsed) = read_headers(folder, &listing, &index, options, &mut faults)?;

        let needed = |name: &str| {
            let Some(name) = TableName::parse(name) else { return false };
            let known = matches!(name.leaf, Leaf::Whole | Leaf::Shard { .. } | Leaf::Scale | Leaf::Constant(_));
            let ours = layout.as_ref().is_none_or(|layout: &Layout| {
                layout.family() == name.family && layout.layers().iter().any(|layer| Some(layer.layer()) == name.layer)
            });
            known && ours
        };
        let tensors = Tensors::reconcile(&files, &index, all_parsed, needed, &mut faults);
        let (mut tables, mut used) = (Vec::new(), layout.clone());
        if let (Some(config), Some(layout)) = (&config, &layout) {
            let allow_stored = options.allow.contains(&FaultCode::ConstantsMismatch);
            let announced = Announced::read(folder, config)?;
            let judge = Judge {
                config,
                layout,
                files: &files,
                listing: &listing,
                tensors: &tensors,
                announced: &announced,
                allow_stored,
            };
            let (sound, stored) = judge.judge(&mut faults)?;
            (tables, used) = (sound, Some(stored));
        }
        drop(tensors);
        let without_tables = match &index {
            Indexed::Read(index) => index.files_without(|tensor| TableName::parse(tensor).is_some()),
            Indexed::Absent | Indexed::Faulty => BTreeSet::new(),
        };
        let mut not_checked = Vec::new();
        if config.is_none() {
            not_checked.push("tables: the config does not tell what they should be".to_owned());
        }
        let token_map = match &config {
            Some(config) => vocabulary::check(folder, config, options, &mut faults, &mut not_checked)?,
            None => None,
        };
        let mut summaries: Vec<_> = files.iter().map(CheckpointFile::summary).collect();
        if options.deep || options.sha256 {
            deep::read(&files, &tables, options, &mut summaries, &mut faults)?;
            if let Some(layout) = &layout {
                let unread = layout.layers().iter().map(|l| l.layer()).filter(|l| tables.iter().all(|t| t.layer != *l));
                not_checked.extend(unread.map(|layer| format!("rows of layer {layer}: its table has a fault")));
            }
        } else {
            not_checked.push("rows: NaN is looked for and files are hashed by a deep validation only".to_owned());
        }

        for fault in &mut faults {
            if options.allow.contains(&fault.code) {
                fault.severity = Severity::Warning;
            }
        }
        let report = Report {
            ok: faults.iter().all(|fault| fault.severity < Severity::Error),
            family,
            tables: tables.iter().map(CatalogTable::summary).collect(),
            files: summaries,
            not_checked,
            faults,
        };
        Ok(Self { config, layout: used, token_map, files, catalog: Catalog::new(tables), without_tables, report })
    }

    /// The config; `None` where it has a fault.
    #[must_use]
    pub fn config(&self) -> Option<&ModelConfig> {
        self.config.as_ref()
    }

    /// The constants that ids are computed by: those that the config gives, or stored ones that were allowed to differ.
    /// `None` where the config has a fault.
    #[must_use]
    pub fn layout(&self) -> Option<&Layout> {
        self.layout.as_ref()
    }

    /// The compressed vocabulary, where a tokenizer was read and fits the config, or is allowed not to.
    #[must_use]
    pub fn token_map(&self) -> Option<&TokenMap> {
        self.token_map.as_ref()
    }

    /// The safetensors files, by name: those that the index names, or all in the folder where there is no index.
    #[must_use]
    pub fn files(&self) -> &[CheckpointFile] {
        &self.files
    }

    /// The tables without a fault.
    #[must_use]
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Everything that was found.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Everything that was found.
    #[must_use]
    pub fn into_report(self) -> Report {
        self.report
    }

    /// The errors that concern tables: what a lookup must refuse. Faults of tensors that no table has are left out.
    pub fn refusals(&self) -> impl Iterator<Item = &Fault> {
        self.report.faults.iter().filter(|fault| fault.severity == Severity::Error && self.concerns_tables(fault))
    }

    fn concerns_tables(&self, fault: &Fault) -> bool {
        // These name a tensor only to show where in the file they are.
        let of_file = matches!(fault.code, FaultCode::IndexJson | FaultCode::DuplicateKey | FaultCode::BadOffsets);
        if let (Some(tensor), false) = (&fault.tensor, of_file) {
            return TableName::parse(tensor).is_some();
        }
        let Some(name) = &fault.file else { return true };
        match self.files.iter().find(|file| file.name() == name).and_then(CheckpointFile::header) {
            Some(header) => header.tensors().iter().any(|tensor| TableName::parse(tensor.name()).is_some()),
            // A file without a header may hold anything but what the index places elsewhere.
            None => !self.without_tables.contains(name),
        }
    }
}

type Configured = (ModelConfig, Layout);

/// No config comes near this many bytes.
pub(crate) const CONFIG_CAP: u64 = 16 << 20;

/// Reads the config; with a fault, the family as far as the config tells it.
fn read_config(folder: &Path) -> Result<Result<Configured, (Fault, Option<Family>)>, Error> {
    const NAME: &str = "config.json";
    let path = folder.join(NAME);
    let io = |source| Error::Io { path: path.clone(), source };
    let text = match open_text(&path, CONFIG_CAP).map_err(io)? {
        Ok(file) => file.read_all().map_err(io)?,
        Err(found) => {
            let message = format!("expected the model's config, found {found}");
            return Ok(Err((Fault::new(FaultCode::ConfigMissing, message).file(NAME), None)));
        }
    };
    let config = ModelConfig::from_json(&text).and_then(|config| Ok((Layout::from_config(&config)?, config)));
    Ok(match config {
        Ok((layout, config)) => Ok((config, layout)),
        Err(error) => {
            let code = match error {
                ConfigError::NotJson { .. } => FaultCode::ConfigMissing,
                ConfigError::FamilyUnknown { .. } => FaultCode::FamilyUnknown,
                _ => FaultCode::ConfigField,
            };
            Err((Fault::new(code, error.to_string()).file(NAME), ModelConfig::family_of(&text)))
        }
    })
}

/// What there is instead of a text.
#[derive(Debug)]
pub(crate) enum Unreadable {
    Absent,
    Special(&'static str),
    TooLong { bytes: u64, cap: u64 },
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("no such file"),
            Self::Special(kind) => f.write_str(kind),
            Self::TooLong { bytes, cap } => write!(f, "{bytes} bytes, of which at most {cap} are read"),
        }
    }
}

/// Opens a file that should hold at most `cap` bytes of text, or tells what is there instead.
pub(crate) fn open_text(path: &Path, cap: u64) -> io::Result<Result<RegularFile, Unreadable>> {
    Ok(match regular::open(path)? {
        Opened::Absent => Err(Unreadable::Absent),
        Opened::Special(kind) => Err(Unreadable::Special(kind)),
        Opened::Regular(file) if file.len > cap => Err(Unreadable::TooLong { bytes: file.len, cap }),
        Opened::Regular(file) => Ok(file),
    })
}

/// Reads the index under its usual name, else the only one there is.
fn read_index(
    folder: &Path,
    listing: &Listing,
    options: &Options<'_>,
    faults: &mut Vec<Fault>,
) -> Result<Indexed, Error> {
    let name = match &listing.indexes[..] {
        [] => return Ok(Indexed::Absent),
        names if names.iter().any(|name| name == index::USUAL_NAME) => index::USUAL_NAME,
        [name] => name,
        [first, second, ..] => {
            let message = format!("expected one index, found {second} too and no {}", index::USUAL_NAME);
            faults.push(Fault::new(FaultCode::IndexJson, message).file(first));
            return Ok(Indexed::Faulty);
        }
    };
    let path = folder.join(name);
    let io = |source| Error::Io { path: path.clone(), source };
    let parsed = match open_text(&path, options.header_cap).map_err(io)? {
        Ok(file) => Index::parse(file.reader(0..file.len)).map_err(io)?,
        Err(found) => Err(Fault::new(FaultCode::IndexJson, format!("expected an index, found {found}"))),
    };
    Ok(match parsed {
        Ok(index) => Indexed::Read(index),
        Err(fault) => {
            faults.push(fault.file(name));
            Indexed::Faulty
        }
    })
}

/// Reads the headers of all files that make up the checkpoint; the flag tells whether each of them has one.
fn read_headers(
    folder: &Path,
    listing: &Listing,
    index: &Indexed,
    options: &Options<'_>,
    faults: &mut Vec<Fault>,
) -> Result<(Vec<CheckpointFile>, bool), Error> {
    let mut named: Vec<(String, PathBuf)> = match index {
        Indexed::Read(index) => index.files.iter().map(|name| (name.clone(), folder.join(name))).collect(),
        Indexed::Absent | Indexed::Faulty => listing.safetensors.clone(),
    };
    named.sort();
    if matches!(index, Indexed::Read(_)) {
        let is_named = |name: &String| named.binary_search_by(|(known, _)| known.cmp(name)).is_ok();
        for (name, _) in listing.safetensors.iter().filter(|(name, _)| !is_named(name)) {
            let message =
                "expected in the index like every file of the checkpoint, found only in the folder; it was not read";
            faults.push(Fault::new(FaultCode::StrayFile, message).file(name));
        }
    }

    let scans: Vec<Mutex<Option<Scan>>> = named.iter().map(|_| Mutex::new(None)).collect();
    Pool::new(options.threads.min(named.len().max(1))).run(named.len(), &|_, place| {
        let scan = scan(&named[place].1, options.header_cap);
        *scans[place].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(scan);
    });

    let mut files = Vec::with_capacity(named.len());
    let mut all_parsed = true;
    for ((name, path), scan) in named.into_iter().zip(scans) {
        let Some(scan) = scan.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) else { continue };
        match scan.map_err(|source| Error::Io { path: path.clone(), source })? {
            Scanned::Absent => {
                all_parsed = false;
                let message = format!("expected this file, found nothing there{}", listing.interrupted(&name));
                faults.push(Fault::new(FaultCode::MissingFile, message).file(&name));
            }
            Scanned::Special(fault) => {
                all_parsed = false;
                faults.push(fault.file(&name));
            }
            Scanned::File { bytes, header, faults: found } => {
                all_parsed &= header.is_some();
                faults.extend(found.into_iter().map(|fault| fault.file(&name)));
                files.push(CheckpointFile { name, path, bytes, header });
            }
        }
    }
    Ok((files, all_parsed))
}

/// What came of reading one header.
enum Scanned {
    Absent,
    Special(Fault),
    File { bytes: u64, header: Option<Header>, faults: Vec<Fault> },
}

type Scan = io::Result<Scanned>;

fn scan(path: &Path, cap: u64) -> Scan {
    let file = match regular::open(path)? {
        Opened::Absent => return Ok(Scanned::Absent),
        Opened::Special(kind) => return Ok(Scanned::Special(header::not_safetensors(kind))),
        Opened::Regular(file) => file,
    };
    let (header, faults) = match Header::scan(&file, cap)? {
        Ok((header, faults)) => (Some(header), faults),
        Err(fault) => (None, vec![fault]),
    };
    Ok(Scanned::File { bytes: file.len, header, faults })
}

impl CheckpointFile {
    fn summary(&self) -> FileSummary {
        FileSummary { file: self.name().to_owned(), bytes: self.bytes(), xxh3: None, sha256: None }
    }
}

impl CatalogTable {
    fn summary(&self) -> TableSummary {
        TableSummary {
            layer: self.layer(),
            rows: self.rows(),
            row_width: self.format().width() as u64,
            format: self.format().kind(),
            bytes: self.extents().bytes(),
            shards: self.extents().shards() as u64,
        }
    }
}
