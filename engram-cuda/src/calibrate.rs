//! Choosing how to read a table in pinned memory, from measurements.

use std::time::Duration;

/// One batch size, and what it took in microseconds (medians): a kernel that reads the host by itself, staging by threads, and both at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Rows of the batch.
    pub rows: usize,
    /// The kernel alone, rows that were not read before.
    pub kernel_us: f64,
    /// The kernel alone, rows that it has just read: the way to them is known then, which is most of the time that a row takes. As `kernel_us`
    /// where that is out of the question.
    pub again_us: f64,
    /// Staging alone.
    pub staged_us: f64,
    /// Staging, while the kernel takes a share of the batch: that share, and the time.
    pub shared_us: Vec<(f64, f64)>,
}

impl Measured {
    /// Sharing has to be faster by this much: it takes the link to the host from the threads, and a stream of its own.
    const SHARED: f64 = 0.95;
    /// Staging has to be faster by this much, since it keeps the host's threads busy.
    const STAGED: f64 = 0.9;

    /// The share of a staged batch that the kernel takes, 0 where sharing does not clearly pay, and the time of staging so.
    #[must_use]
    pub fn staging(&self) -> (f64, f64) {
        let clearly = self.shared_us.iter().filter(|(_, us)| *us < self.staged_us * Self::SHARED);
        clearly.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or((0.0, self.staged_us), |&best| best)
    }

    /// How much staging wins by, in microseconds that the kernel would have to be faster; negative where it does not clearly win.
    ///
    /// How much of a batch was met before is not known, so the kernel counts with the mean of its best and its worst.
    fn lead_us(&self) -> f64 {
        f64::midpoint(self.kernel_us, self.again_us) - self.staging().1 / Self::STAGED
    }
}

/// Which way a batch goes: the outcome of a calibration.
#[derive(Clone, Debug, PartialEq)]
pub struct Crossover {
    /// From this many rows on, batches are staged; smaller ones are read by the kernel. `usize::MAX` where the kernel always wins.
    pub rows: usize,
    /// What was measured, by ascending size.
    pub measured: Vec<Measured>,
}

impl Crossover {
    /// Chooses from measurements by ascending size.
    pub(crate) fn choose(measured: Vec<Measured>) -> Self {
        // The kernel keeps everything up to the last size that staging does not clearly win.
        let rows = match measured.iter().rposition(|m| m.lead_us() <= 0.0) {
            None => measured.first().map_or(usize::MAX, |m| m.rows),
            Some(last) => measured.get(last + 1).map_or(usize::MAX, |next| {
                // Between the two sizes the lead goes over about where a straight line through the leads says.
                let (behind, ahead) = (-measured[last].lead_us(), next.lead_us());
                let (here, there) = (measured[last].rows, next.rows);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    clippy::cast_precision_loss,
                    reason = "between two row counts"
                )]
                let step = ((there - here) as f64 * (behind / (behind + ahead))).ceil() as usize;
                here + step.clamp(1, there - here)
            }),
        };
        Self { rows, measured }
    }

    /// The share of a staged batch of that many rows that the kernel takes meanwhile, if all its ids are distinct: that of the largest size that was
    /// measured and is not larger.
    #[must_use]
    pub fn kernel_share(&self, rows: usize) -> f64 {
        let known = self.measured.iter().rfind(|m| m.rows <= rows).or(self.measured.first());
        known.map_or(0.0, |m| m.staging().0)
    }
}

/// Tokens that the kernel takes of a staged batch of `tokens` tokens of which the threads find a share of `distinct` to be distinct, where it would
/// take `share` of distinct ones.
pub(crate) fn kernel_tokens(tokens: usize, share: f64, distinct: f64) -> usize {
    // With repeats the threads are faster by as much; the kernel reads every row.
    let share = share * distinct / (share * distinct + 1.0 - share).max(f64::MIN_POSITIVE);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a part of the tokens"
    )]
    {
        (tokens as f64 * share) as usize
    }
}

/// What a measurement times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    Kernel,
    /// The kernel, on rows that it has just read.
    Again,
    Staged,
    /// Staged, but for the kernel's share.
    Shared(f64),
}

impl Way {
    /// Shares that are measured.
    const SHARES: [f64; 3] = [0.1, 0.2, 0.3];

    fn all() -> impl Iterator<Item = Self> {
        [Self::Staged, Self::Kernel, Self::Again].into_iter().chain(Self::SHARES.map(Self::Shared))
    }
}

/// No round of measurements begins that would end later than this, and no larger size in the first round after a third of it.
const BUDGET: Duration = Duration::from_millis(150);

/// Rounds after the first, as far as the time goes.
const ROUNDS: usize = 9;

/// What took so many times as long as the best way to read fresh rows in the first round is not measured again.
const HOPELESS: f64 = 3.0;

/// Measures batches of so many rows, by ascending size: every size in every round, so that what slows the machine down for a moment falls on all of
/// them, and medians over the rounds. `time` gives microseconds, `elapsed` how long it has been going on.
pub(crate) fn measure<E>(
    sizes: &[usize],
    elapsed: impl Fn() -> Duration,
    mut time: impl FnMut(usize, Way) -> Result<f64, E>,
) -> Result<Vec<Measured>, E> {
    // The first round wakes threads and looks for repeats, so of its times only those count that leave no doubt.
    let mut first: Vec<Vec<f64>> = Vec::new();
    let begun = elapsed();
    for &rows in sizes {
        if !first.is_empty() && elapsed() > BUDGET / 3 {
            break;
        }
        let mut times: Vec<f64> = Vec::new();
        for way in Way::all() {
            let us = match (way, &times[..]) {
                (Way::Again, &[staged, kernel]) if kernel > staged * HOPELESS => kernel,
                _ => time(rows, way)?,
            };
            times.push(us);
        }
        first.push(times);
    }
    let mut round = elapsed().saturating_sub(begun);
    let mut times: Vec<Vec<Vec<f64>>> = first.iter().map(|first| vec![Vec::new(); first.len()]).collect();
    for _ in 0..ROUNDS {
        let begun = elapsed();
        if begun + round > BUDGET {
            break;
        }
        for ((&rows, first), times) in sizes.iter().zip(&first).zip(&mut times) {
            let fresh = Way::all().zip(first).filter(|(way, _)| *way != Way::Again);
            let best = fresh.map(|(_, &us)| us).fold(f64::INFINITY, f64::min);
            for ((way, &first), times) in Way::all().zip(first).zip(times) {
                if first < best * HOPELESS {
                    times.push(time(rows, way)?);
                }
            }
        }
        round = round.min(elapsed().saturating_sub(begun));
    }
    let measured = |((&rows, first), times): ((&usize, &Vec<f64>), &mut Vec<Vec<f64>>)| {
        let us: Vec<f64> = times.iter_mut().zip(first).map(|(times, &first)| median(times).unwrap_or(first)).collect();
        let shared_us = Way::SHARES.into_iter().zip(us[3..].iter().copied()).collect();
        Measured { rows, staged_us: us[0], kernel_us: us[1], again_us: us[2], shared_us }
    };
    Ok(sizes.iter().zip(&first).zip(&mut times).map(measured).collect())
}

/// The middle one, the lower of two; nothing of nothing.
fn median(times: &mut [f64]) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::ops::Range;

    fn measured(points: &[(usize, f64, f64, f64)]) -> Vec<Measured> {
        let one = |&(rows, kernel_us, staged_us, shared_us): &_| Measured {
            rows,
            kernel_us: kernel_us + 5.0,
            again_us: kernel_us - 5.0,
            staged_us,
            shared_us: vec![(0.1, shared_us + 9.0), (0.2, shared_us), (0.3, shared_us + 9.0)],
        };
        points.iter().map(one).collect()
    }

    #[test]
    fn the_lead_goes_over_between_the_sizes_that_disagree() {
        let points = [(1024, 10.0, 60.0, 65.0), (4096, 80.0, 100.0, 99.0), (16_384, 400.0, 250.0, 200.0)];
        let crossover = Crossover::choose(measured(&points));
        assert!((4097..9000).contains(&crossover.rows), "{}", crossover.rows);
        assert_eq!(
            [1, 4096, 16_383, 16_384, 1 << 20].map(|rows| crossover.kernel_share(rows)),
            [0.0, 0.0, 0.0, 0.2, 0.2]
        );
    }

    #[test]
    fn one_way_may_always_win() {
        let kernel = Crossover::choose(measured(&[(1024, 10.0, 60.0, 70.0), (16_384, 100.0, 250.0, 260.0)]));
        assert_eq!((kernel.rows, kernel.kernel_share(1 << 20)), (usize::MAX, 0.0));
        let staged = Crossover::choose(measured(&[(1024, 90.0, 60.0, 61.0), (16_384, 500.0, 250.0, 260.0)]));
        assert_eq!((staged.rows, staged.kernel_share(1 << 20)), (1024, 0.0));
        assert_eq!(Crossover::choose(Vec::new()).rows, usize::MAX);
        assert_eq!(Crossover::choose(Vec::new()).kernel_share(5), 0.0);
    }

    /// What a machine takes, in microseconds: rates of the kernel in rows a microsecond, what staging takes before its first row, and its rate.
    #[derive(Clone, Copy, Debug)]
    struct Machine {
        kernel: f64,
        again: f64,
        wake: f64,
        staged: f64,
    }

    impl Machine {
        #[expect(clippy::cast_precision_loss, reason = "rows of a batch")]
        fn us(self, rows: usize, way: Way) -> f64 {
            let rows = rows as f64;
            match way {
                Way::Kernel => 4.0 + rows / self.kernel,
                Way::Again => 4.0 + rows / self.again,
                Way::Staged => self.wake + rows / self.staged,
                Way::Shared(share) => {
                    (self.wake + rows * (1.0 - share) / self.staged).max(9.0 + rows * share / self.kernel)
                }
            }
        }
    }

    const SIZES: [usize; 6] = [2048, 4096, 8192, 16_384, 32_768, 131_072];

    proptest! {
        /// Whatever is slow for a while, after the first round, leaves the measurements as they are without it.
        #[test]
        fn a_machine_that_stumbles_is_still_read_right(
            (kernel, again, wake, staged) in (25.0..60.0f64, 1.0..6.0f64, 40.0..250.0f64, 100.0..300.0f64),
            (from, count, stall) in (0usize..100, 1usize..=6, 0.0..3000.0f64),
        ) {
            let machine = Machine { kernel, again: kernel * again, wake, staged };
            let measured = |stumbles: Range<usize>| {
                let (clock, mut calls) = (Cell::new(Duration::ZERO), Vec::new());
                let found = measure(&SIZES, || clock.get(), |rows, way| {
                    let us = machine.us(rows, way) + if stumbles.contains(&calls.len()) { stall } else { 0.0 };
                    calls.push((rows, way));
                    clock.set(clock.get() + Duration::from_secs_f64(2e-6 * us));
                    Ok::<_, ()>(us)
                });
                (found.unwrap(), calls, clock.get())
            };
            let (calm, calls, time) = measured(0..0);
            prop_assert!(time <= BUDGET);
            for m in &calm {
                let us = [(m.kernel_us, Way::Kernel), (m.staged_us, Way::Staged)];
                let shared = m.shared_us.iter().map(|&(share, us)| (us, Way::Shared(share)));
                prop_assert!(us.into_iter().chain(shared).all(|(us, way)| us == machine.us(m.rows, way)));
            }
            let rounds: Vec<usize> = calls.chunk_by(|(rows, _), (next, _)| rows <= next).map(<[_]>::len).collect();
            // Fewer rounds leave too few for a median when a stall has taken the time of some.
            if rounds.len() > 6 {
                let first = rounds[0];
                prop_assert_eq!(measured(first + from..first + from + count).0, calm);
            }
        }

        #[test]
        fn a_machine_that_is_slow_all_the_time_is_measured_as_far_as_the_time_goes(slow in 1.0..500.0f64) {
            let machine = Machine { kernel: 30.0, again: 60.0, wake: 100.0, staged: 150.0 };
            let clock = Cell::new(Duration::ZERO);
            let found = measure(&SIZES, || clock.get(), |rows, way| {
                let us = slow * machine.us(rows, way);
                clock.set(clock.get() + Duration::from_secs_f64(2e-6 * us));
                Ok::<_, ()>(us)
            });
            let found = found.unwrap();
            prop_assert!(!found.is_empty());
            // The size that was begun last ends when it ends.
            let last: f64 = Way::all().map(|way| 2e-6 * slow * machine.us(found.last().unwrap().rows, way)).sum();
            prop_assert!(clock.get() <= BUDGET.max(BUDGET / 3 + Duration::from_secs_f64(last)), "{:?}", clock.get());
        }

        /// What is chosen for a size agrees with what was measured at it, and at every larger size.
        #[test]
        fn choices_follow_from_the_measurements(
            points in prop::collection::vec((1usize..50_000, [1.0..1000.0f64, 1.0..1000.0f64], 1.0..1000.0f64, prop::collection::vec((0.01..0.9f64, 1.0..1000.0f64), 0..4)), 0..9),
        ) {
            let mut rows = 0;
            let measured: Vec<_> = points
                .into_iter()
                .map(|(more, [kernel_us, again_us], staged_us, shared_us)| {
                    rows += more;
                    Measured { rows, kernel_us, again_us, staged_us, shared_us }
                })
                .collect();
            let crossover = Crossover::choose(measured.clone());
            for (at, m) in measured.iter().enumerate() {
                let (share, us) = m.staging();
                let best = m.shared_us.iter().map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
                prop_assert_eq!(share > 0.0, best < 0.95 * m.staged_us);
                prop_assert_eq!(us, if share > 0.0 { best } else { m.staged_us });
                prop_assert_eq!(crossover.kernel_share(m.rows), share);
                let wins = |m: &Measured| m.staging().1 / 0.9 < (m.kernel_us + m.again_us) / 2.0;
                prop_assert_eq!(m.rows >= crossover.rows, measured[at..].iter().all(wins), "{} rows", m.rows);
            }
        }

        #[test]
        fn medians_are_in_the_middle(mut times in prop::collection::vec(0.0..100.0f64, 0..20)) {
            let Some(found) = median(&mut times) else {
                prop_assert!(times.is_empty());
                return Ok(());
            };
            let below = times.iter().filter(|&&time| time < found).count();
            let above = times.iter().filter(|&&time| time > found).count();
            prop_assert!(times.contains(&found) && below <= times.len() / 2 && above <= times.len() / 2);
        }
    }

    #[test]
    fn the_kernel_takes_less_where_ids_repeat() {
        assert_eq!(kernel_tokens(1000, 0.25, 1.0), 250);
        let repeated = kernel_tokens(1000, 0.25, 0.4);
        assert!((100..130).contains(&repeated), "{repeated}");
        assert_eq!(kernel_tokens(1000, 0.0, 1.0), 0);
        assert_eq!(kernel_tokens(1000, 1.0, 0.0), 0);
    }
}
