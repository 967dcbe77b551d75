//! The backend without a GPU: memory shared between processes by descriptor.

mod memory;
mod room;

pub use memory::HostMemory;
