//! The strict reader of safetensors headers.
//!
//! Everything that a file says about itself is taken for a claim: lengths are compared with the file before anything is allocated by
//! them, names must be unique, and byte ranges must tile the file exactly. Memory grows with the tensors read so far, never with a
//! length that the file announces.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, BufReader};
use std::ops::Range;
use std::path::Path;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};

use crate::error::Error;
use crate::headers::dtype::Dtype;
use crate::headers::json::{Duplicate, StringMap, Unread};
use crate::headers::regular::{self, Opened, RegularFile};
use crate::prove::report::{Fault, FaultCode};

/// Bytes of the prefix that holds the header's length, little-endian.
const PREFIX_BYTES: usize = 8;

/// The name in a header that is no tensor.
const METADATA: &str = "__metadata__";

/// What a safetensors file says about its tensors, read without touching their data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    file_len: u64,
    data_start: u64,
    tensors: Vec<TensorInfo>,
}

/// One tensor of a [`Header`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    name: Box<str>,
    dtype: Dtype,
    shape: Box<[u64]>,
    /// Byte range from the file's start; as announced, so possibly nonsense while `sound` is false.
    start: u64,
    end: u64,
    sound: bool,
}

impl Header {
    /// Reads the header of a safetensors file and checks all of the file's structure.
    ///
    /// Accepts only regular files, and of headers at most `cap` bytes long (see [`Options::header_cap`](crate::Options::header_cap)).
    ///
    /// # Errors
    /// The path is not there or cannot be read, or the file has a structural fault, of which the first is given.
    pub fn read(path: &Path, cap: u64) -> Result<Self, Error> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let opened = regular::open(path).map_err(io)?;
        let file = match opened {
            Opened::Regular(file) => file,
            Opened::Special(kind) => return Err(Error::Refused(Box::new(not_safetensors(kind)))),
            Opened::Absent => return Err(io(io::ErrorKind::NotFound.into())),
        };
        match Self::scan(&file, cap).map_err(io)? {
            Ok((header, faults)) => match faults.into_iter().next() {
                None => Ok(header),
                Some(fault) => Err(Error::Refused(Box::new(fault))),
            },
            Err(fault) => Err(Error::Refused(Box::new(fault))),
        }
    }

    /// Length of the whole file in bytes.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Byte offset in the file at which tensor data begin.
    #[must_use]
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// The tensors, by name.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let place = self.tensors.binary_search_by(|tensor| (*tensor.name).cmp(name)).ok()?;
        Some(&self.tensors[place])
    }

    /// Reads and judges a header: the inner `Err` where nothing of it can be used, else the header and what is wrong with single tensors or
    /// with the file's end. Tensors that a fault names or touches are not [`sound`](TensorInfo::is_sound).
    pub(crate) fn scan(file: &RegularFile, cap: u64) -> io::Result<Result<(Self, Vec<Fault>), Fault>> {
        let fault = match Self::parse(file, cap)? {
            Ok(mut header) => {
                let faults = header.judge();
                return Ok(Ok((header, faults)));
            }
            Err(fault) => fault,
        };
        // A file of another kind fails somewhere above; saying what it is helps more than saying where.
        if matches!(fault.code, FaultCode::HeaderLength | FaultCode::HeaderJson)
            && let Some(kind) = regular::looks_like(&file.head::<512>()?)
        {
            return Ok(Err(not_safetensors(kind)));
        }
        Ok(Err(fault))
    }

    fn parse(file: &RegularFile, cap: u64) -> io::Result<Result<Self, Fault>> {
        let head = file.head::<{ PREFIX_BYTES + 1 }>()?;
        let Some((prefix, first)) = head.split_first_chunk::<PREFIX_BYTES>() else {
            let message = format!("expected a length prefix of 8 bytes, found a file of {}", file.len);
            return Ok(Err(Fault::new(FaultCode::HeaderLength, message)));
        };
        let header_len = u64::from_le_bytes(*prefix);
        let data_start = match header_len.checked_add(PREFIX_BYTES as u64) {
            Some(data_start) if data_start <= file.len => data_start,
            _ => {
                let room = file.len - PREFIX_BYTES as u64;
                let message = format!(
                    "expected a header of at most the {room} bytes that follow the prefix, found length {header_len}"
                );
                return Ok(Err(Fault::new(FaultCode::HeaderLength, message)));
            }
        };
        if header_len > cap {
            let message = format!("expected a header of at most {cap} bytes, found length {header_len}");
            return Ok(Err(Fault::new(FaultCode::HeaderLength, message)));
        }
        // Padding may follow the object, never precede it.
        if header_len == 0 || first != b"{" {
            let found = if header_len == 0 { "an empty header".to_owned() } else { format!("byte {:#04x}", first[0]) };
            let message = format!("expected a JSON object beginning with '{{', found {found}");
            return Ok(Err(Fault::new(FaultCode::HeaderJson, message)));
        }

        let duplicate = Duplicate::default();
        let reader = BufReader::with_capacity(64 << 10, file.reader(PREFIX_BYTES as u64..data_start));
        let mut json = serde_json::Deserializer::from_reader(reader);
        let parsed = HeaderSeed { duplicate: &duplicate }.deserialize(&mut json);
        let mut tensors = match parsed.and_then(|tensors| json.end().map(|()| tensors)) {
            Ok(tensors) => tensors,
            Err(error) if error.is_io() => return Err(error.into()),
            Err(error) => {
                return Ok(Err(duplicate.fault_or(FaultCode::HeaderJson, "a JSON object of tensors", &error)));
            }
        };
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            let fault =
                Fault::new(FaultCode::DuplicateKey, "expected each name once in a header, found this one twice");
            return Ok(Err(fault.tensor(&pair[0].name)));
        }
        Ok(Ok(Self { file_len: file.len, data_start, tensors }))
    }

    /// Finds all faults of structure. Nothing here depends on knowing the dtypes.
    fn judge(&mut self) -> Vec<Fault> {
        let mut faults = Vec::new();
        faults.extend(self.judge_offsets());
        // Offsets at fault make the end of the file a consequence.
        let tiled = faults.is_empty();
        let mut at_end = None;
        for (place, tensor) in self.tensors.iter_mut().enumerate() {
            if !tensor.sound {
                continue;
            }
            let found = tensor.end - tensor.start;
            let expected = tensor.byte_len_by_shape();
            if expected.is_none_or(|expected| expected != found) && tensor.dtype.bits().is_some() {
                tensor.sound = false;
                let expected =
                    expected.map_or("a whole number of bytes below 2^64".into(), |bytes| format!("{bytes} bytes"));
                let message = format!(
                    "expected {expected} for {} of shape {:?}, found offsets that span {found}",
                    tensor.dtype, tensor.shape
                );
                faults.push(Fault::new(FaultCode::SizeMismatch, message).tensor(&tensor.name));
            }
            if at_end.is_none_or(|(_, end)| tensor.end >= end) {
                at_end = Some((place, tensor.end));
            }
        }
        if tiled {
            faults.extend(self.judge_end(at_end));
        } else {
            self.tensors.iter_mut().for_each(|tensor| tensor.sound &= tensor.end <= self.file_len);
        }
        faults
    }

    /// One fault a file for byte ranges that do not tile it. The tensors on both sides of the first break are marked, and all behind it:
    /// nobody knows where their data really lie.
    fn judge_offsets(&mut self) -> Option<Fault> {
        let mut fault = None;
        let mut blame = |tensor: &TensorInfo, message: String| {
            fault.get_or_insert_with(|| Fault::new(FaultCode::BadOffsets, message).tensor(&tensor.name));
        };
        let mut order = Vec::with_capacity(self.tensors.len());
        for (place, tensor) in self.tensors.iter_mut().enumerate() {
            match tensor.announced(self.data_start) {
                Ok(range) => {
                    (tensor.start, tensor.end) = (range.start, range.end);
                    order.push(place);
                }
                Err(message) => {
                    tensor.sound = false;
                    blame(tensor, message);
                }
            }
        }
        order.sort_unstable_by_key(|&place| (self.tensors[place].start, self.tensors[place].end));

        let mut previous: Option<usize> = None;
        let mut expected = self.data_start;
        let mut broken = false;
        for place in order {
            let tensor = &mut self.tensors[place];
            if tensor.start != expected {
                broken = true;
                let what = if tensor.start < expected { "overlap" } else { "a gap" };
                let message = format!(
                    "expected data to begin at offset {}, found {}: {what}",
                    expected - self.data_start,
                    tensor.start - self.data_start
                );
                blame(tensor, message);
                if let Some(previous) = previous {
                    self.tensors[previous].sound = false;
                }
            }
            let tensor = &mut self.tensors[place];
            tensor.sound &= !broken;
            let end = tensor.end;
            if end >= expected {
                expected = end;
                previous = Some(place);
            }
        }
        fault
    }

    /// Compares the end of the last tensor with the end of the file.
    fn judge_end(&mut self, last: Option<(usize, u64)>) -> Option<Fault> {
        let end = last.map_or(self.data_start, |(_, end)| end);
        // A last tensor that would end right by its shape has been found at fault for its offsets already.
        if let Some((place, _)) = last {
            let tensor = &self.tensors[place];
            let by_shape = tensor.byte_len_by_shape().and_then(|bytes| tensor.start.checked_add(bytes));
            if !tensor.sound && by_shape == Some(self.file_len) {
                return None;
            }
        }
        let message = format!("expected a file of {end} bytes by its header, found {}", self.file_len);
        match end.cmp(&self.file_len) {
            std::cmp::Ordering::Equal => None,
            std::cmp::Ordering::Less => Some(Fault::new(FaultCode::TrailingBytes, message)),
            std::cmp::Ordering::Greater => {
                for tensor in &mut self.tensors {
                    tensor.sound &= tensor.end <= self.file_len;
                }
                Some(Fault::new(FaultCode::Truncated, message))
            }
        }
    }
}

impl TensorInfo {
    /// The tensor's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> &Dtype {
        &self.dtype
    }

    /// The shape, in elements.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Where the data lie: byte offsets from the start of the file.
    #[must_use]
    pub fn byte_range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// Whether no structural fault concerns this tensor: its bytes are all in the file, are its own, and are as many as its shape says.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.sound
    }

    /// The byte length that shape and dtype give; `None` where that is no whole number of bytes, exceeds u64 or cannot be known.
    fn byte_len_by_shape(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent))?;
        let bits = elements.checked_mul(self.dtype.bits()?)?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// The byte range in the file, from offsets that count from the data's start.
    fn announced(&self, data_start: u64) -> Result<Range<u64>, String> {
        if self.start > self.end {
            return Err(format!("expected data_offsets in order, found [{}, {}]", self.start, self.end));
        }
        // The start is no greater than the end, so that one check covers both.
        match self.end.checked_add(data_start) {
            Some(end) => Ok(self.start + data_start..end),
            None => Err(format!("expected data_offsets inside the file, found [{}, {}]", self.start, self.end)),
        }
    }
}

pub(crate) fn not_safetensors(kind: &str) -> Fault {
    Fault::new(FaultCode::NotSafetensors, format!("expected a safetensors file, found {kind}"))
}

/// The whole header: names and their tensors, in the file's order.
struct HeaderSeed<'a> {
    duplicate: &'a Duplicate,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Vec<TensorInfo>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Vec<TensorInfo>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensor names to tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<Box<str>>()? {
            if *name == *METADATA {
                self.duplicate.refuse_second(metadata, METADATA)?;
                metadata = Some(map.next_value_seed(Metadata { duplicate: self.duplicate })?);
            } else {
                tensors.push(map.next_value_seed(TensorSeed { name, duplicate: self.duplicate })?);
            }
        }
        Ok(tensors)
    }
}

/// The value of `__metadata__`: strings by name, or null. Nothing here depends on what it says.
struct Metadata<'a> {
    duplicate: &'a Duplicate,
}

impl<'de> DeserializeSeed<'de> for Metadata<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Metadata<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings to strings")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        StringMap { duplicate: self.duplicate }.deserialize(deserializer).map(drop)
    }
}

/// One entry of the header. Keys that the format does not know are read over.
struct TensorSeed<'a> {
    name: Box<str>,
    duplicate: &'a Duplicate,
}

impl<'de> DeserializeSeed<'de> for TensorSeed<'_> {
    type Value = TensorInfo;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<TensorInfo, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TensorSeed<'_> {
    type Value = TensorInfo;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dtype, shape and data_offsets of tensor {:?}", self.name)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TensorInfo, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        let mut unknown: BTreeSet<Box<str>> = BTreeSet::new();
        while let Some(key) = map.next_key::<Box<str>>()? {
            match &*key {
                "dtype" => {
                    self.duplicate.refuse_second(dtype.as_ref(), "dtype")?;
                    dtype = Some(map.next_value::<Dtype>()?);
                }
                "shape" => {
                    self.duplicate.refuse_second(shape.as_ref(), "shape")?;
                    shape = Some(map.next_value::<Vec<u64>>()?);
                }
                "data_offsets" => {
                    self.duplicate.refuse_second(offsets, "data_offsets")?;
                    offsets = Some(map.next_value::<[u64; 2]>()?);
                }
                _ => {
                    self.duplicate.refuse_second(unknown.get(&key), &key)?;
                    map.next_value::<Unread>()?;
                    unknown.insert(key);
                }
            }
        }
        let missing = |field| A::Error::custom(format!("tensor {:?} lacks {field}", self.name));
        let dtype = dtype.ok_or_else(|| missing("dtype"))?;
        let shape = shape.ok_or_else(|| missing("shape"))?.into_boxed_slice();
        let [start, end] = offsets.ok_or_else(|| missing("data_offsets"))?;
        Ok(TensorInfo { name: self.name, dtype, shape, start, end, sound: true })
    }
}
