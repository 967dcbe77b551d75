//! How long it takes, on the slowest rank.

use std::time::Instant;

use engram_cuda::{Event, Graph, StreamRef};
use engram_symm::Group;

use crate::stage::Stage;

/// In a graph.
pub(crate) const EXCHANGES: usize = 16;
/// In a graph that shows what a barrier takes by itself: of few, the graph's launch and how far apart ranks begin it are a part.
pub(crate) const BARRIERS: usize = 256;
const REPLAYS: usize = 30;
/// Eager ones. The last set of ids is another one than a graph's last.
pub(crate) const CALLS: usize = 204;

pub(crate) fn capture(stage: &Stage, calls: usize, mut enqueue: impl FnMut(usize, StreamRef<'_>)) -> Graph {
    let all = |stream: StreamRef<'_>| {
        (0..calls).for_each(|call| enqueue(call, stream));
        Ok(())
    };
    stage.stream.capture(all).unwrap()
}

/// The slowest rank's median over replays, in microseconds a call, of which the graph has so many.
pub(crate) fn replay_us(stage: &mut Stage, graph: &mut Graph, calls: usize) -> f64 {
    let clocks = [Event::with_time(&stage.device).unwrap(), Event::with_time(&stage.device).unwrap()];
    let stream = stage.stream.as_ref();
    let mut times = Vec::new();
    for round in 0..REPLAYS + 3 {
        stage.group.barrier().unwrap();
        clocks[0].record(stream).unwrap();
        // SAFETY: all that the graph uses outlives it.
        unsafe { graph.launch(stream) }.unwrap();
        clocks[1].record(stream).unwrap();
        stage.stream.synchronize().unwrap();
        if round >= 3 {
            times.push(clocks[1].elapsed_us(&clocks[0]).unwrap() / calls as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    slowest(&mut stage.group, times[times.len() / 2])
}

/// Microseconds an eager call, on the host and until it is done.
pub(crate) fn eager_us(stage: &mut Stage, mut enqueue: impl FnMut(usize, StreamRef<'_>)) -> (f64, f64) {
    (0..20).for_each(|call| enqueue(call, stage.stream.as_ref()));
    stage.stream.synchronize().unwrap();
    stage.group.barrier().unwrap();
    let start = Instant::now();
    (0..CALLS).for_each(|call| enqueue(call, stage.stream.as_ref()));
    let host = start.elapsed();
    stage.stream.synchronize().unwrap();
    let [host, done] = [host, start.elapsed()].map(|time| time.as_secs_f64() * 1e6 / CALLS as f64);
    (slowest(&mut stage.group, host), slowest(&mut stage.group, done))
}

/// The largest of all ranks' figures, to hundredths.
pub(crate) fn slowest(group: &mut Group, own: f64) -> f64 {
    let all = group.all_gather(&own.to_le_bytes()).unwrap();
    let of = |bytes: &Vec<u8>| f64::from_le_bytes(bytes.as_slice().try_into().unwrap());
    hundredths(all.iter().map(of).fold(0.0, f64::max))
}

pub(crate) fn hundredths(figure: f64) -> f64 {
    (figure * 100.0).round() / 100.0
}
