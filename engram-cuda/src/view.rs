//! Memory that a call reads ids from and writes rows to.

use std::marker::PhantomData;

use crate::device::Device;
use crate::error::Error;
use crate::ids::{IdShape, RowForm};
use crate::memory::DeviceBuffer;

/// A range of device memory that somebody owns.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a> {
    address: u64,
    bytes: u64,
    /// The device that has it, where it is known.
    device: Option<i32>,
    _owner: PhantomData<&'a DeviceBuffer>,
}

/// Refuses memory that is known to be on another device than the call is for.
fn check_device(what: &'static str, found: Option<i32>, device: &Device) -> Result<(), Error> {
    match found {
        Some(found) if found != device.ordinal() => {
            Err(Error::WrongDevice { what, found: format!("device {found}"), expected: device.ordinal() })
        }
        _ => Ok(()),
    }
}

impl DeviceView<'_> {
    /// Borrows foreign device memory, a tensor's say.
    ///
    /// # Safety
    /// The range is device memory of the device that it is used with, and stays allocated until all work that was enqueued with it is done:
    /// launches of graphs that were captured with it count too.
    #[must_use]
    pub unsafe fn from_raw(address: u64, bytes: u64) -> Self {
        Self { address, bytes, device: None, _owner: PhantomData }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn check_device(&self, what: &'static str, device: &Device) -> Result<(), Error> {
        check_device(what, self.device, device)
    }
}

impl<'a> From<&'a DeviceBuffer> for DeviceView<'a> {
    /// The whole buffer. It may be dropped while work that was enqueued with it runs: that waits for the device.
    fn from(buffer: &'a DeviceBuffer) -> Self {
        let device = Some(buffer.device().ordinal());
        Self { address: buffer.address(), bytes: buffer.bytes() as u64, device, _owner: PhantomData }
    }
}

/// Mixes in device memory, i64 `[tokens][layers][orders]`, of the same layers as the ids beside them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mixes<'a> {
    pub(crate) memory: DeviceView<'a>,
    /// From a token's mixes to the next token's.
    pub(crate) token_stride: usize,
}

impl Mixes<'_> {
    /// Where the mixes of a view's layers lie, as address and pitch of a copy, and how many bytes a token has; refused where the memory ends
    /// before they do.
    pub(crate) fn rows(&self, shape: &IdShape, orders: usize) -> Result<((u64, usize), usize), Error> {
        let bytes = size_of::<i64>();
        let end = (shape.first_layer + shape.layers) * orders;
        let needed = (shape.tokens.saturating_sub(1) * self.token_stride + end) as u64 * bytes as u64;
        if self.memory.bytes() < needed || (shape.tokens > 1 && end > self.token_stride) {
            return Err(Error::TooSmall { what: "the mixes", found: self.memory.bytes(), needed });
        }
        let width = shape.layers * orders * bytes;
        let from = self.memory.address() + (shape.first_layer * orders * bytes) as u64;
        Ok(((from, (self.token_stride * bytes).max(width)), width))
    }
}

/// Ids in device memory, as a strided view.
#[derive(Clone, Copy, Debug)]
pub struct Ids<'a> {
    address: u64,
    device: Option<i32>,
    shape: IdShape,
    mixes: Option<Mixes<'a>>,
    _owner: PhantomData<&'a DeviceBuffer>,
}

impl<'a> Ids<'a> {
    /// Ids of this shape, from the view's first byte on.
    ///
    /// # Errors
    /// [`Error::Ids`] when the shape is impossible, or the view too small or misaligned.
    pub fn new(memory: impl Into<DeviceView<'a>>, shape: IdShape) -> Result<Self, Error> {
        let memory = memory.into();
        shape.check(memory.address, memory.bytes)?;
        Ok(Self { address: memory.address, device: memory.device, shape, mixes: None, _owner: PhantomData })
    }

    /// Adds the n-grams' mixes as the hash gives them, `[tokens][layers][orders]`, tokens `token_stride` mixes apart. Equal mixes (of one layer
    /// and order) mean equal ids in all heads: a staged lookup then finds repeated n-grams by them. Other lookups ignore them.
    #[must_use]
    pub fn with_mixes(self, memory: impl Into<DeviceView<'a>>, token_stride: usize) -> Self {
        Self { mixes: Some(Mixes { memory: memory.into(), token_stride }), ..self }
    }

    /// Their shape.
    #[must_use]
    pub fn shape(&self) -> &IdShape {
        &self.shape
    }

    /// Address of the first token's first id, of layer 0.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn mixes(&self) -> Option<&Mixes<'a>> {
        self.mixes.as_ref()
    }

    /// Refuses ids, and mixes, that are known to be in another device's memory; where foreign memory lies is for its caller to know.
    ///
    /// # Errors
    /// [`Error::WrongDevice`].
    pub fn check_device(&self, device: &Device) -> Result<(), Error> {
        check_device("the ids", self.device, device)?;
        self.mixes.map_or(Ok(()), |mixes| mixes.memory.check_device("the mixes", device))
    }

    /// The same memory seen as one layer, counted from the view's first.
    pub(crate) fn layer(&self, layer: usize) -> Self {
        let shape = IdShape { first_layer: self.shape.first_layer + layer, layers: 1, ..self.shape };
        Self { shape, ..*self }
    }

    /// The tokens from `from` on, `count` of them; without their mixes unless they are the first ones.
    pub(crate) fn tokens(&self, from: usize, count: usize) -> Self {
        let skipped = from * self.shape.token_stride * self.shape.id_type.bytes();
        let mixes = self.mixes.filter(|_| from == 0);
        Self { address: self.address + skipped as u64, shape: IdShape { tokens: count, ..self.shape }, mixes, ..*self }
    }
}

/// Where rows go, in which form, with room for `capacity` tokens.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    pub(crate) form: RowForm,
    pub(crate) rows: DeviceView<'a>,
    pub(crate) scales: Option<DeviceView<'a>>,
    pub(crate) capacity: usize,
    pub(crate) slot: usize,
    /// Tokens before the first that is written.
    pub(crate) skip: usize,
}

impl<'a> Output<'a> {
    /// Stored bytes, `[token][layer][column][row_bytes]`.
    pub fn packed(rows: impl Into<DeviceView<'a>>) -> Self {
        Self { form: RowForm::Packed, rows: rows.into(), scales: None, capacity: usize::MAX, slot: 0, skip: 0 }
    }

    /// Numbers of this type, `[layer][capacity][columns * width]`: E4M3 rows decoded to bf16 or f16, or unquantised rows as they are.
    pub fn dense(rows: impl Into<DeviceView<'a>>, output: engram_ple::OutputType, capacity: usize) -> Self {
        Self { form: RowForm::Dense(output), rows: rows.into(), scales: None, capacity, slot: 0, skip: 0 }
    }

    /// MX: values `[layer][capacity][columns * width]`, and scales in tiles of 128 tokens by 4 groups, each layer's padded to `capacity`
    /// rounded up to 128 tokens.
    pub fn mx(values: impl Into<DeviceView<'a>>, scales: impl Into<DeviceView<'a>>, capacity: usize) -> Self {
        Self { form: RowForm::Mx, rows: values.into(), scales: Some(scales.into()), capacity, slot: 0, skip: 0 }
    }

    /// Writes zero rows for tokens past the ids' last, up to `slot` tokens in all.
    #[must_use]
    pub fn padded_to(self, slot: usize) -> Self {
        Self { slot, ..self }
    }

    /// The same output for the tokens from `skip` on.
    pub(crate) fn after(self, skip: usize) -> Self {
        Self { skip: self.skip + skip, slot: self.slot.saturating_sub(skip), ..self }
    }

    pub(crate) fn check_device(&self, device: &Device) -> Result<(), Error> {
        self.rows.check_device("the output", device)?;
        self.scales.map_or(Ok(()), |scales| scales.check_device("the output of MX scales", device))
    }

    /// Tokens that are written for ids of `tokens` tokens.
    pub(crate) fn slot(&self, tokens: usize) -> usize {
        self.slot.max(tokens)
    }
}
