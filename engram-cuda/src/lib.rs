#![doc = include_str!("../README.md")]
#![cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "the host logic of the CUDA half is built and tested everywhere")
)]

mod areas;
mod calibrate;
mod copy;
mod distinct;
mod error;
mod gather;
mod ids;
pub mod kernels;
mod load;
mod nan;
mod plan;
mod prefetch_state;

#[cfg(feature = "cuda")]
mod array;
#[cfg(feature = "cuda")]
mod auto;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod hash;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod lookup;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod prefetch;
#[cfg(feature = "cuda")]
pub mod raw;
#[cfg(feature = "cuda")]
mod rows;
#[cfg(feature = "cuda")]
mod staged;
#[cfg(feature = "cuda")]
mod stream;
#[cfg(feature = "cuda")]
mod sys;
#[cfg(feature = "cuda")]
mod table;
#[cfg(feature = "cuda")]
mod view;
#[cfg(feature = "cuda")]
mod vmm;
#[cfg(feature = "cuda")]
mod words;

pub use calibrate::{Crossover, Measured};
pub use error::{CudaVersion, DriverCode, DriverError, Error};
pub use gather::GatherError;
pub use ids::{IdShape, IdType, IdsError, RowForm};
pub use load::Progress;
pub use prefetch_state::{PrefetchError, Scope};

#[cfg(feature = "cuda")]
pub use device::Device;
#[cfg(feature = "cuda")]
pub use hash::{DeviceBatch, Hasher};
#[cfg(feature = "cuda")]
pub use lookup::{Lookup, LookupOptions};
#[cfg(feature = "cuda")]
pub use memory::{DeviceBuffer, PinnedBuffer, Plain, RegisteredMemory};
#[cfg(feature = "cuda")]
pub use nan::FreeOfNan;
#[cfg(feature = "cuda")]
pub use prefetch::{PrefetchOptions, Prefetcher};
#[cfg(feature = "fault-injection")]
pub use prefetch_state::Dependency;
#[cfg(feature = "cuda")]
pub use staged::HostIds;
#[cfg(feature = "cuda")]
pub use stream::{Event, Graph, Stream, StreamRef};
#[cfg(feature = "cuda")]
pub use table::{Placement, Table};
#[cfg(feature = "cuda")]
pub use view::{DeviceView, Ids, Output};
