//! Whether memory can be had, asked before it is taken: a system that has too little does not refuse, it kills.

use std::fs;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::Resource;

/// Refuses `segments` of `bytes` each where the process may not, or the system cannot, give them. Where the system does
/// not say, it agrees.
pub(crate) fn check(bytes: usize, segments: usize) -> Result<(), Errno> {
    // Growing a file past this limit raises a signal.
    if rustix::process::getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes as u64) {
        return Err(Errno::FBIG);
    }
    let all = bytes.checked_mul(segments).filter(|&all| isize::try_from(all).is_ok()).ok_or(Errno::NOMEM)?;
    let rooms = [machine(), control_group()];
    if rooms.iter().flatten().any(|&room| room < all as u64) {
        return Err(Errno::NOMEM);
    }
    Ok(())
}

/// Bytes that the machine can give without swapping.
fn machine() -> Option<u64> {
    field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?.checked_mul(1024)
}

/// Bytes that the control groups of this process can still give: the least of all that have a limit.
fn control_group() -> Option<u64> {
    let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = membership.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Path::new(path).ancestors().filter_map(|group| control_group_room(&Path::new("/sys/fs/cgroup").join(group))).min()
}

fn control_group_room(group: &Path) -> Option<u64> {
    let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    // The limit reads `max` where there is none.
    let limit = number("memory.max")?;
    let used = number("memory.current")?;
    // Cached files count as used, but make room on demand.
    let stat = fs::read_to_string(group.join("memory.stat")).ok()?;
    let cached = field(&stat, "inactive_file").unwrap_or(0).saturating_add(field(&stat, "active_file").unwrap_or(0));
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

/// The number after `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next()?.parse().ok()).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_whole_words() {
        let text = "MemTotal:  10 kB\nMemAvailable:   7 kB\nactive_file 3\ninactive_file 4\nbroken x\n";
        assert_eq!(field(text, "MemAvailable:"), Some(7));
        assert_eq!(field(text, "active_file"), Some(3));
        assert_eq!(field(text, "broken"), None);
        assert_eq!(field(text, "absent"), None);
    }

    #[test]
    fn a_control_group_counts_cached_files_as_room() {
        let group = tempfile::tempdir().unwrap();
        let write = |name, text| fs::write(group.path().join(name), text).unwrap();
        assert_eq!(control_group_room(group.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "600\n");
        write("memory.stat", "anon 100\ninactive_file 200\nactive_file 50\n");
        assert_eq!(control_group_room(group.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(control_group_room(group.path()), Some(650));
        write("memory.max", "100\n");
        assert_eq!(control_group_room(group.path()), Some(0));
    }

    #[test]
    fn what_no_machine_has_is_refused() {
        check(1 << 20, 1).unwrap();
        assert_eq!(check(1 << 60, 1), Err(Errno::NOMEM));
        assert_eq!(check(1 << 20, 1 << 40), Err(Errno::NOMEM));
        assert_eq!(check(usize::MAX, 2), Err(Errno::NOMEM));
    }
}
