//! Finding what repeats: n-grams (or ids) of a batch that were met before in it.

/// What is known of one place of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    /// Nothing is there.
    Nothing,
    /// Something that is not compared with others.
    Alone,
    /// Something with this hash.
    Like(u64),
}

/// Numbers what is distinct in a batch, in order of first appearance.
#[derive(Debug)]
pub(crate) struct Distinct {
    /// Open addressing: 0, or 1 + the number of a key. Twice as large as the keys can fill.
    buckets: Vec<u32>,
}

impl Distinct {
    /// For batches of up to `capacity` keys.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { buckets: vec![0; (capacity.max(1) * 2).next_power_of_two()] }
    }

    /// The number of places where nothing is.
    pub(crate) const NOTHING: u32 = u32::MAX;

    /// Gives each of `count` places its number in `number(place, number)`, and writes the first place of each number to `first`.
    /// Returns how many numbers there are. `same` tells whether two places that are alike are equal.
    pub(crate) fn number(
        &mut self,
        count: usize,
        key: impl Fn(usize) -> Key,
        same: impl Fn(usize, usize) -> bool,
        first: &mut [u32],
        mut number: impl FnMut(usize, u32),
    ) -> usize {
        // Small batches use a small part of the table, which stays in the cache.
        let buckets = (count.max(1) * 2).next_power_of_two().min(self.buckets.len());
        let buckets = &mut self.buckets[..buckets];
        buckets.fill(0);
        let mask = buckets.len() - 1;
        let mut found: u32 = 0;
        for (place, index) in (0..count).zip(0u32..) {
            let known = match key(place) {
                Key::Nothing => Some(Self::NOTHING),
                Key::Alone => None,
                Key::Like(hash) => {
                    let mut bucket = spread(hash) & mask;
                    loop {
                        match buckets[bucket] {
                            0 => {
                                buckets[bucket] = found + 1;
                                break None;
                            }
                            other if same(place, first[other as usize - 1] as usize) => break Some(other - 1),
                            _ => bucket = (bucket + 1) & mask,
                        }
                    }
                }
            };
            let known = known.unwrap_or_else(|| {
                first[found as usize] = index;
                found += 1;
                found - 1
            });
            number(place, known);
        }
        found as usize
    }
}

/// Spreads hashes over buckets: mixes differ in their high bits, ids in their low ones.
fn spread(hash: u64) -> usize {
    usize::try_from(hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).unwrap_or(0)
}

/// Decides whether looking for repeats pays.
///
/// It looks in every batch while batches repeat. After one that hardly does, it looks again only now and then, twice as rarely after each
/// disappointment up to a limit, so that the cost on batches without repeats vanishes.
#[derive(Debug, Default)]
pub(crate) struct Switch {
    skip: u32,
    patience: u32,
}

impl Switch {
    /// Batches that are not looked at between two attempts, at most.
    const RAREST: u32 = 256;
    /// From this share of distinct keys on, finding the repeats costs about what it saves.
    const MANY: f32 = 0.92;

    /// Whether to look in the batch at hand.
    pub(crate) fn look(&mut self) -> bool {
        self.skip = self.skip.saturating_sub(1);
        self.skip == 0
    }

    /// What a look has found, as the share of keys that were distinct.
    pub(crate) fn found(&mut self, share: f32) {
        if share < Self::MANY {
            *self = Self::default();
        } else {
            self.patience = (self.patience * 2).clamp(32, Self::RAREST);
            self.skip = self.patience;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Keys of `None` are nothing; a negative one is alone; of the others, many have one hash.
    fn number(distinct: &mut Distinct, keys: &[Option<i64>]) -> (usize, Vec<u32>, Vec<u32>) {
        let mut first = vec![u32::MAX; keys.len()];
        let mut numbers = vec![u32::MAX; keys.len()];
        let key = |place: usize| match keys[place] {
            None => Key::Nothing,
            Some(..0) => Key::Alone,
            Some(key) => Key::Like(key.cast_unsigned() % 7),
        };
        let same = |a: usize, b: usize| keys[a] == keys[b];
        let found = distinct.number(keys.len(), key, same, &mut first, |place, number| numbers[place] = number);
        first.truncate(found);
        (found, first, numbers)
    }

    proptest! {
        #[test]
        fn numbers_are_those_of_a_map(batches in prop::collection::vec(
            prop::collection::vec(prop::option::weighted(0.9, prop_oneof![-3i64..40, any::<i64>()]), 0..200), 1..5,
        )) {
            let mut distinct = Distinct::new(200);
            for keys in batches {
                let (mut map, mut first, mut numbers) = (HashMap::new(), vec![], vec![]);
                for (place, &key) in keys.iter().enumerate() {
                    let Some(key) = key else {
                        numbers.push(Distinct::NOTHING);
                        continue;
                    };
                    let next = first.len();
                    let number = if key < 0 { next } else { *map.entry(key).or_insert(next) };
                    if number == next {
                        first.push(u32::try_from(place).unwrap());
                    }
                    numbers.push(u32::try_from(number).unwrap());
                }
                prop_assert_eq!(number(&mut distinct, &keys), (first.len(), first, numbers));
            }
        }
    }

    #[test]
    fn batches_without_repeats_are_looked_at_ever_more_rarely() {
        let mut switch = Switch::default();
        let mut looks = 0;
        for _ in 0..10_000 {
            if switch.look() {
                looks += 1;
                switch.found(1.0);
            }
        }
        assert!((30..100).contains(&looks), "{looks} looks");
    }

    #[test]
    fn repeats_switch_it_on_again() {
        let mut switch = Switch::default();
        assert!(switch.look());
        switch.found(0.99);
        let waited = (0..1000).take_while(|_| !switch.look()).count();
        assert!(waited <= 32, "{waited} batches");
        switch.found(0.5);
        assert!((0..100).all(|_| {
            let look = switch.look();
            switch.found(0.5);
            look
        }));
    }
}
