//! Primes in ascending order.

/// Numbers sieved at once. Gaps between primes below 2^32 are at most 336, so a window always holds some.
const WINDOW: u64 = 16 * 1024;
/// A little past the square root of the largest number that is ever sieved, 2^31 + 2 windows.
const ROOT: u64 = 46_400;

/// The primes from a start on: a sieve of Eratosthenes over one window after another.
pub(crate) struct Primes {
    base: Vec<u64>,
    window: u64,
    composite: Vec<bool>,
    next: usize,
}

impl Primes {
    /// Primes from `start` on, `start` included, exact up to 2^31 + 16,384.
    pub(crate) fn from(start: u32) -> Self {
        let mut small = vec![false; index(ROOT)];
        let mut base = Vec::with_capacity(4800);
        for number in 2..ROOT {
            if !small[index(number)] {
                base.push(number);
                mark(&mut small, number * number, number);
            }
        }
        let mut primes = Self { base, window: start.max(2).into(), composite: Vec::new(), next: 0 };
        primes.sieve();
        primes
    }

    fn sieve(&mut self) {
        self.next = 0;
        self.composite.clear();
        self.composite.resize(index(WINDOW), false);
        let end = self.window + WINDOW;
        for &prime in self.base.iter().take_while(|&&prime| prime * prime < end) {
            let first = (prime * prime).max(self.window.next_multiple_of(prime));
            mark(&mut self.composite, first - self.window, prime);
        }
    }
}

impl Iterator for Primes {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        loop {
            if let Some(ahead) = self.composite[self.next..].iter().position(|composite| !composite) {
                let found = self.next + ahead;
                self.next = found + 1;
                return Some(self.window + found as u64);
            }
            self.window += WINDOW;
            self.sieve();
        }
    }
}

fn mark(composite: &mut [bool], first: u64, step: u64) {
    for flag in composite.iter_mut().skip(index(first)).step_by(index(step)) {
        *flag = true;
    }
}

/// Sieve positions are below 2^32.
#[expect(clippy::cast_possible_truncation, reason = "positions inside a window or below the square of ROOT")]
const fn index(position: u64) -> usize {
    position as usize
}

#[cfg(test)]
mod tests {
    use super::Primes;

    fn by_division(number: u64) -> bool {
        number > 1 && (2..).take_while(|d| d * d <= number).all(|d| !number.is_multiple_of(d))
    }

    #[test]
    fn small_starts_give_every_prime() {
        for start in 0..400_u32 {
            let expected: Vec<u64> = (start.into()..).filter(|&n| by_division(n)).take(60).collect();
            assert_eq!(Primes::from(start).take(60).collect::<Vec<_>>(), expected, "from {start}");
        }
    }

    #[test]
    fn windows_join_without_loss() {
        let expected: Vec<u64> = (0..100_000).filter(|&n| by_division(n)).collect();
        assert_eq!(Primes::from(0).take(expected.len()).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_last_primes_of_the_domain() {
        for start in [16_000_000_u32, 46_337 * 46_337 - 5, 2_147_400_000, 2_147_483_647, 2_147_483_648] {
            let expected: Vec<u64> = (u64::from(start)..).filter(|&n| by_division(n)).take(20).collect();
            assert_eq!(Primes::from(start).take(20).collect::<Vec<_>>(), expected, "from {start}");
        }
    }
}
