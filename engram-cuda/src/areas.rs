//! How staged rows are laid out: slots first, then an area for each group of columns, all in chunks of one size.

use std::ops::Range;

/// Columns that repeat together form a group: the heads of an n-gram order where they are known, else each column by itself.
///
/// Entry `e` of a group is `share` rows, one for each of its columns. An area holds as many entries as there are tokens; where n-grams repeat,
/// it is filled only as far as they are distinct. The slot of (token, layer, group) is the entry's place among the entries of all areas of its
/// layer, or -1 for zero rows; that makes the areas of a layer a table of packed rows, of which slot `s` names rows `s * share` and following.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Areas {
    pub(crate) layers: usize,
    /// Groups of a layer.
    pub(crate) groups: usize,
    /// Columns of a group.
    pub(crate) share: usize,
    pub(crate) row_bytes: usize,
    /// Entries of a chunk.
    pub(crate) entries: usize,
    /// Chunks before the first area.
    pub(crate) slot_chunks: usize,
    /// Chunks of an area.
    pub(crate) area_chunks: usize,
}

impl Areas {
    /// Bytes that a chunk has about: small enough that gather and transfer overlap, large enough that publishing one costs nothing.
    const CHUNK: usize = 64 << 10;

    pub(crate) fn new(layers: usize, columns: usize, share: usize, capacity: usize, row_bytes: usize) -> Self {
        let (groups, capacity) = (columns / share, capacity.max(1));
        let entry_bytes = share * row_bytes;
        // A multiple of 16 entries is a multiple of 16 bytes, whatever the row.
        let entries = (Self::CHUNK / entry_bytes / 16).max(1) * 16;
        let chunk_bytes = entries * entry_bytes;
        let slot_chunks = (capacity * layers * groups * 4).div_ceil(chunk_bytes);
        Self { layers, groups, share, row_bytes, entries, slot_chunks, area_chunks: capacity.div_ceil(entries) }
    }

    /// Bytes of a chunk, a multiple of 16.
    pub(crate) fn chunk_bytes(&self) -> usize {
        self.entries * self.share * self.row_bytes
    }

    /// Chunks of everything.
    pub(crate) fn chunks(&self) -> usize {
        self.slot_chunks + self.layers * self.groups * self.area_chunks
    }

    /// Bytes of everything.
    pub(crate) fn bytes(&self) -> usize {
        self.chunks() * self.chunk_bytes()
    }

    /// The first chunk of an area; areas are numbered through all layers.
    pub(crate) fn first_chunk(&self, area: usize) -> usize {
        self.slot_chunks + area * self.area_chunks
    }

    /// Chunks of each area that a run of `tokens` tokens has.
    pub(crate) fn used(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.entries)
    }

    /// The entries of chunk `k` of an area that has `count`.
    pub(crate) fn entries_of(&self, k: usize, count: usize) -> Range<usize> {
        (k * self.entries).min(count)..((k + 1) * self.entries).min(count)
    }

    /// The slot of an entry of a group, counted inside its layer.
    pub(crate) fn slot(&self, group: usize, entry: usize) -> usize {
        group * self.area_chunks * self.entries + entry
    }

    /// The chunk that has entries `k * entries` and following of a layer, where the entries fill the `used` chunks of its areas one after the other.
    pub(crate) fn plain_chunk(&self, layer: usize, k: usize, used: usize) -> usize {
        self.first_chunk(layer * self.groups + k / used) + k % used
    }

    /// The slot of such an entry.
    pub(crate) fn plain_slot(&self, entry: usize, used: usize) -> usize {
        let k = entry / self.entries;
        self.slot(k / used, k % used * self.entries + entry % self.entries)
    }

    /// Where a layer's areas begin, in bytes.
    pub(crate) fn layer_start(&self, layer: usize) -> usize {
        self.first_chunk(layer * self.groups) * self.chunk_bytes()
    }

    /// Rows of a layer's areas.
    pub(crate) fn layer_rows(&self) -> usize {
        self.groups * self.area_chunks * self.entries * self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_of_slots_lie_in_their_areas_and_apart(
            layers in 1usize..4, groups in 1usize..5, share in 1usize..9, capacity in 1usize..700, row_bytes in 1usize..700,
        ) {
            let areas = Areas::new(layers, groups * share, share, capacity, row_bytes);
            prop_assert_eq!(areas.chunk_bytes() % 16, 0);
            prop_assert!(areas.slot_chunks * areas.chunk_bytes() >= capacity * layers * groups * 4);
            prop_assert!(areas.used(capacity) <= areas.area_chunks);
            for layer in 0..layers {
                for group in 0..groups {
                    for entry in [0, capacity / 2, capacity - 1] {
                        // By the slot, as the kernel finds it; and by the chunk, as the gather does.
                        let row = areas.slot(group, entry) * share;
                        prop_assert!(row + share <= areas.layer_rows());
                        let by_slot = areas.layer_start(layer) + row * row_bytes;
                        let chunk = areas.first_chunk(layer * groups + group) + entry / areas.entries;
                        let by_chunk = chunk * areas.chunk_bytes() + entry % areas.entries * share * row_bytes;
                        prop_assert_eq!(by_slot, by_chunk);
                        prop_assert!(by_slot + share * row_bytes <= areas.bytes());
                    }
                }
            }
        }

        #[test]
        fn plain_slots_and_chunks_agree(
            layers in 1usize..3, groups in 1usize..5, share in 1usize..4, capacity in 1usize..700, tokens in 1usize..700, row_bytes in 1usize..300,
        ) {
            let (tokens, areas) = (tokens.min(capacity), Areas::new(layers, groups * share, share, capacity, row_bytes));
            let used = areas.used(tokens);
            for layer in 0..layers {
                let mut next = 0;
                for k in 0..groups * used {
                    for entry in areas.entries_of(k, tokens * groups) {
                        prop_assert_eq!(entry, next);
                        next += 1;
                        let by_slot = areas.layer_start(layer) + areas.plain_slot(entry, used) * share * row_bytes;
                        let by_chunk = areas.plain_chunk(layer, k, used) * areas.chunk_bytes() + entry % areas.entries * share * row_bytes;
                        prop_assert_eq!(by_slot, by_chunk);
                    }
                }
                prop_assert_eq!(next, tokens * groups);
            }
        }

        #[test]
        fn chunks_take_every_entry_once(capacity in 1usize..3000, count in 0usize..3000) {
            let areas = Areas::new(1, 8, 8, capacity, 264);
            let count = count.min(capacity);
            let taken: Vec<_> = (0..areas.used(capacity)).flat_map(|k| areas.entries_of(k, count)).collect();
            prop_assert_eq!(taken, (0..count).collect::<Vec<_>>());
        }
    }
}
