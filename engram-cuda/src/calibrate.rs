//! Choosing how to read a table in pinned memory, from measurements.

/// One batch size, and what it took in microseconds: a kernel that reads the host by itself, staging by threads, and both at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Rows of the batch.
    pub rows: usize,
    /// The kernel alone.
    pub kernel_us: f64,
    /// Staging alone.
    pub staged_us: f64,
    /// Staging, while the kernel takes a share of the batch.
    pub shared_us: f64,
}

/// Which way a batch goes: the outcome of a calibration.
#[derive(Clone, Debug, PartialEq)]
pub struct Crossover {
    /// From this many rows on, batches are staged; smaller ones are read by the kernel. `usize::MAX` where the kernel always wins.
    pub rows: usize,
    /// The share of a staged batch that the kernel takes meanwhile, if all its ids are distinct; 0 where that does not pay.
    pub kernel_share: f64,
    /// What was measured, by ascending size.
    pub measured: Vec<Measured>,
}

/// The share of a batch that the kernel should take so that both ends at the same time.
pub(crate) fn fair_share(kernel_us: f64, staged_us: f64) -> f64 {
    staged_us / (staged_us + kernel_us)
}

impl Crossover {
    /// Staging has to be clearly faster, since it keeps the host's threads busy, and since the kernel was measured at its worst: rows that it has
    /// met before, as steps that follow each other ask for, it reads in less time.
    const CLEARLY: f64 = 0.75;

    /// Chooses from measurements by ascending size.
    pub(crate) fn choose(measured: Vec<Measured>) -> Self {
        let staged = |m: &Measured| m.staged_us.min(m.shared_us) / Self::CLEARLY;
        // The kernel keeps everything below the last size that it wins.
        let last = measured.iter().rposition(|m| m.kernel_us <= staged(m));
        let rows = match last {
            None => measured.first().map_or(usize::MAX, |m| m.rows),
            Some(last) => match measured.get(last + 1) {
                None => usize::MAX,
                // Between the two sizes the lead goes over about where straight lines through the measurements meet.
                Some(next) => {
                    let (here, there) = (&measured[last], next);
                    let (behind, ahead) = (staged(here) - here.kernel_us, there.kernel_us - staged(there));
                    #[expect(
                        clippy::cast_possible_truncation,
                        clippy::cast_sign_loss,
                        clippy::cast_precision_loss,
                        reason = "between two row counts"
                    )]
                    let step = ((there.rows - here.rows) as f64 * (behind / (behind + ahead))) as usize;
                    here.rows + step
                }
            },
        };
        let kernel_share = match measured.last() {
            Some(m) if m.shared_us < m.staged_us => fair_share(m.kernel_us, m.staged_us),
            _ => 0.0,
        };
        Self { rows, kernel_share, measured }
    }

    /// Tokens of a staged batch that the kernel takes, of `tokens` tokens of which the threads find a share of `distinct` to be distinct.
    pub(crate) fn kernel_tokens(&self, tokens: usize, distinct: f64) -> usize {
        // With repeats the threads are faster by as much; the kernel reads every row.
        let share = self.kernel_share;
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(points: &[(usize, f64, f64, f64)]) -> Vec<Measured> {
        points
            .iter()
            .map(|&(rows, kernel_us, staged_us, shared_us)| Measured { rows, kernel_us, staged_us, shared_us })
            .collect()
    }

    #[test]
    fn the_lead_goes_over_between_the_sizes_that_disagree() {
        let points = [(1024, 10.0, 60.0, 65.0), (4096, 80.0, 100.0, 90.0), (16_384, 400.0, 250.0, 200.0)];
        let crossover = Crossover::choose(measured(&points));
        assert!((4097..9000).contains(&crossover.rows), "{}", crossover.rows);
        assert!((0.38..0.39).contains(&crossover.kernel_share), "{}", crossover.kernel_share);
    }

    #[test]
    fn one_way_may_always_win() {
        let kernel = Crossover::choose(measured(&[(1024, 10.0, 60.0, 70.0), (16_384, 100.0, 250.0, 260.0)]));
        assert_eq!((kernel.rows, kernel.kernel_share), (usize::MAX, 0.0));
        let staged = Crossover::choose(measured(&[(1024, 90.0, 60.0, 61.0), (16_384, 500.0, 250.0, 260.0)]));
        assert_eq!((staged.rows, staged.kernel_share), (1024, 0.0));
        assert_eq!(Crossover::choose(Vec::new()).rows, usize::MAX);
        // A small size that staging wins by accident does not count against a larger one that it loses.
        let noisy = Crossover::choose(measured(&[
            (1024, 70.0, 60.0, 61.0),
            (4096, 80.0, 90.0, 95.0),
            (16_384, 500.0, 250.0, 240.0),
        ]));
        assert!(noisy.rows > 4096);
    }

    #[test]
    fn the_kernel_takes_less_where_ids_repeat() {
        let crossover = Crossover { rows: 0, kernel_share: 0.25, measured: Vec::new() };
        assert_eq!(crossover.kernel_tokens(1000, 1.0), 250);
        let repeated = crossover.kernel_tokens(1000, 0.4);
        assert!((100..130).contains(&repeated), "{repeated}");
        assert_eq!(Crossover { kernel_share: 0.0, ..crossover }.kernel_tokens(1000, 1.0), 0);
    }
}
