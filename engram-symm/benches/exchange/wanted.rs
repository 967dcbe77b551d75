//! What the arguments say.

use crate::fetch::Way;

const SLOTS: [u32; 12] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];
/// Tokens of a rank at full size besides.
const PREFILL: u32 = 8192;

pub(crate) struct Wanted {
    /// Of each rank and layer, unless tables have their full size.
    pub(crate) rows: u64,
    pub(crate) full_size: bool,
    /// Most that all ranks pin together.
    pub(crate) pinned_bytes: Option<u64>,
    pub(crate) ways: Vec<Way>,
    pub(crate) multiprocessors: Option<u32>,
    pub(crate) ranks: Option<u32>,
}

impl Wanted {
    pub(crate) fn new(arguments: &[String]) -> Self {
        let mut wanted = Self {
            rows: 48_000_000,
            full_size: false,
            pinned_bytes: None,
            ways: vec![Way::Chosen, Way::Barrier],
            multiprocessors: None,
            ranks: None,
        };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} without a value"));
            match argument.as_str() {
                "--full-size" => wanted.full_size = true,
                "--pinned-gib" => wanted.pinned_bytes = Some(value().parse::<u64>().unwrap() << 30),
                "--ways" => wanted.ways = value().split(',').map(Way::named).collect(),
                "--multiprocessors" => wanted.multiprocessors = Some(value().parse().unwrap()),
                "--ranks" => wanted.ranks = Some(value().parse().unwrap()),
                rows => wanted.rows = rows.parse().expect("rows of a rank and layer"),
            }
        }
        wanted
    }

    /// Tokens of a rank in the exchanges that are measured.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u32> {
        SLOTS.into_iter().chain(self.full_size.then_some(PREFILL))
    }

    /// Tokens of the largest.
    pub(crate) fn capacity(&self) -> u32 {
        self.slots().max().unwrap_or(1)
    }
}
