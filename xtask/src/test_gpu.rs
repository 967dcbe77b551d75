//! `cargo xtask test-gpu`: the tests that need a CUDA device, which are those that `cargo test` ignores.
//!
//! They are built against the dynamic stub, so that each program takes the driver of the machine it runs on, and run by a script
//! that needs neither Rust nor this workspace: `--archive DIR` packs both for a machine that has a GPU and no toolchain.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process::{cargo, note, output, run as run_command, target};
use crate::stub;

/// Packages with such tests, and the features that these need.
const PACKAGES: [(&str, &str); 2] = [("engram-cuda", "fault-injection"), ("engram-symm", "fault-injection")];

/// Tests in Python that drive a package from PyTorch, through a library built for them.
const TORCH: [(&str, &str); 2] = [
    ("engram-cuda", include_str!("../../tests/torch/lookups.py")),
    ("engram-symm", include_str!("../../tests/torch/exchange.py")),
];

/// What these tests share.
const TORCH_MODULE: &str = include_str!("../../tests/torch/engram_torch.py");

/// Fails without a device, when a test fails, and when no test ran.
const RUNNER: &str = include_str!("test_gpu/run");

pub(crate) fn run() -> Result<()> {
    let folder = target().join("gpu-tests");
    archive(&folder)?;
    run_command(Command::new("bash").arg(folder.join("run")))
}

/// Packs the stripped test programs and the script that runs them into `folder`.
pub(crate) fn archive(folder: &Path) -> Result<()> {
    let stub = stub::generate()?;
    let programs = folder.join("programs");
    if programs.exists() {
        std::fs::remove_dir_all(&programs)?;
    }
    std::fs::create_dir_all(&programs)?;
    let mut total = 0;
    for (package, features) in PACKAGES {
        let messages = output(
            cargo()
                .args(["test", "--no-run", "--profile=gpu-ci", "--message-format=json-render-diagnostics"])
                .args(["--package", package, "--features", features])
                .env("CUDA_LIBRARY_PATH", &stub.loaded),
        )?;
        for (name, program) in test_programs(&messages)? {
            // The stub is enough for a program to start and to say what it holds.
            let listed = output(
                Command::new(&program)
                    .args(["--list", "--ignored", "--format=terse"])
                    .env("LD_LIBRARY_PATH", stub.loader_path()),
            )?;
            let tests = listed.lines().filter(|line| line.ends_with(": test")).count();
            if tests > 0 {
                std::fs::copy(&program, programs.join(format!("{package}.{name}")))?;
                note(&format!("{package}.{name}: {tests} tests"));
            }
            total += tests;
        }
    }
    total += torch(folder, &stub)?;
    if total == 0 {
        bail!("no test needs a GPU");
    }
    let runner = folder.join("run");
    std::fs::write(&runner, RUNNER)?;
    make_executable(&runner)?;
    crate::print_line(&format!("{total} tests in {}", folder.display()));
    Ok(())
}

/// Packs the tests that run under PyTorch, with their library.
fn torch(folder: &Path, stub: &stub::Stub) -> Result<usize> {
    let messages = output(
        cargo()
            .args(["build", "--profile=gpu-ci", "--message-format=json-render-diagnostics"])
            .args(["--package=engram-torch-tests", "--features=cuda"])
            .env("CUDA_LIBRARY_PATH", &stub.loaded),
    )?;
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let library = artifacts
        .filter(|message| message["target"]["name"] == "engram_torch")
        .find_map(|message| message["filenames"].as_array()?.iter().find_map(Value::as_str).map(PathBuf::from))
        .context("cargo built no library for PyTorch")?;
    std::fs::copy(library, folder.join("libengram_torch.so"))?;
    std::fs::write(folder.join("engram_torch.py"), TORCH_MODULE)?;
    let mut total = 0;
    for (package, script) in TORCH {
        let program = folder.join(format!("programs/{package}.torch"));
        std::fs::write(&program, script)?;
        make_executable(&program)?;
        let tests = script.lines().filter(|line| line.starts_with("def test_")).count();
        note(&format!("{package}.torch: {tests} tests"));
        total += tests;
    }
    Ok(total)
}

/// Names and paths of the test programs that cargo says it built.
fn test_programs(messages: &str) -> Result<Vec<(String, PathBuf)>> {
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line)?;
        if let (true, Some(path)) = (message["profile"]["test"] == true, message["executable"].as_str()) {
            let name = message["target"]["name"].as_str().context("a target's name")?;
            programs.push((name.to_owned(), PathBuf::from(path)));
        }
    }
    Ok(programs)
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mut permissions = std::fs::metadata(path)?.permissions();
    permissions.set_mode(0o755);
    Ok(std::fs::set_permissions(path, permissions)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stands in for test programs: prints and exits as told.
    fn program(folder: &Path, name: &str, script: &str) {
        let path = folder.join("programs").join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        make_executable(&path).unwrap();
    }

    /// What the runner says of a folder of such programs, with or without a device.
    fn verdict(name: &str, device: bool, programs: &[(&str, &str)]) -> (bool, String) {
        let folder = target().join("gpu-test-runner").join(name);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(folder.join("programs")).unwrap();
        std::fs::write(folder.join("run"), RUNNER).unwrap();
        for (name, script) in programs {
            program(&folder, name, script);
        }
        let device_file = folder.join("nvidia0");
        if device {
            std::fs::write(&device_file, "").unwrap();
        }
        let ran =
            Command::new("bash").arg(folder.join("run")).env("ENGRAM_GPU_DEVICES", &device_file).output().unwrap();
        let text = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        std::fs::remove_dir_all(&folder).unwrap();
        (ran.status.success(), text)
    }

    const PASSED: &str =
        "echo 'test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.1s'";

    #[test]
    fn passes_are_summed_over_all_programs() {
        let (good, text) = verdict("passes", true, &[("a.gpu", PASSED), ("b.gpu", PASSED)]);
        assert!(good, "{text}");
        assert!(text.contains("6 GPU tests passed"), "{text}");
    }

    #[test]
    fn a_failed_test_or_a_crash_fails_and_the_rest_still_runs() {
        for failure in ["exit 101", "kill -9 $$"] {
            let (good, text) = verdict("fails", true, &[("a.gpu", failure), ("b.gpu", PASSED)]);
            assert!(!good, "{text}");
            assert!(text.contains("a.gpu failed") && text.contains("3 passed"), "{text}");
        }
    }

    #[test]
    fn no_test_is_a_failure() {
        let nothing =
            "echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.1s'";
        assert!(!verdict("nothing", true, &[("a.gpu", nothing)]).0);
        assert!(!verdict("part", true, &[("a.gpu", nothing), ("b.gpu", PASSED)]).0);
        assert!(!verdict("silent", true, &[("a.gpu", "exit 0")]).0);
        assert!(!verdict("empty", true, &[]).0);
    }

    #[test]
    fn no_device_is_a_failure() {
        let (good, text) = verdict("no-device", false, &[("a.gpu", PASSED)]);
        assert!(!good && text.contains("no CUDA device"), "{text}");
    }

    #[test]
    fn cargo_messages_give_test_programs_only() {
        let messages = r#"{"reason":"compiler-artifact","profile":{"test":true},"executable":"/t/gpu-1","target":{"name":"gpu"}}
{"reason":"compiler-artifact","profile":{"test":false},"executable":"/t/rates","target":{"name":"rates"}}
{"reason":"compiler-artifact","profile":{"test":true},"executable":null,"target":{"name":"lib"}}
{"reason":"build-finished","success":true}"#;
        assert_eq!(test_programs(messages).unwrap(), [("gpu".to_owned(), PathBuf::from("/t/gpu-1"))]);
    }
}
