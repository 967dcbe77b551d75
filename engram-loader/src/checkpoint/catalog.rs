use engram_ple::TableFormat;

use crate::tiers::extents::TableExtents;

/// The tables of a checkpoint that are all there and agree with the config, in the order of the config's layout.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    tables: Vec<CatalogTable>,
}

/// One table of a [`Catalog`]: what it is and where its rows lie.
#[derive(Debug, Clone)]
pub struct CatalogTable {
    pub(crate) layer: u32,
    pub(crate) extents: TableExtents,
}

impl Catalog {
    pub(crate) fn new(tables: Vec<CatalogTable>) -> Self {
        Self { tables }
    }

    /// The tables, in the order of the layers in every output.
    #[must_use]
    pub fn tables(&self) -> &[CatalogTable] {
        &self.tables
    }

    /// The table of a 0-based backbone layer.
    #[must_use]
    pub fn table(&self, layer: u32) -> Option<&CatalogTable> {
        self.tables.iter().find(|table| table.layer == layer)
    }
}

impl CatalogTable {
    /// The 0-based backbone layer that the table feeds.
    #[must_use]
    pub fn layer(&self) -> u32 {
        self.layer
    }

    /// How rows are stored; its width is the table's.
    #[must_use]
    pub fn format(&self) -> &TableFormat {
        self.extents.format()
    }

    /// Rows on disk, padding included.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.extents.rows()
    }

    /// Where the values and row scales of every shard lie: what the tiers read from.
    #[must_use]
    pub fn extents(&self) -> &TableExtents {
        &self.extents
    }
}
