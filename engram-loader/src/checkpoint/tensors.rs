//! All tensors of a checkpoint by name, after index and headers have been reconciled.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::checkpoint::folder::CheckpointFile;
use crate::checkpoint::index::{Index, Indexed};
use crate::checkpoint::names::TableName;
use crate::headers::header::{Header, TensorInfo};
use crate::prove::report::{Fault, FaultCode, Severity};

/// Every tensor that the checkpoint has or claims to have.
#[derive(Debug, Default)]
pub(crate) struct Tensors<'a> {
    pub(crate) by_name: BTreeMap<&'a str, Tensor<'a>>,
    /// Whether a name that is not here is nowhere. Otherwise it may be in a file that could not be read.
    pub(crate) complete: bool,
}

/// What is known of one tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Tensor<'a> {
    /// Its bytes lie where its header says.
    Sound {
        /// Position among the checkpoint's files.
        file: usize,
        info: &'a TensorInfo,
    },
    /// It, or the file it should be in, has a fault already, so that nothing more is said about it.
    Faulty,
}

impl<'a> Tensors<'a> {
    /// Brings headers and index together. `all_parsed` tells that every file has a header, `needed` which names tables are made of.
    pub(crate) fn reconcile(
        files: &'a [CheckpointFile],
        index: &'a Indexed,
        all_parsed: bool,
        needed: impl Fn(&str) -> bool,
        faults: &mut Vec<Fault>,
    ) -> Self {
        let parsed =
            || files.iter().enumerate().filter_map(|(file, entry)| Some((file, entry, entry.header.as_ref()?)));
        let complete = match index {
            Indexed::Absent => all_parsed,
            Indexed::Read(_) => true,
            Indexed::Faulty => false,
        };
        let mut tensors = Self { by_name: BTreeMap::new(), complete };
        for (file, entry, header) in parsed() {
            for info in header.tensors() {
                let tensor = if info.is_sound() { Tensor::Sound { file, info } } else { Tensor::Faulty };
                match tensors.by_name.entry(info.name()) {
                    Entry::Vacant(vacant) => {
                        vacant.insert(tensor);
                    }
                    // Without the index that was meant to choose, two copies are no fault of their own.
                    Entry::Occupied(mut occupied) => {
                        occupied.insert(Tensor::Faulty);
                        if !matches!(index, Indexed::Faulty) {
                            let first = parsed().find(|(_, _, header)| header.tensor(info.name()).is_some());
                            let first = first.map_or("", |(_, entry, _)| &entry.name);
                            let message = format!("expected each tensor in one file, found it in {first} too");
                            let fault = Fault::new(FaultCode::DuplicateTensor, message);
                            faults.push(fault.file(&entry.name).tensor(info.name()));
                        }
                    }
                }
            }
        }
        if let Indexed::Read(index) = index {
            tensors.follow(index, files, &needed, faults);
        }
        for (file, entry, header) in parsed() {
            tensors.judge_dtypes(file, &entry.name, header, &needed, faults);
        }
        tensors
    }

    /// Checks both ways: what the index places must be there, and what tables need must be placed.
    fn follow(
        &mut self,
        index: &'a Index,
        files: &'a [CheckpointFile],
        needed: &impl Fn(&str) -> bool,
        faults: &mut Vec<Fault>,
    ) {
        for (name, &place) in &index.tensors {
            let named = &index.files[place];
            let file = files.binary_search_by(|file| file.name.as_str().cmp(named)).ok().map(|place| &files[place]);
            let Some(header) = file.and_then(|file| file.header.as_ref()) else {
                self.by_name.insert(name, Tensor::Faulty);
                continue;
            };
            if header.tensor(name).is_none() {
                let found = match self.by_name.insert(name, Tensor::Faulty) {
                    Some(Tensor::Sound { file, .. }) => format!("it is in {}", files[file].name),
                    Some(Tensor::Faulty) => "another file has it".to_owned(),
                    None => "no file has it".to_owned(),
                };
                let message = format!("expected in {named} by the index, but that file lacks it: {found}");
                faults.push(Fault::new(FaultCode::IndexStale, message).file(named).tensor(name));
            }
        }
        for (name, tensor) in &mut self.by_name {
            if let Tensor::Sound { file, .. } = *tensor
                && !index.tensors.contains_key(*name)
                && needed(name)
            {
                *tensor = Tensor::Faulty;
                let message = "expected in the index like every tensor of a table, found only in the file";
                faults.push(Fault::new(FaultCode::UnindexedTensor, message).file(&files[file].name).tensor(name));
            }
        }
    }

    fn judge_dtypes(
        &mut self,
        file: usize,
        file_name: &str,
        header: &'a Header,
        needed: &impl Fn(&str) -> bool,
        faults: &mut Vec<Fault>,
    ) {
        for info in header.tensors().iter().filter(|info| info.dtype().bits().is_none()) {
            let Some(tensor) = self.by_name.get_mut(info.name()) else { continue };
            if !matches!(tensor, Tensor::Sound { file: here, .. } if *here == file) {
                continue;
            }
            *tensor = Tensor::Faulty;
            let severity = if needed(info.name()) { Severity::Error } else { Severity::Warning };
            let message =
                format!("expected a dtype that the safetensors format defines, found {:?}", info.dtype().to_string());
            let fault = Fault::new(FaultCode::UnknownDtype, message).severity(severity);
            faults.push(fault.file(file_name).tensor(info.name()));
        }
    }

    /// The tensors of tables, whatever table, in the order of their names.
    pub(crate) fn of_tables(&self) -> impl Iterator<Item = (&'a str, TableName<'a>, Tensor<'a>)> {
        self.by_name.iter().filter_map(|(&name, &tensor)| Some((name, TableName::parse(name)?, tensor)))
    }
}
