//! What lies beneath lookups and prefetchers, for crates that bring kernels of their own.
//!
//! A [`Module`] holds the kernels, a [`TableArray`] shows them the tables, [`MappedWords`] let them talk to the host, and a [`Mark`] orders streams,
//! inside captures and outside. A [`PrefetchOrder`] is the order in which a prefetcher's calls may come. [`vmm`] is memory that other processes can map. None of it checks what a kernel does with an address.

pub use crate::array::TableArray;
pub use crate::launch::Module;
pub use crate::memory::{fill, read, write};
pub use crate::prefetch_state::{Dependency, Order as PrefetchOrder};
pub use crate::stream::Mark;
pub use crate::words::MappedWords;

pub mod vmm {
    //! Device memory apart from the addresses at which it is seen.
    //!
    //! [`Physical`] memory has no address until it is mapped into [`Reserved`] addresses. It can be passed to other
    //! processes, which map it for devices of theirs; addresses outlive what is mapped into them.

    pub use crate::vmm::{HandleKind, Physical, Reserved};
}
