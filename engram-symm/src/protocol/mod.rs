//! The protocol.
mod machine;
mod mutant;
mod signals;
mod wait;
mod words;

pub use machine::{Failure, Payload, Progress, Protocol, Wait};
#[cfg(loom)]
pub use mutant::Mutant;
pub use signals::{Control, LINE, Signals, Word, signal_bytes};
pub use wait::Patience;
pub use words::{Call, Fault, Operation, Phase};
