//! Run-time choice of vector instructions. This is the one module of the crate with `unsafe`.
#![expect(unsafe_code, reason = "calls a function that is compiled for instructions which were found at run time")]

/// Plain loops that gain from wide vectors. `run` has to be `#[inline(always)]`, with all that it calls: it is compiled once for each
/// instruction set, and what is not inlined would be compiled for the least of them.
pub(crate) trait Vectorized {
    fn run(self);
}

/// Runs the loops with the widest vectors that this CPU has.
pub(crate) fn run(loops: impl Vectorized) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: a function with the target feature `avx2` may be called on a CPU that has AVX2, and this one does.
        return unsafe { with_avx2(loops) };
    }
    loops.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2(loops: impl Vectorized) {
    loops.run();
}
