//! Judging a checkpoint: every fault has a code, one cause gives one fault, and all faults go into one report.

pub(crate) mod announced;
pub(crate) mod constants;
pub(crate) mod deep;
pub(crate) mod report;
pub(crate) mod scale;
pub(crate) mod table;
pub(crate) mod vocabulary;
