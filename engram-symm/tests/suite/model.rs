//! Tables, ids, and the rows that they give, by the shortest way there is.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use engram_core::{HeadShards, Ownership, RowShards};
use engram_ple::{FormatKind, SourceError, SynthSource, TableFormat, TableSource, mx};
use engram_symm::{Config, Ids, Layer, Output, Part};

/// Random numbers that all ranks draw alike: SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// What an exchange of a group moves.
#[derive(Clone, Debug)]
pub struct Shape {
    pub world: usize,
    pub columns: usize,
    pub layers: usize,
    /// Whether whole columns are owned, or else rows.
    pub heads: bool,
    pub kind: FormatKind,
    pub width: usize,
    pub capacity: u32,
    pub output: Output,
    pub deadline: Duration,
}

impl Shape {
    pub fn new(world: usize, columns: usize) -> Self {
        Self {
            world,
            columns,
            layers: 2,
            heads: true,
            kind: FormatKind::E4m3E8m0x32,
            width: 256,
            capacity: 8,
            output: Output::Packed,
            deadline: Duration::from_secs(60),
        }
    }

    /// A shape of any kind.
    pub fn random(world: usize, random: &mut Random) -> Self {
        let kinds = [
            (FormatKind::E4m3E8m0x32, 256),
            (FormatKind::E4m3E8m0x32, 64),
            (FormatKind::Bf16, 16),
            (FormatKind::E4m3Global, 20),
            (FormatKind::Bf16, 6),
            (FormatKind::F16, 5),
            (FormatKind::F32, 3),
        ];
        let outputs = [Output::Packed, Output::Bf16, Output::F16, Output::F32, Output::Mx];
        let (kind, width) = kinds[random.below(kinds.len())];
        let outputs: Vec<_> = outputs.into_iter().filter(|output| output.takes(kind)).collect();
        Self {
            columns: [1, 5, 16, 23, 24][random.below(5)],
            layers: 1 + random.below(3),
            heads: random.below(2) == 0,
            kind,
            width,
            capacity: [1, 3, 8, 8, 8, 8, 8, 130][random.below(8)],
            output: outputs[random.below(outputs.len())],
            ..Self::new(world, 1)
        }
    }

    pub fn format(&self, layer: usize) -> TableFormat {
        // Layers of one table may have different scales.
        let scale = (self.kind == FormatKind::E4m3Global).then_some(0.25 / (layer as f32 + 1.0));
        TableFormat::new(self.kind, self.width, scale).unwrap()
    }

    /// Rows of a column, of different sizes.
    fn column_rows(&self, layer: usize, column: usize) -> Range<u64> {
        let size = |column: usize| (column % 5 + 2 + layer) as u64;
        let start = (0..column).map(size).sum();
        start..start + size(column)
    }

    /// Rows of a layer's table; a few belong to no column.
    pub fn rows(&self, layer: usize) -> u64 {
        self.column_rows(layer, self.columns - 1).end + 3
    }

    pub fn table(&self, layer: usize) -> SynthSource {
        SynthSource::new(self.format(layer), 7, layer as u32, self.rows(layer))
    }

    fn ownership(&self, layer: usize) -> Ownership {
        if self.heads {
            Ownership::Heads(HeadShards::new(self.columns, self.world).unwrap())
        } else {
            Ownership::Rows(RowShards::new(self.rows(layer), self.world).unwrap())
        }
    }

    pub fn config(&self) -> Config {
        let layer = |layer| Layer { format: self.format(layer), ownership: self.ownership(layer) };
        let layers = (0..self.layers).map(layer).collect();
        Config::new(self.columns, layers, self.capacity, self.output).with_deadline(self.deadline)
    }

    /// The rows that `rank` owns of a layer.
    pub fn owned(&self, layer: usize, rank: usize) -> Range<u64> {
        match self.ownership(layer) {
            Ownership::Heads(shards) => {
                let columns = shards.columns_of(rank);
                if columns.is_empty() {
                    return 0..0;
                }
                self.column_rows(layer, columns.start).start..self.column_rows(layer, columns.end - 1).end
            }
            Ownership::Rows(shards) => shards.range(rank),
        }
    }

    /// What `rank` serves; a rank that owns nothing brings nothing.
    pub fn parts(&self, rank: usize, tables: Tables) -> Vec<Part> {
        let owned: Vec<_> = (0..self.layers).map(|layer| self.owned(layer, rank)).collect();
        if owned.iter().all(Range::is_empty) {
            return Vec::new();
        }
        let part = |(layer, rows): (usize, Range<u64>)| Part {
            first_row: rows.start,
            source: Arc::new(Window { table: self.table(layer), rows, tables }),
        };
        owned.into_iter().enumerate().map(part).collect()
    }

    /// The ids of one rank in one step: most of them rows of their column, some none, some rows of another column, and
    /// some that no table has.
    pub fn ids(&self, rank: usize, step: u64, tokens: usize) -> Vec<i32> {
        let mut random = Random(step.wrapping_mul(1000).wrapping_add(rank as u64));
        let mut ids = Vec::with_capacity(tokens * self.layers * self.columns);
        for _ in 0..tokens {
            for layer in 0..self.layers {
                for column in 0..self.columns {
                    let rows = self.column_rows(layer, column);
                    ids.push(match random.below(16) {
                        0 => -1,
                        1 => random.below(self.rows(layer) as usize + 3) as i32,
                        2 => [i32::MIN, -2, i32::MAX][random.below(3)],
                        _ => rows.start as i32 + random.below((rows.end - rows.start) as usize) as i32,
                    });
                }
            }
        }
        ids
    }

    /// All of `ids`.
    pub fn view<'a>(&self, ids: &'a [i32]) -> Ids<'a> {
        Ids::new(ids, self.layers, self.columns).unwrap()
    }

    /// The packed row of an id, if some rank owns it.
    fn row(&self, layer: usize, column: usize, id: i32) -> Vec<u8> {
        let owner = match self.ownership(layer) {
            Ownership::Heads(shards) => shards.owner_of_column(column),
            Ownership::Rows(shards) => shards.owner_of(id.into()),
        };
        let mut row = vec![0; self.format(layer).row_bytes()];
        if let (Some(owner), Ok(id)) = (owner, u64::try_from(id))
            && self.owned(layer, owner).contains(&id)
        {
            self.table(layer).read_range(id..id + 1, &mut row).unwrap();
        }
        row
    }

    /// The rows that an exchange must give, as [`super::Exchanger::run`] returns them.
    pub fn expected(&self, ids: &[i32], slot: u32) -> Vec<Vec<u8>> {
        let slot = slot as usize;
        let at = |token, layer, column| {
            let index = (token * self.layers + layer) * self.columns + column;
            self.row(layer, column, ids.get(index).copied().unwrap_or(-1))
        };
        let rows =
            |layer: usize| (0..slot).flat_map(move |token| (0..self.columns).map(move |column| (token, layer, column)));
        if self.output == Output::Packed {
            let mut packed = Vec::new();
            for token in 0..slot {
                for layer in 0..self.layers {
                    (0..self.columns).for_each(|column| packed.extend(at(token, layer, column)));
                }
            }
            return vec![packed];
        }
        let mut out = Vec::new();
        for layer in 0..self.layers {
            let format = self.format(layer);
            let mut values = Vec::new();
            for (token, layer, column) in rows(layer) {
                let row = at(token, layer, column);
                match self.output {
                    Output::Bf16 => {
                        let mut numbers = vec![half::bf16::ZERO; self.width];
                        format.decode_bf16(&row, &mut numbers);
                        values.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
                    }
                    Output::F16 => {
                        let mut numbers = vec![half::f16::ZERO; self.width];
                        format.decode_f16(&row, &mut numbers);
                        values.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
                    }
                    _ => values.extend(&row[..format.value_bytes()]),
                }
            }
            out.push(values);
            if self.output == Output::Mx {
                let groups = self.columns * self.width / 32;
                let mut scales = vec![0; mx::layer_bytes(slot, self.columns * self.width)];
                for (token, layer, column) in rows(layer) {
                    let row = at(token, layer, column);
                    for (index, &scale) in row[self.width..].iter().enumerate() {
                        let group = column * self.width / 32 + index;
                        scales[mx::scale_offset(token, group, groups.div_ceil(4))] = scale;
                    }
                }
                out.push(scales);
            }
        }
        out
    }
}

/// Whether tables can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    Sound,
    Broken,
}

/// Part of a table.
struct Window {
    table: SynthSource,
    rows: Range<u64>,
    tables: Tables,
}

impl TableSource for Window {
    fn format(&self) -> &TableFormat {
        self.table.format()
    }

    fn rows(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    fn read_range(&self, rows: Range<u64>, out: &mut [u8]) -> Result<(), SourceError> {
        if self.tables == Tables::Broken {
            return Err(SourceError::read(rows, "the disk is gone"));
        }
        SourceError::check_range(self.format(), self.rows(), &rows, out)?;
        self.table.read_range(self.rows.start + rows.start..self.rows.start + rows.end, out)
    }
}
