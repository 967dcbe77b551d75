//! `cargo xtask stub`: a libcuda to link against where there is no CUDA.
//!
//! Every function answers `CUDA_ERROR_STUB_LIBRARY`. The static stub goes into the program, which then runs on any machine and
//! finds no device. The dynamic one bears the driver's name, so that a program linked against it takes the real driver where it runs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{cargo, output, run as run_command, target};

/// Folders of the form that `CUDA_LIBRARY_PATH` takes at build time.
pub(crate) struct Stub {
    /// Has `lib64/libcuda.a`.
    pub(crate) linked_in: PathBuf,
    /// Has `lib64/stubs/libcuda.so`, whose name for the loader is `libcuda.so.1`.
    pub(crate) loaded: PathBuf,
}

impl Stub {
    /// The folder of the dynamic stub, for a loader on a machine without a driver.
    pub(crate) fn loader_path(&self) -> PathBuf {
        self.loaded.join("lib64/stubs")
    }
}

pub(crate) fn run() -> Result<()> {
    let stub = generate()?;
    crate::print_line(&format!("CUDA_LIBRARY_PATH={}", stub.linked_in.display()));
    crate::print_line(&format!("CUDA_LIBRARY_PATH={}", stub.loaded.display()));
    Ok(())
}

/// Makes both stubs, with every function of the driver that the workspace may link to.
pub(crate) fn generate() -> Result<Stub> {
    let home = target().join("cuda-stub");
    let stub = Stub { linked_in: home.join("static"), loaded: home.join("dynamic") };
    let symbols = symbols()?;
    std::fs::create_dir_all(stub.linked_in.join("lib64"))?;
    std::fs::create_dir_all(stub.loader_path())?;

    // A library that rustc archives itself, so that neither a C compiler nor `ar` is needed.
    let source = home.join("static.rs");
    write_if_new(&source, &text(&symbols, ""))?;
    run_command(
        rustc(&source)
            .args(["--crate-type=rlib", "-Cembed-bitcode=no", "-o"])
            .arg(stub.linked_in.join("lib64/libcuda.a")),
    )?;
    let source = home.join("dynamic.rs");
    let panic = "#[panic_handler]\nfn panic(_: &core::panic::PanicInfo<'_>) -> ! {\n    loop {}\n}\n";
    write_if_new(&source, &text(&symbols, panic))?;
    run_command(
        rustc(&source)
            .args([
                "--crate-type=cdylib",
                "-Cstrip=symbols",
                "-Clink-arg=-nostdlib",
                "-Clink-arg=-Wl,-soname,libcuda.so.1",
            ])
            .arg("-o")
            .arg(stub.loader_path().join("libcuda.so")),
    )?;
    std::fs::copy(stub.loader_path().join("libcuda.so"), stub.loader_path().join("libcuda.so.1"))?;
    Ok(stub)
}

fn rustc(source: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command
        .args(["--edition=2021", "--crate-name=cuda", "-Cpanic=abort", "-Copt-level=s", "-Ccodegen-units=1"])
        .arg(source);
    command
}

fn write_if_new(path: &Path, text: &str) -> Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

fn text(symbols: &BTreeSet<String>, more: &str) -> String {
    // A function each, though all are alike: the linker wants the names.
    let functions =
        symbols.iter().map(|name| format!("#[no_mangle]\nextern \"C\" fn {name}() -> i32 {{\n    STUB_LIBRARY\n}}\n"));
    let head = "#![no_std]\n#![allow(non_snake_case)]\n/// `CUDA_ERROR_STUB_LIBRARY`.\nconst STUB_LIBRARY: i32 = 34;\n";
    std::iter::once(head.to_owned()).chain(functions).chain([more.to_owned()]).collect()
}

/// What `cust_raw` declares, and what the workspace's own `sys` modules do.
fn symbols() -> Result<BTreeSet<String>> {
    let metadata: serde_json::Value = serde_json::from_str(&output(cargo().args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--all-features",
    ]))?)?;
    let packages = metadata["packages"].as_array().context("packages")?;
    let cust_raw =
        packages.iter().find(|package| package["name"] == "cust_raw").context("cust_raw is no dependency")?;
    let manifest = Path::new(cust_raw["manifest_path"].as_str().context("manifest_path")?);
    let mut sources = vec![manifest.with_file_name("src").join("cuda.rs")];
    for package in ["engram-cuda", "engram-symm"] {
        modules_named_sys(&Path::new(package).join("src"), &mut sources)?;
    }
    let mut symbols = BTreeSet::new();
    for source in sources {
        let text = std::fs::read_to_string(&source).with_context(|| source.display().to_string())?;
        symbols.extend(declared(&text).map(str::to_owned));
    }
    if symbols.len() < 300 {
        bail!("only {} driver functions found", symbols.len());
    }
    Ok(symbols)
}

fn modules_named_sys(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            modules_named_sys(&path, found)?;
        } else if path.ends_with("sys.rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// Names of functions that look like the driver's: `cu` and a capital.
fn declared(source: &str) -> impl Iterator<Item = &str> {
    source.split("fn ").skip(1).filter_map(|rest| {
        let name = rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next()?;
        let follows = name.strip_prefix("cu")?.chars().next()?;
        follows.is_ascii_uppercase().then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::declared;

    #[test]
    fn driver_functions_are_found_among_others() {
        let source = "pub fn cuInit(Flags: u32) -> R;\n    fn cuMemAlloc_v2(\nfn custom() {} fn cu() {}\nfn cuLaunchKernelEx<'a>(";
        assert_eq!(declared(source).collect::<Vec<_>>(), ["cuInit", "cuMemAlloc_v2", "cuLaunchKernelEx"]);
    }
}
