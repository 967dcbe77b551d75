//! Kernels of tests that start early: once they have waited for what is ahead of them, they let the next one start at once. engram-symm's tests
//! take this file too.

/// A `Ptx` with one such entry: its name, its parameter, its registers and what it does then. GPUs that cannot start it early get it without.
macro_rules! starting_early {
    ($name:literal, $param:literal, $registers:literal, $body:literal) => {
        engram_cuda::kernels::Ptx::new(
            &[$name],
            starting_early!("sm_80", $name, $param, $registers, "", $body),
            Some(starting_early!(
                "sm_90",
                $name,
                $param,
                $registers,
                "griddepcontrol.wait; griddepcontrol.launch_dependents;",
                $body
            )),
        )
        .starting_early()
    };
    ($target:literal, $name:literal, $param:literal, $registers:literal, $turn:literal, $body:literal) => {
        concat!(
            ".version 8.0\n.target ",
            $target,
            "\n.address_size 64\n.visible .entry ",
            $name,
            "(",
            $param,
            ")\n{\n",
            $registers,
            $turn,
            $body,
            "}\n\0"
        )
    };
}
pub(crate) use starting_early;
