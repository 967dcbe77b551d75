#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| engram_tests::untrusted::config(input));
