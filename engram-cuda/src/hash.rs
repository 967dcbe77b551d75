//! Ids on the GPU: both families' hashes for ragged batches.

use engram_core::Hasher as HostHasher;
use engram_core::{Family, Layout, Reciprocal};

use crate::device::Device;
use crate::error::Error;
use crate::kernels::{self, Column, Divisor};
use crate::memory::DeviceBuffer;
use crate::stream::StreamRef;
use crate::view::DeviceView;

/// A ragged batch in device memory: the arrays of [`engram_core::Batch`], i32 all of them.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBatch<'a> {
    /// `[len]`. Engram: compressed ids, -1 dead. PLE: raw ids.
    pub tokens: DeviceView<'a>,
    /// Tokens of the batch. Those past the last boundary get ids -1.
    pub len: usize,
    /// `[requests + 1]` boundaries, the first of them 0.
    pub starts: DeviceView<'a>,
    /// Requests of the batch.
    pub requests: usize,
    /// `[requests][n - 1]`. Engram: newest first, -1 dead, -2 unknown. PLE: oldest first, filled with EOS.
    pub history: DeviceView<'a>,
}

/// Turns tokens in device memory into row ids, as [`engram_core::Hasher`] does on the host, to the bit.
#[derive(Debug)]
pub struct Hasher {
    device: Device,
    multipliers: DeviceBuffer,
    columns: DeviceBuffer,
    entry: &'static str,
    layers: u32,
    order: u32,
    heads: u32,
    fill: i32,
}

impl Hasher {
    /// The hash of a layout. `fill` is the compressed pad id of Engram, the EOS id of PLE.
    ///
    /// # Errors
    /// [`Error::Batch`] for a `fill` that the host's hasher refuses; [`Error::Driver`].
    pub fn new(device: &Device, layout: &Layout, fill: i32) -> Result<Self, Error> {
        HostHasher::new(layout, fill)?;
        let multipliers: Vec<i64> = layout.layers().iter().flat_map(|layer| layer.multipliers()).copied().collect();
        let columns = layout.layers().iter().flat_map(|layer| layer.sizes().iter().zip(layer.offsets()));
        // A column as the kernel reads it: 64 bits of multiplier, then size and offset.
        let columns: Vec<u64> = columns
            .filter_map(|(&size, &offset)| Some((Reciprocal::new(size)?, offset)))
            .flat_map(|(size, offset)| {
                let Column { multiplier, size, offset } = Column::new(size, offset);
                [multiplier, u64::from(size) | u64::from(offset) << 32]
            })
            .collect();
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Self {
            device: device.clone(),
            multipliers: DeviceBuffer::from_slice(device, &multipliers)?,
            columns: DeviceBuffer::from_slice(device, &columns)?,
            entry: match layout.family() {
                Family::Engram => "hash_engram",
                Family::Ple => "hash_ple",
            },
            layers: narrow(layout.layers().len()),
            order: narrow(layout.ngram_size()),
            heads: narrow(layout.heads()),
            fill,
        })
    }

    /// Ids of one token, over all layers.
    #[must_use]
    pub fn ids_per_token(&self) -> usize {
        (self.layers * (self.order - 1) * self.heads) as usize
    }

    /// Mixes of one token, over all layers.
    #[must_use]
    pub fn mixes_per_token(&self) -> usize {
        (self.layers * (self.order - 1)) as usize
    }

    /// Enqueues the hash of a batch: `ids` becomes i32 `[len][layers][columns]`, and `mixes`, where wanted, i64 `[len][layers][n - 1]`, of
    /// which equal ones mean equal ids in all heads of that order. May be captured; no tokens, no launch.
    ///
    /// # Errors
    /// [`Error::TooSmall`] for memory that its array does not fit; [`Error::Capacity`] past 2^31 - 16 tokens; [`Error::WrongDevice`];
    /// [`Error::Driver`].
    pub fn ids(
        &self,
        batch: &DeviceBatch<'_>,
        ids: DeviceView<'_>,
        mixes: Option<DeviceView<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        const MOST: usize = (1 << 31) - 16;
        for (what, found) in [("tokens", batch.len), ("requests", batch.requests)] {
            if found > MOST {
                return Err(Error::Capacity { what, found, capacity: MOST });
            }
        }
        stream.check_device(&self.device)?;
        let holds = |what, memory: DeviceView<'_>, count: usize, bytes: usize| {
            memory.check_device(what, &self.device)?;
            let needed = count as u64 * bytes as u64;
            if memory.bytes() < needed {
                return Err(Error::TooSmall { what, found: memory.bytes(), needed });
            }
            if count > 0 && !memory.address().is_multiple_of(bytes as u64) {
                let why = format!("address {:#x} is not a multiple of {bytes} bytes", memory.address());
                return Err(Error::Invalid { what, why });
            }
            Ok(())
        };
        holds("the tokens", batch.tokens, batch.len, 4)?;
        holds("the boundaries", batch.starts, batch.requests + 1, 4)?;
        holds("the history", batch.history, batch.requests * (self.order as usize - 1), 4)?;
        holds("the ids", ids, batch.len * self.ids_per_token(), 4)?;
        if let Some(mixes) = mixes {
            holds("the mixes", mixes, batch.len * self.mixes_per_token(), 8)?;
        }
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        if batch.len == 0 {
            return Ok(());
        }
        let mut param = kernels::Hash {
            tokens: batch.tokens.address(),
            starts: batch.starts.address(),
            history: batch.history.address(),
            multipliers: self.multipliers.address(),
            columns: self.columns.address(),
            ids: ids.address(),
            mixes: mixes.map_or(0, |mixes| mixes.address()),
            len: narrow(batch.len),
            requests: narrow(batch.requests),
            layers: self.layers,
            order: self.order,
            heads: self.heads,
            fill: self.fill,
            per_token: 0.0,
            across: 0,
            by_across: Divisor::default(),
            by_heads: Divisor::default(),
        };
        let (grid, block) = param.plan();
        let _bound = self.device.bind()?;
        // SAFETY: the entry takes `Hash`; every array was checked to hold what its shape says, and its owner keeps it until the work is done.
        let launched = unsafe { self.device.kernels().launch(self.entry, grid, block, stream.handle(), &param) };
        Ok(launched?)
    }
}
