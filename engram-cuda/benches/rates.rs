//! Times lookups and hashes on device 0: `rates [DEVICE_GIB] [PINNED_GIB] [--text IDS] [--only CASE]`, JSON lines on stdout.
//!
//! CASE is `hash`, `device` or `pinned` with the width of the rows (`device:256`). Without it all of them run in this one process, which is not
//! quite the same: a table in memory that another one has given back is read up to a tenth slower.
//!
//! A case is a graph of several runs over different ids, replayed; its time is the median over replays, in microseconds a run. `IDS` holds row
//! ids of real text, i32 `[sets][8192][48]` in the order of layers, orders and heads; they are taken modulo the rows of the table.

use std::error::Error;

use engram_core::{Layout, Preset};
use engram_cuda::{
    Device, DeviceBatch, DeviceBuffer, Event, Hasher, IdShape, IdType, Ids, Lookup, LookupOptions, Output, Placement,
    Stream, StreamRef, Table,
};
use engram_ple::{FormatKind, SynthSource, TableFormat};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SIZES: [usize; 7] = [48, 1024, 4096, 16_384, 65_536, 131_072, 1_048_576];
const TEXT_TOKENS: usize = 8192;
const TEXT_COLUMNS: usize = 48;
const HEADS: usize = 8;

#[expect(clippy::print_stdout, reason = "what this program is for")]
fn report(case: &str) {
    println!("{{{case}}}");
}

fn main() -> Result<()> {
    let (mut sizes, mut text, mut only) = (Vec::new(), None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--text" => text = arguments.next(),
            "--only" => only = arguments.next(),
            // Cargo says this to every bench.
            "--bench" => {}
            _ => sizes.push(argument.parse::<f64>()?),
        }
    }
    let gib = |place: usize, default: f64| sizes.get(place).copied().unwrap_or(default) * f64::from(1 << 30);
    let wanted = |case: &str| only.as_deref().is_none_or(|only| only == case);
    let device = Device::new(0)?;
    report(&format!("\"gpu\": \"{}\", \"threads\": {}", device.name(), std::thread::available_parallelism()?));
    let bench = Bench { stream: Stream::new(&device)?, device };
    if wanted("hash") {
        bench.hashes()?;
    }
    for width in [160, 256, 320].into_iter().filter(|width| wanted(&format!("device:{width}"))) {
        bench.device_table(width, rows_in(gib(0, 48.0), width))?;
    }
    for width in [160, 256, 320].into_iter().filter(|width| wanted(&format!("pinned:{width}"))) {
        bench.host_table(width, rows_in(gib(1, 16.0), width), text.as_deref().filter(|_| width == 256))?;
    }
    Ok(())
}

/// MiB of this process's memory, and how many of them are in huge pages.
fn memory() -> Result<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let mib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix("kB"));
        line.map_or(Ok(0), |kib| kib.trim().parse::<u64>()).map(|kib| kib >> 10)
    };
    Ok((mib("Rss:")?, mib("AnonHugePages:")?))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive size")]
fn rows_in(bytes: f64, width: usize) -> u64 {
    bytes as u64 / width as u64
}

struct Bench {
    device: Device,
    stream: Stream,
}

impl Bench {
    /// Microseconds a run, of a graph that holds all of `runs`.
    fn time(
        &self,
        runs: usize,
        mut record: impl FnMut(usize, StreamRef<'_>) -> std::result::Result<(), engram_cuda::Error>,
    ) -> Result<f64> {
        let clocks = [Event::with_time(&self.device)?, Event::with_time(&self.device)?];
        // Eagerly once: what is made for a shape is made now.
        (0..runs).try_for_each(|run| record(run, self.stream.as_ref()))?;
        self.stream.synchronize()?;
        let mut graph = self.stream.capture(|stream| (0..runs).try_for_each(|run| record(run, stream)))?;
        let mut times = Vec::new();
        for _ in 0..34 {
            clocks[0].record(self.stream.as_ref())?;
            // SAFETY: the caller keeps all that it recorded.
            unsafe { graph.launch(self.stream.as_ref()) }?;
            clocks[1].record(self.stream.as_ref())?;
            self.stream.synchronize()?;
            times.push(clocks[1].elapsed_us(&clocks[0])?);
        }
        let mut times = times.split_off(4);
        times.sort_by(f64::total_cmp);
        #[expect(clippy::cast_precision_loss, reason = "a few runs")]
        Ok(times[times.len() / 2] / runs as f64)
    }

    fn uniform(&self, count: usize, rows: u64, seed: u64) -> Result<DeviceBuffer> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let id = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            i32::try_from((state >> 32) % rows).unwrap_or(0)
        };
        Ok(DeviceBuffer::from_slice(&self.device, &(0..count).map(id).collect::<Vec<_>>())?)
    }

    fn hashes(&self) -> Result<()> {
        let layout = Layout::from_config(&Preset::DeepseekV41Flash.config())?;
        let hasher = Hasher::new(&self.device, &layout, 2)?;
        for tokens in [1, 128, TEXT_TOKENS] {
            let batches: Vec<_> =
                (0..4).map(|seed| self.uniform(tokens, u64::from(layout.vocab_size()), seed)).collect::<Result<_>>()?;
            let starts = DeviceBuffer::from_slice(&self.device, &[0, i32::try_from(tokens)?])?;
            let history = DeviceBuffer::from_slice(&self.device, &[-2i32; 3])?;
            let ids = DeviceBuffer::new(&self.device, tokens * hasher.ids_per_token() * 4)?;
            let us = self.time(32, |run, stream| {
                let batch = DeviceBatch {
                    tokens: (&batches[run % 4]).into(),
                    len: tokens,
                    starts: (&starts).into(),
                    requests: 1,
                    history: (&history).into(),
                };
                hasher.ids(&batch, (&ids).into(), None, stream)
            })?;
            report(&format!(
                "\"product\": \"hash\", \"tokens\": {tokens}, \"ids_per_token\": {}, \"us\": {us:.2}",
                hasher.ids_per_token()
            ));
        }
        Ok(())
    }

    fn lookups(
        &self,
        name: &str,
        table: &str,
        lookup: &mut Lookup,
        width: usize,
        rows: u64,
        sizes: &[usize],
    ) -> Result<()> {
        let columns = lookup.columns();
        for &count in sizes {
            let ids: Vec<_> = (0..4).map(|seed| self.uniform(count, rows, seed)).collect::<Result<_>>()?;
            let out = DeviceBuffer::new(&self.device, count * width)?;
            let shape = IdShape::dense(IdType::I32, count / columns, 1, columns);
            let views = ids.iter().map(|ids| Ids::new(ids, shape)).collect::<std::result::Result<Vec<_>, _>>()?;
            let us = self.time(4, |run, stream| lookup.run(&views[run], &Output::packed(&out), stream))?;
            lookup.check()?;
            report(&format!(
                "\"product\": \"{name}\", \"table\": \"{table}\", \"row_bytes\": {width}, \"rows\": {count}, \"us\": {us:.2}"
            ));
        }
        Ok(())
    }

    fn device_table(&self, width: usize, rows: u64) -> Result<()> {
        let format = TableFormat::new(FormatKind::E4m3Global, width, Some(1.0))?;
        let memory = DeviceBuffer::new(&self.device, usize::try_from(rows)? * width)?;
        memory.fill(0x21, self.stream.as_ref())?;
        // SAFETY: the memory outlives the table.
        let table = unsafe { Table::borrow(&self.device, format, memory.address(), None, 0..rows) }?;
        let mut lookup = Lookup::new(&[table], 16, &LookupOptions::default())?;
        self.lookups("device", "device", &mut lookup, width, rows, &SIZES)
    }

    fn host_table(&self, width: usize, rows: u64, text: Option<&str>) -> Result<()> {
        let format = TableFormat::new(FormatKind::E4m3Global, width, Some(1.0))?;
        let source = SynthSource::new(format, 1, 0, rows);
        let table = Table::load(&self.device, &source, 0..rows, Placement::Auto)?;
        let mut options = LookupOptions::default();
        options.heads = Some(HEADS);
        let mut lookup = Lookup::new(std::slice::from_ref(&table), 16, &options)?;
        let crossover = lookup.crossover().ok_or("an auto table is calibrated")?;
        let measured = crossover.measured.iter().map(|m| {
            let shared: Vec<_> = m.shared_us.iter().map(|(share, us)| format!("\"{share}\": {us:.1}")).collect();
            format!(
                "{{\"rows\": {}, \"kernel_us\": {:.1}, \"again_us\": {:.1}, \"staged_us\": {:.1}, \"shared_us\": {{{}}}, \"kernel_share\": {}}}",
                m.rows,
                m.kernel_us,
                m.again_us,
                m.staged_us,
                shared.join(", "),
                m.staging().0
            )
        });
        let (resident, huge) = memory()?;
        report(&format!(
            "\"calibration\": {{\"row_bytes\": {width}, \"crossover_rows\": {}, \"measured\": [{}], \"host_mib\": {resident}, \"in_huge_pages_mib\": {huge}}}",
            crossover.rows,
            measured.collect::<Vec<_>>().join(", ")
        ));
        self.lookups("auto", "pinned", &mut lookup, width, rows, &SIZES[..6])?;
        drop(lookup);
        let Some(text) = text else { return Ok(()) };

        // Real text: the same rows, with repeats.
        let bytes = std::fs::read(text)?;
        let set = TEXT_TOKENS * TEXT_COLUMNS;
        let ids: Vec<i32> = bytes
            .chunks_exact(4)
            .map(|id| {
                i64::from(i32::from_le_bytes([id[0], id[1], id[2], id[3]])).rem_euclid(i64::try_from(rows).unwrap_or(1))
            })
            .map(|id| i32::try_from(id).unwrap_or(0))
            .collect();
        let sets = ids.len() / set;
        // Equal ids of all heads of an order stand for equal n-grams.
        let mixes: Vec<i64> = ids
            .chunks_exact(HEADS)
            .map(|ids| ids.iter().fold(7i64, |mix, &id| mix.wrapping_mul(0x1000_0000_01b3).wrapping_add(i64::from(id))))
            .collect();
        let distinct = |values: &[i64], count: usize| {
            let mut values = values[..count].to_vec();
            values.sort_unstable();
            values.dedup();
            values.len()
        };
        let grams = TEXT_TOKENS * TEXT_COLUMNS / HEADS;
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let share = distinct(&mixes, grams) as f64 / grams as f64;
        let mut lookup = Lookup::new(std::slice::from_ref(&table), TEXT_COLUMNS, &options)?;
        let (id_memory, mix_memory) =
            (DeviceBuffer::from_slice(&self.device, &ids)?, DeviceBuffer::from_slice(&self.device, &mixes)?);
        let out = DeviceBuffer::new(&self.device, set * width)?;
        let shape = IdShape::dense(IdType::I32, TEXT_TOKENS, 1, TEXT_COLUMNS);
        let part = |memory: &DeviceBuffer, at: usize, bytes: usize| {
            // SAFETY: a part of a live buffer, whose drop waits for the device.
            unsafe { engram_cuda::DeviceView::from_raw(memory.address() + at as u64, bytes as u64) }
        };
        for with_mixes in [true, false] {
            let us = self.time(sets, |run, stream| {
                let mut ids = Ids::new(part(&id_memory, run * set * 4, set * 4), shape)?;
                if with_mixes {
                    ids = ids.with_mixes(part(&mix_memory, run * grams * 8, grams * 8), TEXT_COLUMNS / HEADS);
                }
                lookup.run(&ids, &Output::packed(&out), stream)
            })?;
            lookup.check()?;
            let found = lookup.distinct_share().unwrap_or(1.0);
            report(&format!(
                "\"product\": \"auto\", \"table\": \"pinned\", \"ids\": \"text\", \"mixes\": {with_mixes}, \"row_bytes\": {width}, \"rows\": {set}, \
                 \"distinct_share\": {share:.3}, \"found_share\": {found:.3}, \"us\": {us:.2}"
            ));
        }
        drop(lookup);
        let mut uniform = Lookup::new(std::slice::from_ref(&table), TEXT_COLUMNS, &options)?;
        self.lookups("auto", "pinned", &mut uniform, width, rows, &[set])?;
        drop(uniform);
        self.distinct(&table, &options, width, rows)
    }

    /// What looking for repeats costs where there are none: means over many batches, since most of them are not looked through.
    fn distinct(&self, table: &Table, options: &LookupOptions, width: usize, rows: u64) -> Result<()> {
        const COUNT: usize = 131_072;
        const BATCHES: usize = 4;
        const ROUNDS: usize = 512;
        let columns = 16;
        let ids: Vec<_> = (0..BATCHES as u64).map(|seed| self.uniform(COUNT, rows, seed)).collect::<Result<_>>()?;
        let out = DeviceBuffer::new(&self.device, COUNT * width)?;
        let clocks = [Event::with_time(&self.device)?, Event::with_time(&self.device)?];
        let mut lookups = [true, false].map(|distinct| {
            let mut options = options.clone();
            options.distinct = distinct;
            Lookup::new(std::slice::from_ref(table), columns, &options)
        });
        let mut sums = [0.0; 2];
        // In turns, so that both have the same neighbours on the machine.
        for _ in 0..ROUNDS {
            for (lookup, sum) in lookups.iter_mut().zip(&mut sums) {
                let lookup = lookup.as_mut().map_err(|error| error.to_string())?;
                clocks[0].record(self.stream.as_ref())?;
                for ids in &ids {
                    let ids = Ids::new(ids, IdShape::dense(IdType::I32, COUNT / columns, 1, columns))?;
                    lookup.run(&ids, &Output::packed(&out), self.stream.as_ref())?;
                }
                clocks[1].record(self.stream.as_ref())?;
                clocks[1].synchronize()?;
                *sum += clocks[1].elapsed_us(&clocks[0])?;
                lookup.check()?;
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "a few runs")]
        let [with, without] = sums.map(|sum| sum / (ROUNDS * BATCHES) as f64);
        report(&format!(
            "\"distinct\": {{\"rows\": {COUNT}, \"row_bytes\": {width}, \"batches\": {}, \"us\": {with:.1}, \"without_us\": {without:.1}}}",
            ROUNDS * BATCHES
        ));
        Ok(())
    }
}
