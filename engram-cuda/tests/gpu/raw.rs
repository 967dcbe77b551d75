//! What crates with kernels of their own build on.

use engram_cuda::kernels::Ptx;
use engram_cuda::raw::vmm::{HandleKind, Physical, Reserved};
use engram_cuda::raw::{self, MappedWords, Mark, Module, TableArray};
use engram_cuda::{Device, DeviceBuffer, Error, Placement, Stream, StreamRef, Table};
use engram_ple::{FormatKind, SynthSource};
use std::os::fd::AsFd;

use crate::common::{delay, device, format, scratch};
use crate::early::starting_early;

/// Stores a word at an address.
const STORE: Ptx = Ptx::new(
    &["store"],
    "
    .version 8.0
    .target sm_80
    .address_size 64
    .visible .entry store(.param .align 8 .b8 words[16])
    {
        .reg .b64 %address, %value;
        ld.param.u64 %address, [words];
        ld.param.u64 %value, [words + 8];
        st.global.u64 [%address], %value;
        ret;
    }
    \0",
    None,
);

#[test]
#[ignore = "needs a CUDA device"]
fn a_module_of_another_crate_stores_where_it_is_told() {
    let module = Module::load(device(), &STORE).unwrap();
    let words = MappedWords::new(device(), 3).unwrap();
    assert_eq!((words.len(), words.is_empty()), (3, false));
    words.store(2, 9);
    let stream = Stream::new(device()).unwrap();
    let param = [words.address() + 8, 0x1234_5678_9abc_def0];
    // SAFETY: the parameter names a word of the array, which is used no more when the stream is done.
    unsafe { module.launch("store", [1; 3], [1; 3], stream.as_ref(), &param) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!([0, 1, 2].map(|index| words.load(index)), [0, 0x1234_5678_9abc_def0, 9]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_entry_that_the_text_lacks_is_an_error() {
    const WRONG: Ptx = Ptx::new(&["load"], STORE_TEXT, None);
    const STORE_TEXT: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry store() { ret; }\n\0";
    let Err(Error::Driver(error)) = Module::load(device(), &WRONG) else { panic!("there is no such entry") };
    assert!(error.to_string().contains("load") && error.code.name() == Some("CUDA_ERROR_NOT_FOUND"), "{error}");
}

/// Adds one to a word, some microseconds after it has let the next kernel start.
const ADD_ONE: Ptx = starting_early!(
    "add_one",
    ".param .align 8 .b8 word[8]",
    ".reg .b64 %address, %value;",
    "
    ld.param.u64 %address, [word];
    ld.global.u64 %value, [%address];
    nanosleep.u32 3000;
    add.u64 %value, %value, 1;
    st.global.u64 [%address], %value;
    ret;
    "
);

/// A kernel that did not wait for the one before it would add to the same number.
#[test]
#[ignore = "needs a CUDA device"]
fn kernels_that_start_early_see_what_was_done_before_them() {
    let module = Module::load(device(), &ADD_ONE).unwrap();
    let word = DeviceBuffer::from_slice(device(), &[0u64]).unwrap();
    let stream = Stream::new(device()).unwrap();
    let add = |times: usize, stream: StreamRef<'_>| {
        for _ in 0..times {
            // SAFETY: the word outlives the stream's work and the graph.
            unsafe { module.launch("add_one", [1; 3], [1; 3], stream, &word.address()) }.unwrap();
        }
    };
    add(500, stream.as_ref());
    stream.synchronize().unwrap();
    assert_eq!(word.read::<u64>(0, 1).unwrap(), [500]);
    let graph = stream.capture(|stream| {
        add(100, stream);
        Ok(())
    });
    let mut graph = graph.unwrap();
    for _ in 0..5 {
        // SAFETY: the word and the module outlive the graph.
        unsafe { graph.launch(stream.as_ref()) }.unwrap();
        add(1, stream.as_ref());
    }
    stream.synchronize().unwrap();
    assert_eq!(word.read::<u64>(0, 1).unwrap(), [1005]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_mark_orders_streams_in_its_own_scope_only() {
    let (first, second) = (Stream::new(device()).unwrap(), Stream::new(device()).unwrap());
    let buffer = DeviceBuffer::from_slice(device(), &[0u8; 4]).unwrap();
    let mut mark = Mark::new(device()).unwrap();
    scratch();
    let eager = first.as_ref().scope(device()).unwrap();
    assert_eq!(eager.capture(), None);
    delay(first.as_ref());
    buffer.fill(7, first.as_ref()).unwrap();
    mark.record(first.as_ref(), eager).unwrap();
    mark.before(second.as_ref(), eager).unwrap();
    let copy = DeviceBuffer::new(device(), 4).unwrap();
    copy.copy_from(&buffer, second.as_ref()).unwrap();
    second.synchronize().unwrap();
    assert_eq!(copy.read::<u8>(0, 4).unwrap(), [7; 4]);
    // A capture does not wait for what was recorded outside.
    let captured = second.capture(|stream| {
        let scope = stream.scope(device())?;
        assert!(scope.capture().is_some());
        mark.before(stream, scope)?;
        buffer.fill(8, stream)
    });
    captured.unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn table_arrays_follow_sleep_and_wake() {
    let source = SynthSource::new(format(FormatKind::Bf16, 16), 1, 0, 100);
    let load = |placement| Table::load(device(), &source, 10..60, placement).unwrap();
    let tables = [load(Placement::Device), load(Placement::Pinned)];
    let array = TableArray::new(device(), &tables).unwrap();
    // SAFETY: the array holds two tables of five words each.
    let words = || unsafe { raw::read::<u64>(device(), array.address(), 10) }.unwrap();
    let rows = |words: &[u64]| [words[4] >> 32, words[9] >> 32];
    let awake = words();
    assert_eq!(rows(&awake), [50, 50]);
    assert_eq!([awake[0], awake[5]], [array.tables()[0].values, array.tables()[1].values]);
    array.handles()[0].sleep().unwrap();
    assert_eq!(rows(&words()), [0, 50]);
    assert!(matches!(TableArray::new(device(), &tables), Err(Error::Asleep)));
    tables[0].wake(&source).unwrap();
    assert_eq!(rows(&words()), [50, 50]);

    let none = TableArray::new(device(), &[]).unwrap();
    assert!(none.handles().is_empty() && none.tables().is_empty());
    let error = TableArray::new(device(), &[load(Placement::Auto)]).unwrap_err().to_string();
    assert!(error.contains("Auto") && error.contains("Pinned"), "{error}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_comes_and_goes_under_addresses_that_stay() {
    // The driver keeps page tables of its own from the first time on.
    Reserved::new(device(), 5 << 20).unwrap().map(&Physical::new(device(), 5 << 20, None).unwrap()).unwrap();
    let before = device().memory().unwrap().0;
    let mut addresses = Reserved::new(device(), 5 << 20).unwrap();
    assert_eq!(addresses.bytes(), 6 << 20);
    let start = addresses.address();
    for round in 0..20_u8 {
        let memory = Physical::new(device(), 5 << 20, None).unwrap();
        addresses.map(&memory).unwrap();
        assert!(matches!(addresses.map(&memory), Err(Error::Invalid { .. })));
        // The mapping keeps it.
        drop(memory);
        // SAFETY: the range is mapped.
        unsafe { raw::fill(device(), start, round, 6 << 20) }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { raw::read::<u8>(device(), start + (6 << 20) - 3, 3) }.unwrap(), [round; 3]);
        addresses.unmap().unwrap();
        addresses.unmap().unwrap();
        assert_eq!((addresses.address(), addresses.is_mapped()), (start, false));
    }
    let other = Physical::new(device(), 7 << 20, None).unwrap();
    assert!(addresses.map(&other).unwrap_err().to_string().contains("8388608"));
    drop((addresses, other));
    assert!(before - device().memory().unwrap().0.min(before) < 6 << 20);
}

/// Both sides of a hand-over in one process: one memory under two addresses.
#[test]
#[ignore = "needs a CUDA device"]
fn exported_memory_is_the_same_memory() {
    assert!(device().shares_by_descriptor().unwrap());
    let memory = Physical::new(device(), 1, Some(HandleKind::Descriptor)).unwrap();
    let mut own = Reserved::new(device(), memory.bytes()).unwrap();
    own.map(&memory).unwrap();
    let descriptor = memory.to_descriptor().unwrap();
    assert!(memory.to_fabric().is_err());
    drop(memory);
    let import = Physical::from_descriptor(device(), descriptor.as_fd(), own.bytes()).unwrap();
    drop(descriptor);
    let mut other = Reserved::new(device(), import.bytes()).unwrap();
    other.map(&import).unwrap();
    drop(import);
    assert_ne!(own.address(), other.address());
    // SAFETY: the range is mapped.
    unsafe { raw::write(device(), own.address() + 40, &[1u32, 2, 3]) }.unwrap();
    drop(own);
    // SAFETY: as above.
    assert_eq!(unsafe { raw::read::<u32>(device(), other.address() + 40, 3) }.unwrap(), [1, 2, 3]);

    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(matches!(Physical::from_descriptor(device(), file.as_fd(), 2 << 20), Err(Error::Driver(_))));
    assert!(matches!(Physical::from_fabric(device(), &[0; 64], 2 << 20), Err(Error::Driver(_))));
}

/// A device may offer fabric handles that this process cannot have. What it says it has, works.
#[test]
#[ignore = "needs a CUDA device"]
fn fabric_handles_are_promised_only_where_they_work() {
    if device().shares_by_fabric().unwrap() {
        let memory = Physical::new(device(), 1, Some(HandleKind::Fabric)).unwrap();
        let import = Physical::from_fabric(device(), &memory.to_fabric().unwrap(), memory.bytes()).unwrap();
        Reserved::new(device(), import.bytes()).unwrap().map(&import).unwrap();
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn devices_are_found_by_their_uuid() {
    let uuids: Vec<_> = (0..Device::count().unwrap()).map(|k| Device::new(k).unwrap().uuid().unwrap()).collect();
    for (ordinal, uuid) in uuids.iter().enumerate() {
        assert_eq!(Device::find(*uuid).unwrap(), Some(u32::try_from(ordinal).unwrap()));
    }
    assert_eq!(Device::find([0; 16]).unwrap(), None);
    assert!(device().can_access_peer(0).unwrap());
    assert!(matches!(device().can_access_peer(1000), Err(Error::Driver(_))));
    assert!(device().has_native_atomics(0).unwrap());
    assert!(matches!(device().has_native_atomics(1000), Err(Error::Driver(_))));
    for ordinal in 1..Device::count().unwrap() {
        // Atomics are a way to access memory.
        let atomics = device().has_native_atomics(ordinal).unwrap();
        assert!(!atomics || device().can_access_peer(ordinal).unwrap(), "device {ordinal}");
    }
}
