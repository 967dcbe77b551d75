//! Creating an exchange: what ranks agree on, the memory, and what all launches have in common.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use engram_core::Ownership;
use engram_cuda::kernels::{Divisor, Ptx};
use engram_cuda::raw::{self, MappedWords, Mark, Module, TableArray};
use engram_cuda::{Device, DeviceBuffer, FreeOfNan, Stream, Table};

use super::{Exchange, Options, Push, narrow};
use crate::cuda::choose::{Choice, Plan};
use crate::cuda::kernels::{self, BARRIER, NEAR, PUSH, Peer, STEP, THREADS};
use crate::cuda::layout::{Agreed, Layout, unit};
use crate::cuda::reach::path_without_atomics;
use crate::cuda::{Segments, peer_access};
use crate::exchange::{Config, Output, invalid};
use crate::protocol::{Call, LINE, MAX_WORLD, Operation, Word};
use crate::{Error, Group, PeerAccess, Registration, Result, Step};

/// What an exchange reports to the host.
const REPORT_WORDS: usize = 4;

/// What ranks tell each other of themselves before they allocate.
#[derive(serde::Serialize, serde::Deserialize)]
struct Traits {
    blocks: u32,
    free_of_nan: bool,
    /// Rows that the rank has, a layer.
    rows: Vec<Range<u64>>,
    /// The UUID of its device.
    device: [u8; 16],
    /// Whether its kernels may start early.
    early: bool,
}

/// Why nothing may count on 16 bytes arriving as one; alike on all ranks.
#[derive(Clone, Copy, Debug)]
enum Split {
    /// The ranks share host memory, of which nobody promises it.
    Host,
    /// [`Options::only_flags`].
    Unwanted,
    /// Nothing promises it between the devices of these ranks.
    Path(usize, usize),
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the ranks share host memory"),
            Self::Unwanted => f.write_str("the options allow flags only"),
            Self::Path(rank, peer) => {
                write!(f, "the devices of ranks {rank} and {peer} have no native atomics between them, as NVLink has")
            }
        }
    }
}

impl Exchange {
    /// An exchange of the whole group, over memory that is allocated for it. Collective. `name` tells it from the group's other exchanges.
    ///
    /// `tables` are what this rank owns, one a layer; a rank that owns nothing may leave them out. Which way to push pays for which slot is
    /// measured here, on all ranks together, unless the options say: that takes 16 MiB of device memory for ids meanwhile, and ranks wait up to
    /// [`Config::DEADLINE`] for each other, or the config's deadline if that is longer.
    ///
    /// # Errors
    /// On all ranks, when one of them fails: [`Error::Invalid`] for a config that contradicts itself, tables of another format or without rows that
    /// the rank owns, and a way by lines where that cannot be; [`Error::Disagreement`] when ranks bring another name, config or options;
    /// [`Error::Memory`] and [`Error::Cuda`].
    pub fn create(
        group: &mut Group,
        device: &Device,
        name: &str,
        config: Config,
        tables: &[Table],
        options: &Options,
    ) -> Result<Self> {
        let (rank, world) = (group.rank(), group.world());
        let checked = check(&config, world, rank, tables);
        group.agree(Step::Register, checked)?;
        group.register(&[Registration {
            name: name.to_owned(),
            bytes: u64::from(config.capacity),
            dtype: config.layers[0].format.kind().to_string(),
            digest: config.digest(),
        }])?;
        let memory = if options.through_host { ", through the host" } else { "" };
        let flags = if options.only_flags { ", by flags only" } else { "" };
        let said = format!("{:?} from epoch {}{memory}{flags}", options.push, options.epoch);
        group.agree_on_value(Step::Register, "the options of the exchange", &said)?;

        let access = if options.through_host {
            PeerAccess::Host(crate::access::Reason::HostBackend)
        } else {
            peer_access(group, device)?
        };
        let free_of_nan: Option<Vec<FreeOfNan>> = tables.iter().map(Table::keep_free_of_nan).collect();
        let split = split(group, device, access, options)?;
        let by_lines = options.push.filter(|push| push.by_lines());
        if let (Some(push), Some(split)) = (by_lines, split) {
            return Err(invalid("way to push", &format!("{push:?}"), &format!("Flags, since {split}")));
        }
        let most = device.multiprocessors();
        let uuid = device.uuid().map_err(|error| Error::cuda(rank, "asking for the device's UUID", &error));
        let own = Traits {
            blocks: options.multiprocessors.unwrap_or(most).clamp(1, most),
            free_of_nan: free_of_nan.is_some(),
            rows: tables.iter().map(Table::rows).collect(),
            device: group.agree(Step::Register, uuid)?,
            early: !options.never_early,
        };
        let traits = group.gather_values(Step::Register, &own)?;
        // One rank alone pushes by flags unless the options say.
        let wanted = options.push.map_or(world > 1, Push::by_lines);
        let agreed = agree(&traits, access, split, wanted);
        let layout = Layout::new(&config, world, agreed);
        let layout = group.agree(Step::Register, layout)?;
        if by_lines.is_some() && layout.line_tokens < config.capacity {
            let expected = format!("at most {} to push by lines", layout.line_tokens);
            return Err(invalid("capacity", &config.capacity, &expected));
        }
        let segments = Segments::allocate(group, device, access, layout.signal_bytes, layout.data_bytes, 0xff)?;
        let plan = Plan::new(world, config.capacity, layout.line_tokens, agreed, options.push);
        // The steps that measure come before the first.
        let last = options.epoch.wrapping_sub(plan.exchanges());
        let built = Self::build(device, config, tables, (plan.first(), last), agreed, layout, segments, (rank, world));
        let mut exchange = group.agree(Step::Publish, built)?;
        let rows: Vec<_> = traits.into_iter().map(|rank| rank.rows).collect();
        // The deadline is about the caller's steps, and ranks come to these ones apart from each other.
        exchange.base.deadline_ns = nanos(exchange.config.deadline.max(Config::DEADLINE));
        exchange.choice = plan.measure(&mut exchange, group, &rows)?;
        exchange.base.deadline_ns = nanos(exchange.config.deadline);
        if !agreed.marked && exchange.choice.has_lines() {
            exchange._free_of_nan = free_of_nan.unwrap_or_default();
        }
        exchange.last_slot = 0;
        Ok(exchange)
    }

    #[expect(clippy::too_many_arguments, reason = "what a constructor has decided so far")]
    fn build(
        device: &Device,
        config: Config,
        tables: &[Table],
        (choice, last): (Choice, u32),
        agreed: Agreed,
        layout: Layout,
        segments: Segments,
        (rank, world): (usize, usize),
    ) -> Result<Self> {
        let cuda = |error: engram_cuda::Error| Error::cuda(rank, "creating an exchange", &error);
        let peers: Vec<u64> = (0..world).flat_map(|peer| [segments.signals(peer), segments.data(peer)]).collect();
        let layers: Vec<u32> = config.layers.iter().flat_map(layer_words).collect();
        let arrays = [
            DeviceBuffer::from_slice(device, &peers).map_err(cuda)?,
            DeviceBuffer::from_slice(device, &layers).map_err(cuda)?,
        ];
        let report = MappedWords::new(device, REPORT_WORDS).map_err(cuda)?;
        (0..REPORT_WORDS).for_each(|word| report.store(word, 0));
        let tables = TableArray::new(device, tables).map_err(cuda)?;
        let row = layout.row;
        let outputs = if agreed.direct {
            None
        } else {
            Some(DeviceBuffer::new(device, row.out_bytes.next_multiple_of(256) + row.scales_bytes).map_err(cuda)?)
        };
        let (out, out_scales) = match &outputs {
            None => (segments.data(rank) + layout.out as u64, segments.data(rank) + layout.out_scales as u64),
            Some(buffer) => (buffer.address(), buffer.address() + row.out_bytes.next_multiple_of(256) as u64),
        };
        start_after(device, &segments, (rank, world), last).map_err(cuda)?;
        let mut near = [Peer::default(); NEAR];
        for (rank, peer) in near.iter_mut().enumerate().take(world) {
            *peer = Peer { signals: segments.signals(rank), data: segments.data(rank) };
        }
        let base = base(
            &config,
            &layout,
            agreed,
            (rank, world),
            &Addresses {
                control: segments.signals(rank),
                near,
                far: arrays[0].address(),
                layer_info: arrays[1].address(),
                report: report.address(),
                tables: if tables.handles().is_empty() { 0 } else { tables.address() },
                out,
                out_scales,
            },
            &tables,
        );
        let started = |ptx: Ptx| if agreed.early { ptx.starting_early() } else { ptx };
        let exchange = Self {
            device: device.clone(),
            choice,
            layout,
            agreed,
            rank,
            world,
            barrier: Module::load(device, &started(BARRIER)).map_err(cuda)?,
            push: Module::load(device, &started(PUSH)).map_err(cuda)?,
            tables,
            _free_of_nan: Vec::new(),
            report,
            asleep: false,
            last_slot: 0,
            eager: Mark::new(device).map_err(cuda)?,
            captured: Mark::new(device).map_err(cuda)?,
            in_graphs: false,
            own_stream: Stream::new(device).map_err(cuda)?,
            base,
            _arrays: arrays,
            _outputs: outputs,
            segments,
            config,
        };
        exchange.clear_outputs()?;
        Ok(exchange)
    }
}

/// What follows from what all ranks say of themselves, of what is between them, and from whether lines are wanted.
fn agree(traits: &[Traits], access: PeerAccess, split: Option<Split>, wanted: bool) -> Agreed {
    let devices: BTreeSet<_> = traits.iter().map(|rank| rank.device).collect();
    let shared = devices.len() < traits.len();
    Agreed {
        blocks: traits.iter().map(|rank| rank.blocks).min().unwrap_or(1),
        marked: traits.iter().any(|rank| !rank.free_of_nan),
        direct: matches!(access, PeerAccess::Direct(_)),
        lines: split.is_none(),
        landing: wanted && split.is_none(),
        // Where processes take turns on a device, a kernel was at times not given its turn while others were to start early.
        early: traits.iter().all(|rank| rank.early) && !shared,
    }
}

/// Whether, and why, 16 bytes may not arrive as one between the ranks. Collective.
fn split(group: &mut Group, device: &Device, access: PeerAccess, options: &Options) -> Result<Option<Split>> {
    Ok(match access {
        PeerAccess::Host(_) => Some(Split::Host),
        // Allocating refuses it, and says why.
        PeerAccess::None(_) => None,
        PeerAccess::Direct(_) if options.only_flags => Some(Split::Unwanted),
        PeerAccess::Direct(_) => path_without_atomics(group, device)?.map(|(rank, peer)| Split::Path(rank, peer)),
    })
}

/// Refuses configs that contradict themselves, and tables that lack what this rank owns.
fn check(config: &Config, world: usize, rank: usize, tables: &[Table]) -> Result<()> {
    config.check(world)?;
    // Kernels speak to all ranks at once, a thread each.
    let most = MAX_WORLD.min(usize::try_from(THREADS).unwrap_or(0));
    if world > most {
        return Err(invalid("ranks of the group", &world, &format!("at most {most}")));
    }
    let owned = |layer: usize| match config.layers[layer].ownership {
        Ownership::Heads(shards) => (!shards.columns_of(rank).is_empty()).then_some(0..0),
        Ownership::Rows(shards) => Some(shards.range(rank)).filter(|rows| !rows.is_empty()),
    };
    let layers = config.layers.len();
    if tables.is_empty() && (0..layers).all(|layer| owned(layer).is_none()) {
        return Ok(());
    }
    if tables.len() != layers {
        return Err(invalid(&format!("tables of rank {rank}"), &tables.len(), &format!("{layers}, one a layer")));
    }
    for (index, (table, layer)) in tables.iter().zip(&config.layers).enumerate() {
        if table.format() != &layer.format {
            let (found, expected) = (format!("{:?}", table.format()), format!("{:?}", layer.format));
            return Err(invalid(&format!("format of the table of layer {index}"), &found, &expected));
        }
        let rows = table.rows();
        let missing =
            owned(index).filter(|owned| !owned.is_empty() && (owned.start < rows.start || owned.end > rows.end));
        if let Some(missing) = missing {
            let (found, expected) = (format!("{rows:?}"), format!("all of {missing:?}"));
            return Err(invalid(&format!("rows of the table of layer {index}"), &found, &expected));
        }
    }
    Ok(())
}

/// [`kernels::Layer`] as words.
fn layer_words(layer: &crate::exchange::Layer) -> [u32; 4] {
    let (rows_a_rank, rows) = match layer.ownership {
        Ownership::Heads(_) => (0, 0),
        // Ids are below 2^31, and so are the tables that kernels read.
        Ownership::Rows(shards) => {
            (u32::try_from(shards.per_rank()).unwrap_or(u32::MAX), u32::try_from(shards.rows()).unwrap_or(1 << 31))
        }
    };
    [rows_a_rank, rows, layer.format.global_scale().unwrap_or(0.0).to_bits(), 0]
}

/// Writes the signals of a group that has done steps up to `last`.
fn start_after(
    device: &Device,
    segments: &Segments,
    (rank, world): (usize, usize),
    last: u32,
) -> Result<(), engram_cuda::Error> {
    let own = segments.signals(rank);
    let control = [u64::from(last) * STEP, 0, u64::from(last), 0, 0];
    // SAFETY: within this rank's own signals, which nobody uses before all ranks have met.
    unsafe { raw::write(device, own, &control) }?;
    let call = Call { epoch: last, operation: Operation::Unknown(0), slot: 0 }.to_word();
    for peer in 0..world {
        let line = own + (LINE * (1 + peer) + 8 * Word::Call as usize) as u64;
        // SAFETY: as above.
        unsafe { raw::write(device, line, &[call, call]) }?;
    }
    Ok(())
}

/// Addresses that launches have in common.
struct Addresses {
    control: u64,
    near: [Peer; NEAR],
    far: u64,
    layer_info: u64,
    report: u64,
    tables: u64,
    out: u64,
    out_scales: u64,
}

/// A deadline as kernels count it, with room for what they add to it.
fn nanos(deadline: Duration) -> u64 {
    u64::try_from(deadline.as_nanos()).map_or(u64::MAX >> 1, |ns| ns.clamp(1, u64::MAX >> 1))
}

/// What launches have in common.
fn base(
    config: &Config,
    layout: &Layout,
    agreed: Agreed,
    (rank, world): (usize, usize),
    addresses: &Addresses,
    tables: &TableArray,
) -> kernels::Exchange {
    let row = layout.row;
    let (values, scales) = (row.value_bytes as u64, row.scale_bytes as u64);
    let table_bits = tables.tables().iter().flat_map(|table| {
        let with_scales = if scales > 0 { table.scales | table.scale_stride } else { 0 };
        [table.values, table.value_stride, with_scales]
    });
    let heads_a_rank = match config.layers[0].ownership {
        Ownership::Heads(shards) => shards.per_rank(),
        Ownership::Rows(_) => 0,
    };
    let out_strides = [row.out_token, row.out_layer, row.out_column].map(|bytes| bytes as u64);
    let out_scales = if config.output == Output::Packed { scales } else { 0 };
    kernels::Exchange {
        control: addresses.control,
        far: addresses.far,
        tables: addresses.tables,
        layer_info: addresses.layer_info,
        ids: 0,
        token_stride: 0,
        report: addresses.report,
        deadline_ns: nanos(config.deadline),
        out: addresses.out,
        out_scales: addresses.out_scales,
        out_token: row.out_token as u64,
        out_layer: row.out_layer as u64,
        out_column: row.out_column as u64,
        scales_layer: row.scales_layer as u64,
        peer_out: layout.out as u64,
        shared_ids: layout.shared_ids as u64,
        shared_rows: layout.shared_rows as u64,
        lines: layout.lines as u64,
        landing: layout.landing as u64,
        pushed_rows: layout.pushed_rows as u64,
        flags: layout.flags as u64,
        rank: narrow(rank),
        world: narrow(world),
        layers: narrow(config.layers.len()),
        columns: narrow(config.columns),
        heads_a_rank: narrow(heads_a_rank),
        capacity: config.capacity,
        tokens: 0,
        slot: 0,
        operation: 0,
        form: row.form,
        straight: layout.straight.into(),
        flagged_ids: (!agreed.lines).into(),
        value_bytes: narrow(row.value_bytes),
        scale_bytes: narrow(row.scale_bytes),
        value_chunks: narrow(row.value_chunks),
        chunks: narrow(row.chunks),
        unit: unit(table_bits.chain([values, scales])),
        out_unit: unit(out_strides.into_iter().chain([addresses.out, values, out_scales])),
        scale_tiles: narrow(row.scale_tiles),
        pairs: narrow(layout.pairs),
        flag_blocks: agreed.blocks,
        tile: 1,
        tiles: 0,
        parts: 1,
        self_tile: 1,
        servers: 0,
        halves: narrow(row.value_bytes / 8),
        line_count: 0,
        by_columns: Divisor::new(narrow(config.columns)),
        by_layers: Divisor::new(narrow(config.layers.len())),
        by_chunks: Divisor::new(narrow(row.chunks)),
        by_value_chunks: Divisor::new(narrow(row.value_chunks)),
        by_halves: Divisor::new(narrow(row.value_bytes / 8)),
        by_pairs: Divisor::new(narrow(layout.pairs)),
        by_parts: Divisor::new(1),
        near: addresses.near,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{Handle, Reason};

    #[test]
    fn what_one_rank_lacks_nobody_counts_on() {
        let on = |device: u8, blocks, free_of_nan| Traits {
            blocks,
            free_of_nan,
            rows: Vec::new(),
            device: [device; 16],
            early: true,
        };
        let rank = |blocks, free_of_nan| on(0, blocks, free_of_nan);
        let direct = PeerAccess::Direct(Handle::Descriptor);
        let agreed = agree(&[on(0, 132, true), on(1, 66, true)], direct, None, true);
        let all = Agreed { blocks: 66, marked: false, direct: true, lines: true, landing: true, early: true };
        assert_eq!(agreed, all);
        let agreed = agree(&[on(0, 66, true), Traits { early: false, ..on(1, 66, true) }], direct, None, true);
        assert_eq!(agreed, Agreed { early: false, ..all });
        // By flags, ids come in lines all the same.
        let agreed = agree(&[rank(132, true)], direct, None, false);
        assert_eq!(agreed, Agreed { blocks: 132, landing: false, ..all });
        let agreed = agree(&[rank(132, true), rank(132, false)], direct, Some(Split::Path(0, 1)), true);
        let split = Agreed { blocks: 132, lines: false, landing: false, ..all };
        assert_eq!(agreed, Agreed { marked: true, early: false, ..split });
        let agreed = agree(&[rank(132, true)], PeerAccess::Host(Reason::HostBackend), Some(Split::Host), true);
        assert_eq!(agreed, Agreed { direct: false, ..split });
    }
}
