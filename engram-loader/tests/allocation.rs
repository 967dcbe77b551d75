//! After warm-up a gather allocates nothing, on whichever thread. Alone in its binary: the allocator counts for the whole process.

use engram_loader::{Direct, Extent, Mapped, Pool, Resident, TableExtents, TableFile};
use engram_ple::{FormatKind, TableFormat, TableSource};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is also that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above; `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn gathers_allocate_nothing_after_warm_up() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("t");
    let format = TableFormat::new(FormatKind::E4m3E8m0x32, 256, None).unwrap();
    std::fs::write(&path, vec![1; 264 * 5000]).unwrap();
    let files = vec![TableFile { path, bytes: 264 * 5000 }];
    let extent = |offset| vec![Extent { file: 0, offset, rows: 0..5000 }];
    let table = TableExtents::new(format, 5000, files, extent(0), extent(256 * 5000)).unwrap();
    let pool = Arc::new(Pool::new(2));
    let sources: [(&str, Box<dyn TableSource>); 3] = [
        ("mapped", Box::new(Mapped::new(table.clone(), Arc::clone(&pool)).with_resident_budget(1 << 40).unwrap())),
        ("direct", Box::new(Direct::new(table.clone(), 4))),
        ("resident", Box::new(Resident::load(&table, pool, &()).unwrap())),
    ];
    let ids: Vec<i32> = (0..20_000).map(|i| i * 37 % 5001 - 1).collect();
    let mut out = vec![0; ids.len() * 264];
    for (tier, source) in sources {
        // Threads may still be starting, which allocates; what gathers allocate, every series of them does.
        let mut series = || {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            for round in 0..100 {
                let ids = &ids[..if round % 10 == 0 { ids.len() } else { 48 }];
                source.gather(ids, &mut out[..ids.len() * 264]).unwrap();
            }
            ALLOCATIONS.load(Ordering::Relaxed) - before
        };
        let allocations: Vec<_> = std::iter::repeat_with(&mut series).take(10).collect();
        assert!(allocations.contains(&0), "{tier}: {allocations:?}");
    }
}
