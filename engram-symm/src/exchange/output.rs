//! What an exchange leaves on the rank that asked.

use std::ops::Range;

use engram_ple::mx::ScaleLayout;
use engram_ple::{TableFormat, mx};
use half::{bf16, f16};

use super::config::{Config, Output};

/// The outputs of an exchange, at fixed addresses for as long as it lives.
#[derive(Debug)]
pub(super) struct Buffers {
    capacity: usize,
    layers: usize,
    columns: usize,
    row_bytes: usize,
    width: usize,
    values: Values,
}

#[derive(Debug)]
enum Values {
    Packed(Vec<u8>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
    Mx { values: Vec<u8>, scales: Vec<u8>, layout: ScaleLayout },
}

impl Buffers {
    /// Zeroed buffers, unless they take more bytes than can be addressed. The config has been checked.
    pub(super) fn new(config: &Config) -> Option<Self> {
        let format = &config.layers[0].format;
        let (capacity, layers) = (usize::try_from(config.capacity).ok()?, config.layers.len());
        let tokens = capacity.checked_mul(layers)?.checked_next_multiple_of(mx::TILE_TOKENS)?;
        let numbers = tokens.checked_mul(config.columns)?.checked_mul(format.width())?;
        numbers.checked_mul(size_of::<f32>()).filter(|&bytes| isize::try_from(bytes).is_ok())?;
        let numbers = capacity * layers * config.columns * format.width();
        let values = match config.output {
            Output::Packed => {
                Values::Packed(vec![0; (capacity * layers * config.columns).checked_mul(format.row_bytes())?])
            }
            Output::Bf16 => Values::Bf16(vec![bf16::ZERO; numbers]),
            Output::F16 => Values::F16(vec![f16::ZERO; numbers]),
            Output::F32 => Values::F32(vec![0.0; numbers]),
            Output::Mx => {
                let layout = ScaleLayout::new(format, config.columns).ok()?;
                let scales = vec![0; layers.checked_mul(layout.layer_bytes(capacity))?];
                Values::Mx { values: vec![0; numbers], scales, layout }
            }
        };
        let (row_bytes, width) = (format.row_bytes(), format.width());
        Some(Self { capacity, layers, columns: config.columns, row_bytes, width, values })
    }

    /// Index of the numbers of one row.
    fn number(&self, layer: usize, token: usize, column: usize) -> usize {
        ((layer * self.capacity + token) * self.columns + column) * self.width
    }

    /// Where packed rows of columns that follow each other go as they are, from `column` on.
    pub(super) fn packed(&mut self, layer: usize, token: usize, column: usize, bytes: usize) -> Option<&mut [u8]> {
        let at = ((token * self.layers + layer) * self.columns + column) * self.row_bytes;
        match &mut self.values {
            Values::Packed(out) => Some(&mut out[at..at + bytes]),
            _ => None,
        }
    }

    /// Takes packed rows of columns that follow each other, from `column` on.
    pub(super) fn write(&mut self, format: &TableFormat, layer: usize, token: usize, column: usize, rows: &[u8]) {
        let count = rows.len() / self.row_bytes;
        let at = self.number(layer, token, column);
        let numbers = at..at + count * self.width;
        let at = ((token * self.layers + layer) * self.columns + column) * self.row_bytes;
        match &mut self.values {
            Values::Packed(out) => out[at..at + rows.len()].copy_from_slice(rows),
            Values::Bf16(out) => format.decode_bf16(rows, &mut out[numbers]),
            Values::F16(out) => format.decode_f16(rows, &mut out[numbers]),
            Values::F32(out) => format.decode_f32(rows, &mut out[numbers]),
            Values::Mx { values, scales, layout } => {
                let bytes = layout.layer_bytes(self.capacity);
                let scales = &mut scales[layer * bytes..][..bytes];
                let outs = values[numbers].chunks_exact_mut(self.width);
                for (index, (row, out)) in rows.chunks_exact(self.row_bytes).zip(outs).enumerate() {
                    let (row_values, row_scales) = row.split_at(self.width);
                    out.copy_from_slice(row_values);
                    layout.write_row(scales, token, column + index, row_scales);
                }
            }
        }
    }

    /// Zeroes the MX scales of the tiles that hold `slot` tokens, padding included.
    pub(super) fn clear_scales(&mut self, slot: usize) {
        if let Values::Mx { scales, layout, .. } = &mut self.values {
            let bytes = layout.layer_bytes(self.capacity);
            scales.chunks_exact_mut(bytes).for_each(|layer| layer[..layout.layer_bytes(slot)].fill(0));
        }
    }

    /// Makes zero rows of all columns of the tokens in `tokens`; MX scales aside.
    pub(super) fn clear(&mut self, tokens: Range<usize>) {
        for layer in 0..self.layers {
            let numbers = self.number(layer, tokens.start, 0)..self.number(layer, tokens.end, 0);
            match &mut self.values {
                Values::Packed(_) => {}
                Values::Bf16(out) => out[numbers].fill(bf16::ZERO),
                Values::F16(out) => out[numbers].fill(f16::ZERO),
                Values::F32(out) => out[numbers].fill(0.0),
                Values::Mx { values, .. } => values[numbers].fill(0),
            }
        }
        if let Values::Packed(out) = &mut self.values {
            let token = self.layers * self.columns * self.row_bytes;
            out[tokens.start * token..tokens.end * token].fill(0);
        }
    }

    pub(super) fn rows(&self, slot: usize) -> Rows<'_> {
        Rows { buffers: self, slot }
    }
}

/// The rows that an exchange brought, for the tokens of its slot; those from `tokens` on are zero rows.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    buffers: &'a Buffers,
    slot: usize,
}

impl<'a> Rows<'a> {
    /// Tokens of the slot.
    pub fn slot(&self) -> usize {
        self.slot
    }

    fn numbers(&self, layer: usize) -> Range<usize> {
        assert!(layer < self.buffers.layers, "layer {layer} of {}", self.buffers.layers);
        self.buffers.number(layer, 0, 0)..self.buffers.number(layer, self.slot, 0)
    }

    /// Packed rows, `[slot][layers][columns][row_bytes]`, of an exchange with [`Output::Packed`].
    pub fn packed(&self) -> Option<&'a [u8]> {
        let Buffers { layers, columns, row_bytes, .. } = self.buffers;
        match &self.buffers.values {
            Values::Packed(rows) => Some(&rows[..self.slot * layers * columns * row_bytes]),
            _ => None,
        }
    }

    /// One layer's numbers, `[slot][columns * width]`, of an exchange with [`Output::Bf16`].
    ///
    /// # Panics
    /// When the exchange has no such layer; so do the others.
    pub fn bf16(&self, layer: usize) -> Option<&'a [bf16]> {
        match &self.buffers.values {
            Values::Bf16(rows) => Some(&rows[self.numbers(layer)]),
            _ => None,
        }
    }

    /// One layer's numbers, `[slot][columns * width]`, of an exchange with [`Output::F16`].
    pub fn f16(&self, layer: usize) -> Option<&'a [f16]> {
        match &self.buffers.values {
            Values::F16(rows) => Some(&rows[self.numbers(layer)]),
            _ => None,
        }
    }

    /// One layer's numbers, `[slot][columns * width]`, of an exchange with [`Output::F32`].
    pub fn f32(&self, layer: usize) -> Option<&'a [f32]> {
        match &self.buffers.values {
            Values::F32(rows) => Some(&rows[self.numbers(layer)]),
            _ => None,
        }
    }

    /// One layer's values, `[slot][columns * width]`, and scales, in whole tiles of 128 tokens, of an exchange with
    /// [`Output::Mx`].
    pub fn mx(&self, layer: usize) -> Option<(&'a [u8], &'a [u8])> {
        match &self.buffers.values {
            Values::Mx { values, scales, layout } => {
                let scales = &scales[layer * layout.layer_bytes(self.buffers.capacity)..];
                Some((&values[self.numbers(layer)], &scales[..layout.layer_bytes(self.slot)]))
            }
            _ => None,
        }
    }
}
