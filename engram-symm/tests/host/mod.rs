//! The backend in host memory.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use engram_symm::protocol::{Fault, Protocol};
use engram_symm::{Algorithm, Exchange, Group, HostMemory, Ids, Memory, Output, Result, Rows, segment_bytes};

use crate::suite::model::{Random, Shape, Tables};
use crate::suite::{Backend, Exchanger, Pace};

/// Memory that calls a hook before every access: to hold the rank up, or to end it.
pub(crate) struct Hooked<H> {
    memory: HostMemory,
    hook: H,
}

// SAFETY: As for the memory itself.
unsafe impl<H: Fn() + Send + Sync> Memory for Hooked<H> {
    fn rank(&self) -> usize {
        self.memory.rank()
    }

    fn world(&self) -> usize {
        self.memory.world()
    }

    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn segment(&self, rank: usize) -> NonNull<u8> {
        (self.hook)();
        self.memory.segment(rank)
    }

    fn discard(&self, range: Range<usize>) -> Result<()> {
        self.memory.discard(range)
    }

    fn reserve(&self, range: Range<usize>) -> Result<()> {
        self.memory.reserve(range)
    }
}

/// An exchange whose rank calls `hook` before every access to memory.
pub(crate) fn hooked<H: Fn() + Send + Sync>(
    group: &mut Group,
    shape: &Shape,
    tables: Tables,
    epoch: u32,
    hook: H,
) -> Result<HostExchange<Hooked<H>>> {
    let config = shape.config();
    let memory = HostMemory::allocate(group, segment_bytes(&config, group.world())?)?;
    Protocol::start_after(&memory, epoch);
    group.barrier()?;
    let memory = Hooked { memory, hook };
    let exchange = Exchange::new(memory, config, shape.parts(group.rank(), tables))?;
    Ok(HostExchange { exchange, layers: shape.layers, output: shape.output })
}

pub(crate) struct Host;

pub(crate) type Hook = Box<dyn Fn() + Send + Sync>;

impl Backend for Host {
    type Exchange = HostExchange<Hooked<Hook>>;

    fn exchange(group: &mut Group, shape: &Shape, tables: Tables, epoch: u32, pace: Pace) -> Result<Self::Exchange> {
        hooked(group, shape, tables, epoch, hook(pace))
    }
}

fn hook(pace: Pace) -> Hook {
    match pace {
        Pace::Steady => Box::new(|| ()),
        Pace::Slow => Box::new(|| std::thread::sleep(Duration::from_micros(300))),
        Pace::Random(seed) => {
            let count = AtomicU64::new(seed);
            Box::new(move || {
                let mut random = Random(count.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x1234_5679));
                match random.below(4096) {
                    0 => std::thread::sleep(Duration::from_micros(random.below(500) as u64)),
                    1..16 => std::thread::yield_now(),
                    _ => {}
                }
            })
        }
    }
}

pub(crate) struct HostExchange<M> {
    exchange: Exchange<M>,
    layers: usize,
    output: Output,
}

impl<M: Memory> Exchanger for HostExchange<M> {
    fn run(&mut self, ids: Ids<'_>, slot: u32, algorithm: Algorithm) -> Result<Vec<Vec<u8>>> {
        let (layers, output) = (self.layers, self.output);
        self.exchange.run(ids, slot, algorithm).map(|rows| bytes(rows, layers, output))
    }

    fn rows(&self) -> Vec<Vec<u8>> {
        bytes(self.exchange.rows(), self.layers, self.output)
    }

    fn check(&self) -> Result<(), Fault> {
        self.exchange.check()
    }

    fn sleep(&mut self) -> Result<()> {
        self.exchange.sleep()
    }

    fn wake(&mut self, _: &mut Group) -> Result<()> {
        self.exchange.wake()
    }

    fn close(self) -> Result<()> {
        self.exchange.close()
    }
}

fn bytes(rows: Rows<'_>, layers: usize, output: Output) -> Vec<Vec<u8>> {
    let each = 0..layers;
    match output {
        Output::Packed => vec![rows.packed().unwrap().to_vec()],
        Output::Bf16 => {
            each.map(|layer| rows.bf16(layer).unwrap().iter().flat_map(|n| n.to_ne_bytes()).collect()).collect()
        }
        Output::F16 => {
            each.map(|layer| rows.f16(layer).unwrap().iter().flat_map(|n| n.to_ne_bytes()).collect()).collect()
        }
        Output::F32 => {
            each.map(|layer| rows.f32(layer).unwrap().iter().flat_map(|n| n.to_ne_bytes()).collect()).collect()
        }
        Output::Mx => each.flat_map(|layer| <[&[u8]; 2]>::from(rows.mx(layer).unwrap()).map(<[u8]>::to_vec)).collect(),
        _ => unreachable!("an output that the tests do not know"),
    }
}
