//! Latency of an exchange between two processes, beside pipes and UNIX sockets that carry the same bytes.
//!
//! `latency [TOKENS]...` prints a JSON line for each way and number of tokens (1, 32 and 128 unless given): microseconds an
//! exchange, the median over many, of the slower process. Rows are DeepSeek-V4.1's: 2 layers of 24 columns, 264 bytes a
//! row, half of the columns owned by each process. All ways look the same rows up in the same tables and leave them in the
//! same form; ids change from exchange to exchange, and every way's rows are checked.
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use engram_core::{HeadShards, Ownership};
use engram_ple::{FormatKind, MemorySource, SynthSource, TableFormat, TableSource};
use engram_symm::{Algorithm, Config, Exchange, Group, HostMemory, Ids, Launch, Layer, Output, Part, Rendezvous};

const LAYERS: usize = 2;
const COLUMNS: usize = 24;
const OWN: usize = COLUMNS / 2;
const WIDTH: usize = 256;
/// Rows of each column: tables of some 13 MB a process, more than its caches hold.
const COLUMN_ROWS: usize = 2048;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> Outcome {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let mut tokens: Vec<usize> = std::env::args().skip(1).map(|count| count.parse()).collect::<Result<_, _>>()?;
    if tokens.is_empty() {
        tokens = vec![1, 32, 128];
    }
    // The other process has its end of the pipes as standard input and output, and of the socket as standard error.
    let (from_us, to_them) = pipe()?;
    let (from_them, to_us) = pipe()?;
    let (ours, theirs) = UnixStream::pair()?;
    let run = format!("latency {}", std::process::id());
    let mut child = Command::new(std::env::current_exe()?)
        .args(tokens.iter().map(usize::to_string))
        .env(CHILD, &run)
        .stdin(Stdio::from(from_us))
        .stdout(Stdio::from(to_us))
        .stderr(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let pipes = Pipes { from: from_them, to: to_them };
    for Line { way, tokens, microseconds } in measure(0, run, &tokens, pipes, ours)? {
        println!(r#"{{"way":"{way}","tokens":{tokens},"processes":2,"microseconds":{microseconds:.2}}}"#);
    }
    if !child.wait()?.success() {
        return Err("the other process failed".into());
    }
    Ok(())
}

/// Set for the other process, to the name of the run.
const CHILD: &str = "ENGRAM_SYMM_LATENCY";

fn child() -> Outcome {
    let tokens: Vec<usize> = std::env::args().skip(1).map(|count| count.parse()).collect::<Result<_, _>>()?;
    let pipes = Pipes {
        from: PipeReader::from(std::io::stdin().as_fd().try_clone_to_owned()?),
        to: PipeWriter::from(std::io::stdout().as_fd().try_clone_to_owned()?),
    };
    let socket = UnixStream::from(std::io::stderr().as_fd().try_clone_to_owned()?);
    measure(1, std::env::var(CHILD)?, &tokens, pipes, socket).map(drop)
}

struct Line {
    way: &'static str,
    tokens: usize,
    microseconds: f64,
}

fn measure(rank: usize, run: String, tokens: &[usize], pipes: Pipes, socket: UnixStream) -> Outcome<Vec<Line>> {
    let launch = Launch { rank, world: 2, local_rank: rank, run };
    let mut group = Rendezvous::new(launch, "latency").timeout(Duration::from_secs(60)).join()?;
    let tables = Tables::new(rank)?;
    let capacity = tokens.iter().copied().max().unwrap_or(1);
    let layer = Layer { format: tables.format.clone(), ownership: Ownership::Heads(HeadShards::new(COLUMNS, 2)?) };
    let config = Config::new(COLUMNS, vec![layer; LAYERS], u32::try_from(capacity)?, Output::Packed);
    let part = |source: &Arc<MemorySource>| Part { first_row: tables.first_row, source: source.clone() };
    let mut exchange = Exchange::create(&mut group, "latency", config, tables.layers.iter().map(part).collect())?;
    let (mut pipes, mut socket) = (Stream::new(&tables, rank, pipes), Stream::new(&tables, rank, socket));

    let mut lines = Vec::new();
    for &tokens in tokens {
        for (way, algorithm) in [("barrier", Algorithm::Barrier), ("push", Algorithm::Push)] {
            lines.push(time(way, &mut group, tokens, &mut Shared { exchange: &mut exchange, algorithm })?);
        }
        lines.push(time("pipe", &mut group, tokens, &mut pipes)?);
        lines.push(time("unix socket", &mut group, tokens, &mut socket)?);
    }
    exchange.close()?;
    group.close()?;
    Ok(lines)
}

/// A way to bring the rows of `ids`, packed.
trait Way {
    fn exchange(&mut self, ids: &[i32]) -> Outcome<&[u8]>;
}

struct Shared<'a> {
    exchange: &'a mut Exchange<HostMemory>,
    algorithm: Algorithm,
}

impl Way for Shared<'_> {
    fn exchange(&mut self, ids: &[i32]) -> Outcome<&[u8]> {
        let ids = Ids::new(ids, LAYERS, COLUMNS)?;
        let rows = self.exchange.run(ids, u32::try_from(ids.tokens())?, self.algorithm)?;
        Ok(rows.packed().ok_or("packed rows")?)
    }
}

/// Exchanges of one way, timed one by one; the slower process's median.
fn time(name: &'static str, group: &mut Group, tokens: usize, way: &mut dyn Way) -> Outcome<Line> {
    const SETS: usize = 8;
    let sets: Vec<_> = (0..SETS).map(|set| ids(group.rank(), set, tokens)).collect();
    let rounds = if tokens <= 32 { 2000 } else { 500 };
    group.barrier()?;
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds + rounds / 4 {
        let ids = &sets[round % SETS];
        let start = Instant::now();
        let rows = way.exchange(ids)?;
        if round >= rounds / 4 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        if round % 97 == 0 && rows != expected(ids)? {
            return Err(format!("wrong rows by {name}").into());
        }
    }
    times.sort_by(f64::total_cmp);
    let medians = group.all_gather(&times[times.len() / 2].to_le_bytes())?;
    let medians = medians.iter().filter_map(|bytes| Some(f64::from_le_bytes(bytes.as_slice().try_into().ok()?)));
    Ok(Line { way: name, tokens, microseconds: medians.fold(0.0, f64::max) })
}

/// Ids of one rank: `[tokens][layers][columns]`.
fn ids(rank: usize, set: usize, tokens: usize) -> Vec<i32> {
    let mut state = (rank * 1000 + set) as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % COLUMN_ROWS
    };
    let columns = (0..tokens * LAYERS).flat_map(|_| 0..COLUMNS);
    columns.map(|column| i32::try_from(column * COLUMN_ROWS + next()).unwrap_or(-1)).collect()
}

fn format() -> Outcome<TableFormat> {
    Ok(TableFormat::new(FormatKind::E4m3E8m0x32, WIDTH, None)?)
}

fn table(layer: usize) -> Outcome<SynthSource> {
    Ok(SynthSource::new(format()?, 1, u32::try_from(layer)?, (COLUMNS * COLUMN_ROWS) as u64))
}

/// The rows of `ids`, straight from the tables.
fn expected(ids: &[i32]) -> Outcome<Vec<u8>> {
    let row_bytes = format()?.row_bytes();
    let mut rows = vec![0; ids.len() * row_bytes];
    for (index, (id, row)) in ids.iter().zip(rows.chunks_mut(row_bytes)).enumerate() {
        table(index / COLUMNS % LAYERS)?.gather(&[*id], row)?;
    }
    Ok(rows)
}

/// What this process owns.
struct Tables {
    format: TableFormat,
    first_row: u64,
    layers: Vec<Arc<MemorySource>>,
}

impl Tables {
    fn new(rank: usize) -> Outcome<Self> {
        let format = format()?;
        let rows = OWN * COLUMN_ROWS;
        let first_row = (rank * rows) as u64;
        let layer = |layer| -> Outcome<_> {
            let mut packed = vec![0; rows * format.row_bytes()];
            table(layer)?.read_range(first_row..first_row + rows as u64, &mut packed)?;
            Ok(Arc::new(MemorySource::new(format.clone(), packed)?))
        };
        let layers = (0..LAYERS).map(layer).collect::<Outcome<_>>()?;
        Ok(Self { format, first_row, layers })
    }

    /// The own columns' rows of `ids`, `[tokens][layers][own columns]`.
    fn gather(&self, ids: &[i32], rows: &mut Vec<u8>) -> Outcome {
        let row_bytes = self.format.row_bytes();
        rows.resize(ids.len() * row_bytes, 0);
        let first_row = i32::try_from(self.first_row)?;
        let runs = ids.chunks(OWN).zip(rows.chunks_mut(OWN * row_bytes));
        for (index, (ids, rows)) in runs.enumerate() {
            let mut local = [0; OWN];
            local.iter_mut().zip(ids).for_each(|(local, id)| *local = id - first_row);
            self.layers[index % LAYERS].gather(&local, rows)?;
        }
        Ok(())
    }
}

struct Pipes {
    from: PipeReader,
    to: PipeWriter,
}

impl Read for Pipes {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        self.from.read(out)
    }
}

impl Write for Pipes {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// An exchange by messages: ids there and back, then rows.
struct Stream<'a, T> {
    tables: &'a Tables,
    rank: usize,
    stream: T,
    asked: Vec<i32>,
    gathered: Vec<u8>,
    sent: Vec<u8>,
    received: Vec<u8>,
    rows: Vec<u8>,
}

impl<'a, T: Read + Write> Stream<'a, T> {
    fn new(tables: &'a Tables, rank: usize, stream: T) -> Self {
        let (asked, gathered, sent, received, rows) = Default::default();
        Self { tables, rank, stream, asked, gathered, sent, received, rows }
    }

    /// Sends `sent` and receives as many bytes, in turns that the smallest buffer of a pipe holds.
    fn swap(stream: &mut T, sent: &[u8], received: &mut Vec<u8>) -> Outcome {
        received.resize(sent.len(), 0);
        for (sent, received) in sent.chunks(32 << 10).zip(received.chunks_mut(32 << 10)) {
            stream.write_all(sent)?;
            stream.read_exact(received)?;
        }
        Ok(())
    }
}

impl<T: Read + Write> Way for Stream<'_, T> {
    fn exchange(&mut self, ids: &[i32]) -> Outcome<&[u8]> {
        let (own, theirs) = (self.rank * OWN, (1 - self.rank) * OWN);
        self.sent.clear();
        for columns in ids.chunks(COLUMNS) {
            self.sent.extend(columns[theirs..theirs + OWN].iter().flat_map(|id| id.to_ne_bytes()));
        }
        Self::swap(&mut self.stream, &self.sent, &mut self.received)?;
        self.asked.clear();
        self.asked.extend(self.received.as_chunks().0.iter().map(|&bytes| i32::from_ne_bytes(bytes)));
        self.tables.gather(&self.asked, &mut self.gathered)?;
        Self::swap(&mut self.stream, &self.gathered, &mut self.received)?;

        self.asked.clear();
        ids.chunks(COLUMNS).for_each(|columns| self.asked.extend(&columns[own..own + OWN]));
        self.tables.gather(&self.asked, &mut self.gathered)?;
        let row_bytes = self.tables.format.row_bytes();
        let run = OWN * row_bytes;
        self.rows.resize(ids.len() * row_bytes, 0);
        let parts = self.gathered.chunks(run).zip(self.received.chunks(run));
        for (rows, (gathered, received)) in self.rows.chunks_mut(2 * run).zip(parts) {
            rows[own * row_bytes..][..run].copy_from_slice(gathered);
            rows[theirs * row_bytes..][..run].copy_from_slice(received);
        }
        Ok(&self.rows)
    }
}
