//! The variables of UCX: from its files, of which a later one wins, and from the environment, which wins over all of them. Read in UCX's `ucs/config/parser.c`
//! and its `ini.c`, and run with 1.13.1.

use std::collections::BTreeMap;

use super::{Setting, Source, Version};
use crate::machine::Machine;

const FILE: &str = "ucx.conf";
/// The current folder, by a path that does not tell its name.
const CURRENT: &str = "/proc/self/cwd";
/// Since then, the lines below `[NAME]` count on some processors only. Before, that line means nothing.
const HAS_SECTIONS: Version = Version(1, 16, 0);

pub(super) fn settings(
    machine: &dyn Machine,
    variables: &BTreeMap<String, String>,
    version: Option<Version>,
    libucp: Option<&str>,
) -> BTreeMap<String, Setting> {
    let has_sections = version.is_some_and(|version| version >= HAS_SECTIONS);
    let mut settings: BTreeMap<String, Setting> = BTreeMap::new();
    let mut set = |name: &str, value: &str, source: Source| {
        let hides = settings.remove(name).map_or_else(Vec::new, |old| {
            let mut hides = vec![(old.source, old.value)];
            hides.extend(old.hides);
            hides
        });
        let setting = Setting { name: name.to_owned(), value: value.to_owned(), source, hides };
        settings.insert(name.to_owned(), setting);
    };
    for path in files(variables, libucp) {
        for (number, name, value) in lines(&machine.text(&path).unwrap_or_default(), has_sections) {
            let shown = path.strip_prefix(CURRENT).map_or_else(|| path.clone(), |file| format!(".{file}"));
            set(&name, &value, Source::Line { path: shown, number });
        }
    }
    for (name, value) in variables.iter().filter(|(name, value)| name.starts_with("UCX_") && !value.is_empty()) {
        set(name, value, Source::Environment);
    }
    settings
}

/// Returns the files in their order: that of the system, that beside the library, that of the home, a folder that a variable names, and the current folder.
fn files(variables: &BTreeMap<String, String>, libucp: Option<&str>) -> Vec<String> {
    let mut folders = vec!["/etc/ucx".to_owned()];
    // 1.13 reads etc/ucx.conf there, and its documentation says etc/ucx/ucx.conf.
    if let Some((library, _)) = libucp.and_then(|path| path.rsplit_once('/')) {
        let prefix = library.rsplit_once('/').map_or("", |(prefix, _)| prefix);
        folders.extend(["etc", "etc/ucx"].map(|folder| format!("{prefix}/{folder}")));
    }
    folders.extend(["HOME", "UCX_CONFIG_DIR"].iter().filter_map(|name| variables.get(*name)).cloned());
    folders.push(CURRENT.to_owned());
    let mut files: Vec<String> = Vec::new();
    for folder in folders.iter().filter(|folder| !folder.is_empty()) {
        let file = format!("{}/{FILE}", folder.trim_end_matches('/'));
        // A file that is read twice counts where it is read last.
        files.retain(|known| *known != file);
        files.push(file);
    }
    files
}

/// Returns the settings of a file, with the numbers of their lines. A line that begins with a space continues the setting before it: it replaces its value.
fn lines(text: &str, has_sections: bool) -> Vec<(usize, String, String)> {
    let mut settings: Vec<(usize, String, String)> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if has_sections && trimmed.starts_with('[') {
            break;
        }
        if trimmed.is_empty() || trimmed.starts_with([';', '#', '[']) {
            continue;
        }
        let without_comment = |text: &str| text.split(" ;").next().unwrap_or_default().trim().to_owned();
        if let Some((_, last, _)) = settings.last()
            && line.starts_with([' ', '\t'])
        {
            settings.push((index + 1, last.clone(), without_comment(trimmed)));
        } else if let Some((name, value)) = trimmed.split_once(['=', ':']) {
            let name = name.trim();
            settings.push((index + 1, name.to_owned(), without_comment(value)));
        }
    }
    settings.retain(|(_, name, _)| name.starts_with("UCX_"));
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_ucx_reads_it() {
        let text = "# x\n UCX_TLS = self ; c\n[x]\nUCX_NET_DEVICES=\"lo\"\r\nTLS=abc\nUCX_FOO:1 # y\nUCX_TLS=tcp\n  UCX_NET_DEVICES=lo\n";
        let read = lines(text, false);
        let read: Vec<(usize, &str, &str)> =
            read.iter().map(|(line, name, value)| (*line, name.as_str(), value.as_str())).collect();
        assert_eq!(
            read,
            [
                (2, "UCX_TLS", "self"),
                (4, "UCX_NET_DEVICES", "\"lo\""),
                (6, "UCX_FOO", "1 # y"),
                (7, "UCX_TLS", "tcp"),
                (8, "UCX_TLS", "UCX_NET_DEVICES=lo"),
            ]
        );
        assert_eq!(lines(text, true).len(), 1, "the rest is of some processors");
    }
}
