//! Words by which kernels and the host talk.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::Device;
use crate::error::Error;
use crate::memory::PinnedBuffer;

/// An array of u64 in pinned host memory, zero when new: kernels write and read it at [`MappedWords::address`], the host without asking the driver.
pub struct MappedWords {
    memory: PinnedBuffer,
}

impl MappedWords {
    /// An array of `words` words.
    ///
    /// # Errors
    /// As [`PinnedBuffer::new`].
    pub fn new(device: &Device, words: usize) -> Result<Self, Error> {
        Ok(Self { memory: PinnedBuffer::new(device, words.saturating_mul(size_of::<u64>()))? })
    }

    /// Where the device sees the first word.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Words in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.bytes() / size_of::<u64>()
    }

    /// Whether it has no words.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads a word; what its writer had released before is visible after it (acquire).
    ///
    /// # Panics
    /// When there is no such word.
    #[must_use]
    pub fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    /// Writes a word, after all that this thread has written before (release).
    ///
    /// # Panics
    /// When there is no such word.
    pub fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len(), "word {index} of {}", self.len());
        // SAFETY: the word lies inside the memory.
        let word = unsafe { self.memory.as_ptr().cast::<u64>().add(index) };
        // SAFETY: memory that starts at a page holds words at aligned addresses, it lives as long as `self`, and everybody reads and writes whole
        // words of it: the host by atomics, kernels as the device's equal of them.
        unsafe { AtomicU64::from_ptr(word) }
    }
}

impl fmt::Debug for MappedWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedWords({} at {:#x})", self.len(), self.address())
    }
}
