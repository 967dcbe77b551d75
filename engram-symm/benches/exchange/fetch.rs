//! Ways to bring rows.

use engram_core::Ownership;
use engram_cuda::{DeviceBuffer, Ids, Lookup, LookupOptions, Output, StreamRef};
use engram_ple::mx::ScaleLayout;
use engram_symm::cuda::{Exchange, Options, Push};
use engram_symm::{Algorithm, Config, Layer};
use serde_json::json;

use crate::clock::hundredths;
use crate::stage::Stage;
use crate::wanted::Wanted;
use crate::{HEADS, LAYERS, WIDTH};

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Way {
    Chosen,
    Lines,
    Apart,
    Flags,
    Barrier,
    Alone,
}

impl Way {
    pub(crate) fn named(name: &str) -> Self {
        let ways = [Self::Chosen, Self::Lines, Self::Apart, Self::Flags, Self::Barrier];
        let way = ways.into_iter().find(|way| way.name() == name);
        way.unwrap_or_else(|| panic!("{name}: ways are chosen, lines, apart, flags and barrier"))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Chosen => "chosen",
            Self::Lines => "lines",
            Self::Apart => "apart",
            Self::Flags => "flags",
            Self::Barrier => "barrier",
            Self::Alone => "alone",
        }
    }

    fn algorithm(self) -> Algorithm {
        if self == Self::Barrier { Algorithm::Barrier } else { Algorithm::Push }
    }

    fn push(self) -> Option<Push> {
        match self {
            Self::Lines => Some(Push::Lines),
            Self::Apart => Some(Push::LinesApart),
            Self::Flags | Self::Barrier => Some(Push::Flags),
            Self::Chosen | Self::Alone => None,
        }
    }
}

/// What brings the rows of ids.
pub(crate) enum Fetch {
    Exchange { exchange: Box<Exchange>, algorithm: Algorithm },
    Lookup { lookup: Lookup, values: DeviceBuffer, scales: DeviceBuffer, capacity: usize },
}

impl Fetch {
    /// Collective.
    pub(crate) fn new(stage: &mut Stage, way: Way, wanted: &Wanted) -> Self {
        let capacity = wanted.capacity();
        if way == Way::Alone { Self::lookup(stage, capacity) } else { Self::exchange(stage, way, capacity, wanted) }
    }

    fn exchange(stage: &mut Stage, way: Way, capacity: u32, wanted: &Wanted) -> Self {
        let layer = Layer { format: stage.format.clone(), ownership: Ownership::Heads(stage.shards) };
        let config = Config::new(HEADS, vec![layer; LAYERS], capacity, engram_symm::Output::Mx);
        let mut options = Options::default();
        options.push = way.push();
        options.multiprocessors = wanted.multiprocessors;
        let Stage { group, device, tables, .. } = stage;
        let exchange = Exchange::create(group, device, way.name(), config, tables, &options).unwrap();
        if way == Way::Chosen {
            print_choice(stage, &exchange);
        }
        Self::Exchange { exchange: Box::new(exchange), algorithm: way.algorithm() }
    }

    fn lookup(stage: &Stage, capacity: u32) -> Self {
        let capacity = usize::try_from(capacity).unwrap();
        let scales = LAYERS * ScaleLayout::new(&stage.format, HEADS).unwrap().layer_bytes(capacity);
        let buffer = |bytes| DeviceBuffer::new(&stage.device, bytes).unwrap();
        Self::Lookup {
            lookup: Lookup::new(&stage.tables, HEADS, &LookupOptions::default()).unwrap(),
            values: buffer(LAYERS * capacity * HEADS * WIDTH),
            scales: buffer(scales),
            capacity,
        }
    }

    /// Collective, if it is an exchange.
    pub(crate) fn enqueue(&mut self, ids: &Ids<'_>, slot: u32, stream: StreamRef<'_>) {
        match self {
            Self::Exchange { exchange, algorithm } => {
                exchange.run(ids, slot, *algorithm, stream).unwrap();
            }
            Self::Lookup { lookup, values, scales, capacity } => {
                lookup.run(ids, &Output::mx(&*values, &*scales, *capacity), stream).unwrap();
            }
        }
    }

    /// Where values and scales are, `[layer][capacity]`, once the stream's work is done.
    pub(crate) fn outputs(&self) -> (u64, u64) {
        match self {
            Self::Exchange { exchange, .. } => {
                exchange.check().unwrap();
                let rows = exchange.rows();
                (rows.rows.address(), rows.scales.unwrap().address())
            }
            Self::Lookup { lookup, values, scales, .. } => {
                lookup.check().unwrap();
                (values.address(), scales.address())
            }
        }
    }

    /// Collective, if it is an exchange.
    pub(crate) fn close(self) {
        if let Self::Exchange { exchange, .. } = self {
            exchange.close().unwrap();
        }
    }
}

fn print_choice(stage: &Stage, exchange: &Exchange) {
    let choice = exchange.choice();
    let ways: Vec<_> = choice.ways.iter().map(|way| format!("{:?}/{}", way.push, way.blocks).to_lowercase()).collect();
    let measured = choice.measured.iter().map(|measured| {
        let us: Vec<_> = measured.us.iter().map(|&us| us.is_finite().then(|| hundredths(us))).collect();
        json!({ "slot": measured.slot, "us": us })
    });
    let measured: Vec<_> = measured.collect();
    stage.print(json!({ "way": "chosen", "ways": ways, "measured": measured }));
}
