//! Tables in pinned memory, read by the kernel, by threads, or by both at once.

use std::time::Instant;

use crate::calibrate::{self, Crossover, Measured, Way, kernel_tokens};
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
const SIZES: [usize; 6] = [2048, 4096, 8192, 16_384, 32_768, 131_072];

/// Larger batches than this are measured one at a time, smaller ones two in a row, since they are over before the machine is in its stride.
const ONE_AT_A_TIME: usize = 16_384;

/// A batch of more bytes goes as one of so many: it would take too long.
const LARGEST: usize = 64 << 20;

/// A share of fewer rows than this is not worth a launch of its own.
const LEAST_SHARE: usize = 1024;

impl Auto {
    pub(crate) fn new(layers: &Layers, options: &LookupOptions, blocks: Blocks) -> Result<Self, Error> {
        let device = layers.device();
        let mut auto = Self {
            staged: Staged::new(layers, options)?,
            crossover: Crossover { rows: usize::MAX, measured: Vec::new() },
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
        let rows = shape.tokens * shape.across();
        if rows < self.crossover.rows {
            return layers.enqueue(ids, out, blocks, stream);
        }
        let share = self.crossover.kernel_share(rows);
        let share = kernel_tokens(shape.tokens, share, f64::from(self.staged.distinct_share()));
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

    /// Times the ways to read uniform ids.
    fn measure(&mut self, layers: &Layers, options: &LookupOptions, blocks: Blocks) -> Result<Vec<Measured>, Error> {
        let start = Instant::now();
        let device = layers.device();
        let across = layers.tables().len() * layers.columns();
        let row_bytes = layers.format().row_bytes();
        let most = options.max_tokens.max(1).min(LARGEST / (across * row_bytes).max(1));
        let mut sizes = SIZES.map(|rows| (rows / across).min(most).max(1) * across).to_vec();
        sizes.dedup();
        let largest = sizes.last().map_or(1, |rows| rows / across);
        let all = largest * 16;
        let ids = DeviceBuffer::from_slice(device, &uniform(layers, all))?;
        let out = DeviceBuffer::new(device, largest * across * row_bytes)?;
        let stream = Stream::new(device)?;
        let stream = stream.as_ref();
        let clocks = [Event::with_time(device)?, Event::with_time(device)?];
        let mut run = |first: usize, tokens: usize, way: Way| {
            let (offset, bytes) = ((first * across * 4) as u64, (tokens * across * 4) as u64);
            // SAFETY: a part of a buffer that outlives the measurements.
            let part = unsafe { DeviceView::from_raw(ids.address() + offset, bytes) };
            let ids = Ids::new(part, IdShape::dense(IdType::I32, tokens, layers.tables().len(), layers.columns()))?;
            let out = Output::packed(&out);
            match way {
                Way::Kernel | Way::Again => layers.enqueue(&ids, &out, blocks, stream),
                Way::Staged => self.staged.run(layers, &ids, &out, stream),
                Way::Shared(share) => {
                    self.run_shared(layers, &ids, &out, kernel_tokens(tokens, share, 1.0), blocks, stream)
                }
            }
        };
        let mut first = 0;
        let time = |rows: usize, way: Way| {
            let (tokens, runs) = (rows / across, if rows > ONE_AT_A_TIME { 1 } else { 2 });
            // Other rows in every run, where it is not about the same ones: what was read before is cheap to find again.
            let mut next = || {
                first = (first + tokens) % (all - tokens + 1);
                first
            };
            // After a run of the same kind, as batches follow each other.
            let mut at = next();
            run(at, tokens, way)?;
            clocks[0].record(stream)?;
            for _ in 0..runs {
                at = if way == Way::Again { at } else { next() };
                run(at, tokens, way)?;
            }
            clocks[1].record(stream)?;
            clocks[1].synchronize()?;
            Ok::<_, Error>(clocks[1].elapsed_us(&clocks[0])? / f64::from(runs))
        };
        let measured = calibrate::measure(&sizes, || start.elapsed(), time)?;
        self.staged.check()?;
        Ok(measured)
    }
}

/// Ids `[tokens][layers][columns]`, drawn from all rows.
fn uniform(layers: &Layers, tokens: usize) -> Vec<i32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    (0..tokens)
        .flat_map(|_| layers.tables())
        .flat_map(|table| (0..layers.columns()).map(move |_| table.rows()))
        .map(|rows| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let row = rows.start + (state >> 32) % (rows.end - rows.start).max(1);
            i32::try_from(row).unwrap_or(-1)
        })
        .collect()
}
