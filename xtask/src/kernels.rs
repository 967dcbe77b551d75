//! `cargo xtask kernels [--check]`: CUDA C++ to the PTX that is committed beside it.
//!
//! One pinned compiler makes the same text everywhere, so a checkout proves its kernels by compiling them again; and a digest of
//! sources and outputs proves them where there is no compiler.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::nvrtc::{Nvrtc, Source};
use crate::process::{note, run as run_command, target};

/// The compiler, as PyPI carries it: CUDA 12.4 is the newest whose PTX (8.4) driver r550 takes.
const PACKAGE: &str = "nvidia-cuda-nvrtc-cu12==12.4.127";
const VERSION: (i32, i32) = (12, 4);

/// The defaults keep subnormals: no fast mathematics.
const OPTIONS: [&str; 1] = ["--std=c++17"];

/// What is compiled in a folder: a source, and the virtual architectures that its PTX is committed for.
struct Folder {
    path: &'static str,
    /// Headers that it takes from other folders, relative to its own.
    headers: &'static [&'static str],
    sources: &'static [(&'static str, &'static [u32])],
}

const FOLDERS: [Folder; 2] = [
    Folder {
        path: "engram-cuda/kernels",
        headers: &[],
        sources: &[("hash", &[80]), ("rows", &[80]), ("floats", &[80, 90]), ("stage", &[80])],
    },
    Folder {
        path: "engram-symm/kernels",
        headers: &["../../engram-cuda/kernels/common.cuh", "../../engram-cuda/kernels/e4m3.cuh"],
        sources: &[("barrier", &[80, 90]), ("push", &[80, 90]), ("prefetch", &[80])],
    },
];

/// Machine code is made for these, and thrown away: only then does NVRTC assemble, so inline PTX that a target lacks would
/// otherwise pass unnoticed.
const REAL: [u32; 2] = [80, 90];

pub(crate) fn run(check: bool) -> Result<()> {
    let compiler = Nvrtc::load(&library()?)?;
    if compiler.version()? != VERSION {
        bail!("{PACKAGE} holds NVRTC {:?}", compiler.version()?);
    }
    let mut stale = Vec::new();
    for folder in FOLDERS {
        let home = Path::new(folder.path);
        let headers = headers(home, &folder)?;
        for (name, architectures) in folder.sources {
            let source = read(&home.join(format!("{name}.cu")))?;
            for real in REAL {
                compiler.compile(&source, &headers, &format!("sm_{real}"), &OPTIONS)?;
            }
            for architecture in *architectures {
                let architecture = format!("compute_{architecture}");
                let ptx = compiler.compile(&source, &headers, &architecture, &OPTIONS)?;
                let ptx = ptx.strip_suffix(b"\0").unwrap_or(&ptx);
                let path = home.join(format!("{name}.{architecture}.ptx"));
                if std::fs::read(&path).is_ok_and(|committed| committed == ptx) {
                    continue;
                }
                stale.push(path.display().to_string());
                if !check {
                    std::fs::write(&path, ptx)?;
                }
            }
        }
        if check {
            verify(home, &folder)?;
        } else {
            std::fs::write(home.join(SUMS), sums(home, &folder)?)?;
        }
    }
    match (stale.is_empty(), check) {
        (true, _) => note("the committed kernels are what their sources give"),
        (false, true) => bail!("not what the sources give, run `cargo xtask kernels`:\n{}", stale.join("\n")),
        (false, false) => note(&format!("written:\n{}", stale.join("\n"))),
    }
    Ok(())
}

/// Fetches the compiler once.
fn library() -> Result<PathBuf> {
    let home = target().join(PACKAGE);
    let library = home.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    if !library.exists() {
        run_command(
            Command::new("python3")
                .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"])
                .arg(&home)
                .arg(PACKAGE),
        )?;
    }
    library.canonicalize().with_context(|| format!("{PACKAGE} holds no {}", library.display()))
}

fn read(path: &Path) -> Result<Source> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(Source { name: file_name(path), text })
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn headers(home: &Path, folder: &Folder) -> Result<Vec<Source>> {
    let own = files(home)?.into_iter().filter(|name| name.ends_with(".cuh"));
    own.chain(folder.headers.iter().map(ToString::to_string)).map(|name| read(&home.join(name))).collect()
}

fn files(home: &Path) -> Result<BTreeSet<String>> {
    let entries = std::fs::read_dir(home).with_context(|| home.display().to_string())?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// SHA-256 of every source and every output, as `sha256sum --check` reads it.
const SUMS: &str = "SHA256SUMS";

fn sums(home: &Path, folder: &Folder) -> Result<String> {
    let mut sums = format!("# {PACKAGE} {}\n", OPTIONS.join(" "));
    let own = files(home)?.into_iter().filter(|name| name != SUMS);
    for name in own.chain(folder.headers.iter().map(ToString::to_string)) {
        let digest = Sha256::digest(std::fs::read(home.join(&name))?);
        writeln!(sums, "{digest:x}  {name}")?;
    }
    Ok(sums)
}

/// Fails where a source or an output changed since the outputs were made, or came or went.
fn verify(home: &Path, folder: &Folder) -> Result<()> {
    let path = home.join(SUMS);
    let (committed, found) = (std::fs::read_to_string(&path).unwrap_or_default(), sums(home, folder)?);
    if committed != found {
        bail!("{} does not fit the files beside it, run `cargo xtask kernels`; it should be\n{found}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(folder: &Folder) -> PathBuf {
        crate::process::workspace().join(folder.path)
    }

    #[test]
    fn committed_ptx_belongs_to_the_committed_sources() {
        for folder in FOLDERS {
            verify(&home(&folder), &folder).unwrap();
        }
    }

    /// Every source is compiled, and no output is left over from a source that went.
    #[test]
    fn folders_hold_what_is_listed() {
        for folder in FOLDERS {
            let expected: BTreeSet<String> = folder
                .sources
                .iter()
                .flat_map(|(name, architectures)| {
                    let outputs =
                        architectures.iter().map(move |architecture| format!("{name}.compute_{architecture}.ptx"));
                    outputs.chain([format!("{name}.cu")])
                })
                .collect();
            let found: BTreeSet<String> = files(&home(&folder))
                .unwrap()
                .into_iter()
                .filter(|name| !name.ends_with(".cuh") && name != SUMS)
                .collect();
            assert_eq!(found, expected, "{}", folder.path);
        }
    }

    /// The text is small enough to embed: no line tables, and no target that only one chip has.
    #[test]
    fn committed_ptx_is_portable_and_plain() {
        for folder in FOLDERS {
            for name in files(&home(&folder)).unwrap().into_iter().filter(|name| name.ends_with(".ptx")) {
                let text = std::fs::read_to_string(home(&folder).join(&name)).unwrap();
                let target = format!(".target sm_{}\n", name.rsplit(['_', '.']).nth(1).unwrap());
                assert!(text.contains(&target), "{name}");
                assert!(text.contains(".version 8.4\n"), "{name}");
                for unwanted in [".loc\t", ".section", ".ftz", ".approx"] {
                    assert!(!text.contains(unwanted), "{name} has {unwanted}");
                }
            }
        }
    }

    /// Whatever waits for the kernel ahead of it does so before it reads or writes any memory: an entry that only starts early would see half
    /// of what that kernel does.
    #[test]
    fn kernels_that_start_early_wait_first() {
        let mut waiting = Vec::new();
        for folder in FOLDERS {
            for name in files(&home(&folder)).unwrap().into_iter().filter(|name| name.ends_with(".ptx")) {
                let text = std::fs::read_to_string(home(&folder).join(&name)).unwrap();
                if !text.contains("griddepcontrol") {
                    continue;
                }
                for entry in text.split(".visible .entry ").skip(1) {
                    let (before, _) = entry.split_once("griddepcontrol.wait;").unwrap_or((entry, ""));
                    let (_, body) = before.split_once("\n{").expect("an entry has a body");
                    let does = ["@", "ld.", "st.", "atom", "red.", "prefetch", "call", "bra"];
                    let early = body.split(['\n', '{', ';']).map(str::trim_start);
                    let early = early.filter(|line| !line.starts_with("ld.param."));
                    let early: Vec<_> = early.filter(|line| does.iter().any(|does| line.starts_with(does))).collect();
                    assert!(
                        before.len() < entry.len() && early.is_empty(),
                        "{name}: {:?} in {}",
                        early.first(),
                        &entry[..40]
                    );
                }
                waiting.push(name);
            }
        }
        assert_eq!(waiting, ["barrier.compute_90.ptx", "push.compute_90.ptx"]);
    }

    #[test]
    fn a_changed_source_is_noticed() {
        let copy = target().join("changed-kernels");
        std::fs::create_dir_all(&copy).unwrap();
        for name in files(&home(&FOLDERS[0])).unwrap() {
            std::fs::copy(home(&FOLDERS[0]).join(&name), copy.join(&name)).unwrap();
        }
        verify(&copy, &FOLDERS[0]).unwrap();
        std::fs::write(copy.join("hash.cu"), "// nothing left\n").unwrap();
        assert!(verify(&copy, &FOLDERS[0]).unwrap_err().to_string().contains("hash.cu"));
        std::fs::remove_dir_all(&copy).unwrap();
    }
}
