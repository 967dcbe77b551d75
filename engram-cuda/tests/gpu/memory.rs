//! Buffers, registration, and destructors in any order.

use crate::common::*;
use engram_cuda::{DeviceBuffer, Error, Event, PinnedBuffer, RegisteredMemory, Stream};
use std::ptr::NonNull;

/// What may move to, or be used from, other threads: checked when this is compiled.
const _: () = {
    const fn sends<T: Send>() {}
    const fn shares<T: Send + Sync>() {}
    shares::<engram_cuda::Device>();
    shares::<engram_cuda::Table>();
    shares::<engram_cuda::Hasher>();
    shares::<DeviceBuffer>();
    shares::<PinnedBuffer>();
    shares::<RegisteredMemory>();
    shares::<Stream>();
    shares::<Event>();
    shares::<Error>();
    sends::<engram_cuda::Lookup>();
    sends::<engram_cuda::Prefetcher>();
    sends::<engram_cuda::Graph>();
};

#[test]
#[ignore = "needs a CUDA device"]
fn buffers_carry_bytes_both_ways_and_refuse_what_does_not_fit() {
    let buffer = DeviceBuffer::from_slice(device(), &[1u16, 2, 3, 4]).unwrap();
    buffer.write(4, &[7u16]).unwrap();
    assert_eq!(buffer.read::<u16>(2, 3).unwrap(), [2, 7, 4]);
    assert!(matches!(buffer.write(7, &[0u16]), Err(Error::TooSmall { found: 8, needed: 9, .. })));
    assert!(buffer.read::<u64>(0, usize::MAX).is_err());
    let pinned = PinnedBuffer::new(device(), (1 << 20) + 4096 + 3).unwrap();
    assert_eq!(pinned.bytes(), (1 << 20) + 4096 + 3);
    pinned.write(1 << 20, &[5u32]).unwrap();
    assert_eq!(pinned.read::<u32>(1 << 20, 1).unwrap(), [5]);
    assert!(pinned.write(1 << 20, &[0u8; 4100]).is_err());
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_allocation_that_cannot_be_is_an_error_with_a_code() {
    let error = DeviceBuffer::new(device(), 1 << 50).unwrap_err();
    let Error::Driver(error) = error else { panic!("{error}") };
    assert_eq!(error.code, engram_cuda::DriverCode::OUT_OF_MEMORY);
    assert!(error.to_string().contains("cuMemAlloc"), "{error}");
    // The failure left nothing behind.
    DeviceBuffer::from_slice(device(), &[1u8]).unwrap();
    device().synchronize().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn registration_is_all_or_nothing_and_its_failure_is_consumed() {
    let mut memory = vec![3u8; 8 << 20];
    let start = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the vector outlives the registration.
    let first = unsafe { RegisteredMemory::new(device(), start, memory.len()) }.unwrap();
    assert_ne!(first.address(), 0);
    // SAFETY: as above.
    let again = unsafe { RegisteredMemory::new(device(), start, memory.len()) };
    assert!(matches!(again, Err(Error::Driver(_))), "{again:?}");
    device().synchronize().unwrap();
    drop(first);
    // SAFETY: as above. The first registration is gone, and the refused one left none.
    drop(unsafe { RegisteredMemory::new(device(), start, memory.len()) }.unwrap());
}

#[test]
#[ignore = "needs a CUDA device"]
fn values_may_be_dropped_in_any_order_on_any_thread() {
    for order in 0..24u64 {
        let device = engram_cuda::Device::new(0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let buffer = DeviceBuffer::new(&device, 64 << 20).unwrap();
        let event = Event::new(&device).unwrap();
        buffer.fill(1, stream.as_ref()).unwrap();
        event.record(stream.as_ref()).unwrap();
        let mut values: Vec<Box<dyn std::any::Any + Send>> =
            vec![Box::new(device), Box::new(stream), Box::new(buffer), Box::new(event)];
        let mut random = Random(order);
        while !values.is_empty() {
            let value = values.swap_remove(usize::try_from(random.below(values.len() as u64)).unwrap());
            std::thread::spawn(move || drop(value)).join().unwrap();
        }
    }
    device().synchronize().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_buffer_dropped_during_a_capture_does_not_break_it() {
    let stream = Stream::new(device()).unwrap();
    let kept = DeviceBuffer::from_slice(device(), &[0u8; 4]).unwrap();
    let doomed = (DeviceBuffer::new(device(), 1 << 20).unwrap(), PinnedBuffer::new(device(), 1 << 20).unwrap());
    let mut graph = stream
        .capture(|stream| {
            drop(doomed);
            kept.fill(9, stream)
        })
        .unwrap();
    // SAFETY: `kept` lives.
    unsafe { graph.launch(stream.as_ref()) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(kept.read::<u8>(0, 4).unwrap(), [9; 4]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_dropped_while_a_kernel_reads_it_stays_until_the_kernel_is_done() {
    let (rows, count) = (400_000u64, 3_000_000);
    let format = format(engram_ple::FormatKind::E4m3Global, 256);
    let source = engram_ple::SynthSource::new(format.clone(), 1, 0, rows);
    let ids: Vec<i32> = (0..count).map(|k| i32::try_from(k * 7919 % 400_000).unwrap()).collect();
    for placement in [engram_cuda::Placement::Pinned, engram_cuda::Placement::Device] {
        let table = engram_cuda::Table::load(device(), &source, 0..rows, placement).unwrap();
        let mut lookup = engram_cuda::Lookup::new(&[table], 100, &engram_cuda::LookupOptions::default()).unwrap();
        let (memory, out) = (upload(&ids), poisoned(&format, 1, 100, engram_cuda::RowForm::Packed, count / 100));
        let stream = Stream::new(device()).unwrap();
        lookup
            .run(&view(&memory, engram_cuda::IdType::I32, count / 100, 1, 100), &out.output(), stream.as_ref())
            .unwrap();
        // The lookup holds the last handle of the table.
        drop((lookup, memory));
        stream.synchronize().unwrap();
        let expected =
            reference(&[(&source, 0..rows)], &ids[..10_000], 100, engram_cuda::RowForm::Packed, (100, 100), POISON);
        assert_same(&out.rows.read::<u8>(0, expected.rows.len()).unwrap(), &expected.rows, "rows");
        let last = (count - 100) * 256;
        let tail =
            reference(&[(&source, 0..rows)], &ids[count - 100..], 100, engram_cuda::RowForm::Packed, (1, 1), POISON);
        assert_same(&out.rows.read::<u8>(last, 25_600).unwrap(), &tail.rows, "last rows");
    }
}
