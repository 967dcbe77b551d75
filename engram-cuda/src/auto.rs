//! Tables in pinned memory, read by the kernel, by threads, or by both at once.

use std::time::{Duration, Instant};

use crate::calibrate::{Crossover, Measured, fair_share};
use crate::error::Error;
use crate::ids::{IdShape, IdType, RowForm};
use crate::lookup::{Layers, LookupOptions};
use crate::memory::DeviceBuffer;
use crate::prefetch_state::Scope;
use crate::rows::Blocks;
use crate::staged::Staged;
use crate::stream::{Event, Mark, Stream, StreamRef};
use crate::view::{DeviceView, Ids, Output};

/// Both ways to read a pinned table, and which one to take when.
#[derive(Debug)]
pub(crate) struct Auto {
    pub(crate) staged: Staged,
    pub(crate) crossover: Crossover,
    /// Where the kernel's share of a large batch runs.
    side: Stream,
    forked: Mark,
    joined: Mark,
}

/// Batches that are measured, in rows.
const SIZES: [usize; 6] = [512, 2048, 8192, 16_384, 32_768, 131_072];

/// A share of fewer rows than this is not worth a launch of its own.
const LEAST_SHARE: usize = 1024;

impl Auto {
    /// How long the measurements may take; the last one that is begun may end after it.
    const BUDGET: Duration = Duration::from_millis(120);

    pub(crate) fn new(layers: &Layers, options: &LookupOptions, blocks: Blocks) -> Result<Self, Error> {
        let device = layers.device();
        let mut auto = Self {
            staged: Staged::new(layers, options)?,
            crossover: Crossover { rows: usize::MAX, kernel_share: 0.0, measured: Vec::new() },
            side: Stream::new(device)?,
            forked: Mark::new(device)?,
            joined: Mark::new(device)?,
        };
        auto.crossover = Crossover::choose(auto.measure(layers, options, blocks)?);
        Ok(auto)
    }

    pub(crate) fn run(
        &mut self,
        layers: &Layers,
        ids: &Ids<'_>,
        out: &Output<'_>,
        blocks: Blocks,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        let shape = ids.shape();
        if shape.tokens * shape.across() < self.crossover.rows {
            return layers.enqueue(ids, out, blocks, stream);
        }
        let share = self.crossover.kernel_tokens(shape.tokens, f64::from(self.staged.distinct_share()));
        self.run_shared(layers, ids, out, share, blocks, stream)
    }

    /// Stages all but the last `share` tokens, which the kernel reads meanwhile.
    fn run_shared(
        &mut self,
        layers: &Layers,
        ids: &Ids<'_>,
        out: &Output<'_>,
        share: usize,
        blocks: Blocks,
        stream: StreamRef<'_>,
    ) -> Result<(), Error> {
        let shape = ids.shape();
        let mut head = shape.tokens - share.min(shape.tokens);
        if out.form == RowForm::Mx {
            // Scales lie in tiles of 128 tokens.
            head = head.next_multiple_of(128).min(shape.tokens);
        }
        let tail = shape.tokens - head;
        if tail * shape.across() < LEAST_SHARE || head == 0 {
            return self.staged.run(layers, ids, out, stream);
        }
        let _bound = layers.device().bind()?;
        let scope = Scope(stream.capture()?);
        let side = self.side.as_ref();
        self.forked.record(stream, scope)?;
        self.forked.before(side, scope)?;
        let tails = layers.enqueue(&ids.tokens(head, tail), &out.after(head), blocks, side);
        // Joined whatever happened: a side stream that is left over would break a capture.
        self.joined.record(side, scope)?;
        let heads = self.staged.run(layers, &ids.tokens(0, head), &out.padded_to(0), stream);
        self.joined.before(stream, scope)?;
        tails.and(heads)
    }

    /// Times the three ways on uniform ids, by ascending size, as far as the budget goes.
    fn measure(&mut self, layers: &Layers, options: &LookupOptions, blocks: Blocks) -> Result<Vec<Measured>, Error> {
        let start = Instant::now();
        let device = layers.device();
        let across = layers.tables().len() * layers.columns();
        let most = options.max_tokens.max(1);
        // Larger batches go as the largest that is measured.
        let largest = (131_072 / across).clamp(1, most);
        // Every run reads other rows: what was read before is cheap to find again.
        let all = largest * 4 * SIZES.len();
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let ids: Vec<i32> = (0..all)
            .flat_map(|_| layers.tables())
            .flat_map(|table| (0..layers.columns()).map(move |_| table))
            .map(|table| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let rows = table.rows();
                let row = rows.start + (state >> 32) % (rows.end - rows.start).max(1);
                i32::try_from(row).unwrap_or(-1)
            })
            .collect();
        let ids = DeviceBuffer::from_slice(device, &ids)?;
        let out = DeviceBuffer::new(device, largest * across * layers.format().row_bytes())?;
        let stream = Stream::new(device)?;
        let clocks = [Event::with_time(device)?, Event::with_time(device)?];
        let best = |rounds: usize, run: &mut dyn FnMut(StreamRef<'_>) -> Result<(), Error>| {
            let mut best = f64::INFINITY;
            for _ in 0..rounds {
                clocks[0].record(stream.as_ref())?;
                run(stream.as_ref())?;
                clocks[1].record(stream.as_ref())?;
                stream.synchronize()?;
                best = best.min(clocks[1].elapsed_us(&clocks[0])?);
            }
            Ok::<_, Error>(best)
        };
        let mut measured: Vec<Measured> = Vec::new();
        let mut next = 0;
        for rows in SIZES {
            let tokens = (rows / across).clamp(1, largest);
            let rows = tokens * across;
            if measured.last().is_some_and(|last| last.rows >= rows) || start.elapsed() > Self::BUDGET {
                break;
            }
            let shape = IdShape::dense(IdType::I32, tokens, layers.tables().len(), layers.columns());
            let packed = Output::packed(&out);
            let mut fresh = || {
                next = (next + tokens) % (all - largest + 1);
                // SAFETY: a part of a buffer that outlives the measurements.
                let part = unsafe {
                    DeviceView::from_raw(ids.address() + (next * across * 4) as u64, (tokens * across * 4) as u64)
                };
                Ids::new(part, shape)
            };
            let rounds = if measured.is_empty() { 4 } else { 3 };
            let kernel_us = best(rounds, &mut |stream| layers.enqueue(&fresh()?, &packed, blocks, stream))?;
            let staged_us = best(rounds, &mut |stream| self.staged.run(layers, &fresh()?, &packed, stream))?;
            let share = Crossover { rows: 0, kernel_share: fair_share(kernel_us, staged_us), measured: Vec::new() };
            let share = share.kernel_tokens(tokens, 1.0);
            let shared_us =
                best(rounds, &mut |stream| self.run_shared(layers, &fresh()?, &packed, share, blocks, stream))?;
            self.staged.check()?;
            measured.push(Measured { rows, kernel_us, staged_us, shared_us });
        }
        Ok(measured)
    }
}
