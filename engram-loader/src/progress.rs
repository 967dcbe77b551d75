//! How far a long job has come.

/// Receives the progress of a job that reads or writes many bytes. `advance` may be called from several threads at once.
pub trait Progress: Sync {
    /// A job of `total` bytes begins. `what` reads as the start of a line: `reading`, `writing`.
    fn begin(&self, what: &str, total: u64);

    /// `bytes` more of the current job are done.
    fn advance(&self, bytes: u64);

    /// The current job is over, whether or not it reached its total.
    fn end(&self) {}
}

/// Progress that nobody looks at.
impl Progress for () {
    fn begin(&self, _what: &str, _total: u64) {}
    fn advance(&self, _bytes: u64) {}
}
