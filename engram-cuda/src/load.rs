//! Reading a table's rows to where they will live, on several threads, looking for NaN on the way.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, mpsc};

use engram_ple::TableSource;

use crate::error::Error;
use crate::plan;

/// How far a load has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Rows in place.
    pub rows_done: u64,
    /// Rows to load.
    pub rows: u64,
}

/// Where a loading thread puts rows: first memory to read them into, then the place that they go to.
pub(crate) trait Destination {
    /// Gives `fill` memory for the rows `at` (counted from the first row of the load), and takes the rows over when it has filled them.
    fn put(&mut self, at: Range<u64>, fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Error>) -> Result<(), Error>;

    /// Waits until all rows are in place.
    fn finish(&mut self) -> Result<(), Error>;
}

/// Loads `rows` of the source in pieces of `piece` rows, each thread through a destination of its own. Returns a row that has a NaN
/// among its values or scales, if there is one.
///
/// `progress` is called on this thread. The first error ends the load.
pub(crate) fn load<D: Destination>(
    source: &dyn TableSource,
    rows: Range<u64>,
    piece: u64,
    threads: usize,
    destination: impl Fn() -> Result<D, Error> + Sync,
    progress: &mut dyn FnMut(Progress),
) -> Result<Option<u64>, Error> {
    let total = rows.end - rows.start;
    let pieces = Mutex::new(plan::chunks(total, piece));
    let nan = OnceLock::new();
    let stop = AtomicBool::new(false);
    let work = |report: &mpsc::Sender<u64>| -> Result<(), Error> {
        let mut destination = destination()?;
        while !stop.load(Ordering::Relaxed) {
            let next = pieces.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
            let Some(at) = next else { break };
            let asked = rows.start + at.start..rows.start + at.end;
            let count = at.end - at.start;
            destination.put(at, &mut |out| {
                source.read_range(asked.clone(), out)?;
                if nan.get().is_none()
                    && let Some(row) = source.format().nan_rows(out).next()
                {
                    let _ = nan.set(asked.start + row as u64);
                }
                Ok(())
            })?;
            let _ = report.send(count);
        }
        destination.finish()
    };
    let work = |report: mpsc::Sender<u64>| {
        let result = work(&report);
        if result.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        result
    };
    std::thread::scope(|scope| {
        let (report, reports) = mpsc::channel();
        let threads = u64::try_from(threads).unwrap_or(1).clamp(1, total.div_ceil(piece.max(1)).max(1));
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                let report = report.clone();
                scope.spawn(|| work(report))
            })
            .collect();
        drop(report);
        let mut rows_done = 0;
        for count in reports {
            rows_done += count;
            progress(Progress { rows_done, rows: total });
        }
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(nan.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_ple::{FormatKind, MemorySource, SourceError, SynthSource, TableFormat};

    /// Rows in a plain vector that all threads write into.
    struct Shelf<'a>(&'a Mutex<Vec<u8>>, usize);

    impl Destination for Shelf<'_> {
        fn put(&mut self, at: Range<u64>, fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Error>) -> Result<(), Error> {
            let (start, end) = (usize::try_from(at.start).unwrap() * self.1, usize::try_from(at.end).unwrap() * self.1);
            let mut rows = vec![0; end - start];
            fill(&mut rows)?;
            self.0.lock().unwrap()[start..end].copy_from_slice(&rows);
            Ok(())
        }

        fn finish(&mut self) -> Result<(), Error> {
            Ok(())
        }
    }

    fn shelf(source: &dyn TableSource, rows: Range<u64>) -> (Result<Option<u64>, Error>, Vec<u8>, Vec<Progress>) {
        let row_bytes = source.format().row_bytes();
        let store = Mutex::new(vec![0xaa; usize::try_from(rows.end - rows.start).unwrap() * row_bytes]);
        let mut seen = Vec::new();
        let nan = load(source, rows, 7, 3, || Ok(Shelf(&store, row_bytes)), &mut |progress| seen.push(progress));
        (nan, store.into_inner().unwrap(), seen)
    }

    #[test]
    fn only_the_asked_rows_arrive_and_progress_ends_at_all_of_them() {
        let format = TableFormat::new(FormatKind::E4m3E8m0x32, 64, None).unwrap();
        let source = SynthSource::new(format.clone(), 1, 0, 1000);
        let mut expected = vec![0; 123 * format.row_bytes()];
        source.read_range(500..623, &mut expected).unwrap();
        let (nan, rows, seen) = shelf(&source, 500..623);
        assert_eq!(nan.unwrap(), None);
        assert_eq!(rows, expected);
        assert_eq!(seen.last(), Some(&Progress { rows_done: 123, rows: 123 }));
        assert!(seen.windows(2).all(|pair| pair[0].rows_done < pair[1].rows_done));
    }

    #[test]
    fn a_nan_code_or_a_nan_scale_anywhere_is_found() {
        let format = TableFormat::new(FormatKind::E4m3E8m0x32, 64, None).unwrap();
        for (byte, value, row) in [(66 * 29, 0x7f, 29), (66 * 30 - 3, 0xff, 29), (66 * 12 + 64, 0xff, 12)] {
            let mut bytes = vec![0x11; 66 * 30];
            let found = |bytes| shelf(&MemorySource::new(format.clone(), bytes).unwrap(), 2..30).0.unwrap();
            assert_eq!(found(bytes.clone()), None);
            bytes[byte] = value;
            assert_eq!(found(bytes), Some(row), "byte {byte}");
        }
    }

    struct Failing(TableFormat);

    impl TableSource for Failing {
        fn format(&self) -> &TableFormat {
            &self.0
        }

        fn rows(&self) -> u64 {
            100
        }

        fn read_range(&self, rows: Range<u64>, _: &mut [u8]) -> Result<(), SourceError> {
            if rows.contains(&60) { Err(SourceError::read(rows, "disk on fire")) } else { Ok(()) }
        }
    }

    #[test]
    fn a_source_that_fails_ends_the_load_with_its_error() {
        let failing = Failing(TableFormat::new(FormatKind::Bf16, 8, None).unwrap());
        let error = shelf(&failing, 0..100).0.unwrap_err();
        assert!(matches!(&error, Error::Source(source) if source.rows() == Some(56..63)), "{error}");
        assert!(shelf(&failing, 61..100).0.is_ok());
    }
}
