//! Where the rows of a table are read from: the page cache, the device, or memory of the table's own.

pub(crate) mod direct;
pub(crate) mod extents;
pub(crate) mod file;
pub(crate) mod gather;
pub(crate) mod mapped;
pub(crate) mod resident;
pub(crate) mod slots;
