//! One safetensors file: its header, read as strictly as it can be read, and written.

pub(crate) mod dtype;
pub(crate) mod header;
pub(crate) mod json;
pub(crate) mod plan;
pub(crate) mod regular;
