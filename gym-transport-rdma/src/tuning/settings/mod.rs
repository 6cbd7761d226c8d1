//! The variables of NCCL and UCX as the libraries get them.
//!
//! NCCL reads the environment, then `NCCL_CONF_FILE` or else `.nccl.conf` of the home, then `/etc/nccl.conf`. The first that names a variable wins, also with an
//! empty value. Read in NCCL's `misc/param.cc`, and run with 2.27.3, 2.29.7 and 2.30.7. UCX reads other files, in another order: see `ucx`.

mod ucx;

use std::collections::BTreeMap;
use std::fmt;

use super::finding::Finding;
use crate::machine::Machine;

/// The file for the whole machine.
const ETC: &str = "/etc/nccl.conf";
/// From this version on, the home is `$HOME`, and a carriage return at the end of a line is dropped. Before, the home is that of `/etc/passwd`.
const HOME_IS_A_VARIABLE: Version = Version(2, 30, 0);

/// A version of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) u32, pub(crate) u32, pub(crate) u32);

impl Version {
    pub(crate) fn read(text: &str) -> Option<Self> {
        let mut numbers = text.split(['.', '-', '+']).map(str::parse);
        Some(Self(numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next().and_then(Result::ok).unwrap_or(0)))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Environment,
    Line { path: String, number: usize },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment => f.write_str("the environment"),
            Self::Line { path, number } => write!(f, "{path}:{number}"),
        }
    }
}

/// The value that a library gets, and those that it does not.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) name: String,
    pub(crate) value: String,
    pub(crate) source: Source,
    pub(crate) hides: Vec<(Source, String)>,
}

impl Setting {
    /// Says where the value comes from, and what it hides.
    pub(crate) fn origin(&self) -> String {
        match self.hides.iter().find(|(_, value)| *value != self.value) {
            Some((source, value)) => format!("{} wins over `{value}` of {source}", self.source),
            None => format!("set in {}", self.source),
        }
    }

    /// Says how to take the value away.
    pub(crate) fn remove(&self) -> String {
        match (&self.source, self.hides.first()) {
            (Source::Environment, Some((source, value))) => format!("unset it, so that `{value}` of {source} is used"),
            (Source::Environment, None) => "unset it".to_owned(),
            (source, _) => format!("remove it from {source}"),
        }
    }
}

/// All settings of a machine's process.
pub(crate) struct Settings {
    /// The variables of the process.
    pub(crate) variables: BTreeMap<String, String>,
    nccl: BTreeMap<String, Setting>,
    ucx: BTreeMap<String, Setting>,
    /// The problems of the files themselves.
    pub(crate) of_files: Vec<Finding>,
}

impl Settings {
    /// Reads the settings of a machine's process, with these versions of NCCL and UCX, and UCX at this path.
    pub(crate) fn of(machine: &dyn Machine, nccl: Option<Version>, ucx: Option<Version>, libucp: Option<&str>) -> Self {
        let variables = machine.variables().unwrap_or_default();
        let ucx = ucx::settings(machine, &variables, ucx, libucp);
        let mut settings = Self { variables, nccl: BTreeMap::new(), ucx, of_files: Vec::new() };
        for (name, value) in &settings.variables {
            if name.starts_with("NCCL_") {
                let setting = Setting {
                    name: name.clone(),
                    value: value.clone(),
                    source: Source::Environment,
                    hides: Vec::new(),
                };
                settings.nccl.insert(name.clone(), setting);
            }
        }
        let keeps_returns = nccl.is_none_or(|version| version < HOME_IS_A_VARIABLE);
        for path in settings.files(machine, keeps_returns) {
            if let Ok(text) = machine.text(&path) {
                settings.read(&path, &text, keeps_returns);
            }
        }
        settings
    }

    /// Returns the files that are read, in their order.
    fn files(&mut self, machine: &dyn Machine, home_of_passwd: bool) -> Vec<String> {
        let home = self.variables.get("HOME").cloned();
        let of_passwd = home_of_user(machine);
        let used = if home_of_passwd { of_passwd.clone().or_else(|| home.clone()) } else { home.clone() };
        let named = self.variables.get("NCCL_CONF_FILE").filter(|path| !path.is_empty()).cloned();
        let own = |home: &str| format!("{}/.nccl.conf", home.trim_end_matches('/'));
        let mut files = Vec::new();
        match named {
            Some(path) => {
                let shown = used.as_deref().unwrap_or("/root");
                if path.starts_with('~') {
                    let absolute = path.replacen('~', shown, 1);
                    self.of_files.push(
                        Finding::error(
                            "NCCL_CONF_FILE",
                            format!(
                                "`{path}` opens no file, because `~` is not expanded; {} is not read either",
                                own(shown)
                            ),
                            format!("write the absolute path: NCCL_CONF_FILE={absolute}"),
                        )
                        .because("NCCL's param.cc opens the path as it is"),
                    );
                } else if path.contains('$') && machine.exists(&path) == Ok(false) {
                    let absolute = path.replace("${HOME}", shown).replace("$HOME", shown);
                    self.of_files.push(
                        Finding::error(
                            "NCCL_CONF_FILE",
                            format!(
                                "`{path}` opens no file, because variables are not expanded; {} is not read either",
                                own(shown)
                            ),
                            format!("write the absolute path: NCCL_CONF_FILE={absolute}"),
                        )
                        .because("NCCL's param.cc opens the path as it is"),
                    );
                } else if machine.exists(&path) == Ok(false) {
                    self.of_files.push(
                        Finding::error(
                            "NCCL_CONF_FILE",
                            format!("there is no file `{path}`, and {} is not read either", own(shown)),
                            "name a file that exists, or unset it",
                        )
                        .because(path.clone()),
                    );
                } else {
                    files.push(path);
                }
            }
            None => {
                if let (Some(home), Some(used)) = (&home, &used)
                    && home != used
                    && machine.exists(&own(home)) == Ok(true)
                {
                    self.of_files.push(
                        Finding::warning(
                            ".nccl.conf",
                            format!(
                                "{} is not read: up to NCCL 2.29 the home is that of /etc/passwd, {used}",
                                own(home)
                            ),
                            format!("move it to {}, or set NCCL_CONF_FILE={}", own(used), own(home)),
                        )
                        .because(format!("HOME={home}")),
                    );
                }
                files.extend(used.as_deref().map(own));
            }
        }
        files.push(ETC.to_owned());
        files
    }

    /// Reads the lines of a file. Nothing is trimmed, and there are no comments behind a value.
    fn read(&mut self, path: &str, text: &str, keeps_returns: bool) {
        let mut returns = false;
        for (index, line) in text.split('\n').enumerate() {
            let source = Source::Line { path: path.to_owned(), number: index + 1 };
            let at = source.to_string();
            if line.starts_with('#') {
                continue;
            }
            returns |= line.ends_with('\r') && line.contains('=');
            let line = if keeps_returns { line } else { line.trim_end_matches('\r') };
            let Some((name, value)) = line.split_once('=') else {
                self.of_files.extend(without_sign(path, line, at));
                continue;
            };
            let clean = value.trim_end_matches('\r').trim();
            if let Some(exported) = name.trim_start().strip_prefix("export ") {
                let fix = format!("write {}={clean}", exported.trim());
                let found = format!("`export` is part of the name, so {} is not set", exported.trim());
                self.of_files.push(Finding::error(path, found, fix).because(at));
                continue;
            }
            if name != name.trim() {
                let known = name.trim();
                let found = format!("the space before `=` is part of the name, so {known} is not set");
                self.of_files.push(Finding::error(path, found, format!("write {known}={clean}")).because(at));
                continue;
            }
            if let Some((before, _)) = value.split_once('#')
                && name.starts_with("NCCL_")
            {
                let found = format!(
                    "the comment behind the value belongs to it: {name} is `{}` in {path}",
                    value.trim_end_matches('\r')
                );
                let fix = format!("write the comment in a line of its own, and {name}={}", before.trim());
                self.of_files.push(Finding::error(name, found, fix).because(at));
                self.nccl.entry(name.to_owned()).or_insert_with(|| Setting {
                    name: name.to_owned(),
                    value: before.trim().to_owned(),
                    source,
                    hides: Vec::new(),
                });
                continue;
            }
            if value != value.trim_matches(' ') && name.starts_with("NCCL_") {
                let found = format!("the space around the value belongs to it: {name} is `{value}` in {path}");
                self.of_files.push(Finding::error(name, found, format!("write {name}={clean}")).because(at));
            }
            if name.starts_with("NCCL_") {
                let value = value.trim_end_matches('\r').to_owned();
                match self.nccl.get_mut(name) {
                    Some(setting) => setting.hides.push((source, value)),
                    None => {
                        let setting = Setting { name: name.to_owned(), value, source, hides: Vec::new() };
                        self.nccl.insert(name.to_owned(), setting);
                    }
                }
            }
        }
        if returns && keeps_returns {
            self.of_files.push(
                Finding::error(
                    path,
                    "its lines end as on Windows, and the carriage return belongs to each value",
                    format!("give it the line ends of Linux: dos2unix {path}"),
                )
                .because("NCCL before 2.30 keeps the carriage return"),
            );
        }
    }

    /// Returns a setting of NCCL that has a value.
    pub(crate) fn nccl(&self, name: &str) -> Option<&Setting> {
        self.nccl.get(name).filter(|setting| !setting.value.is_empty())
    }

    /// Returns a setting of NCCL, also an empty one.
    pub(crate) fn nccl_or_empty(&self, name: &str) -> Option<&Setting> {
        self.nccl.get(name)
    }

    pub(crate) fn all_of_nccl(&self) -> impl Iterator<Item = &Setting> {
        self.nccl.values()
    }

    /// Returns a setting of UCX that has a value.
    pub(crate) fn ucx(&self, name: &str) -> Option<&Setting> {
        self.ucx.get(name).filter(|setting| !setting.value.is_empty())
    }

    pub(crate) fn all_of_ucx(&self) -> impl Iterator<Item = &Setting> {
        self.ucx.values().filter(|setting| !setting.value.is_empty())
    }

    /// Returns a variable that has a value.
    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns the number that NCCL reads from a setting; `None` if it is unset, or no number is read.
    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        match read_number(&self.nccl(name)?.value) {
            Number::Read { value, .. } => Some(value),
            Number::Overflow => None,
        }
    }
}

/// A line such as `NCCL_DEBUG: INFO`, which sets nothing.
fn without_sign(path: &str, line: &str, at: String) -> Option<Finding> {
    let (name, value) = line.trim().split_once([':', ' '])?;
    let is_name = name.starts_with("NCCL_") && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let value = value.trim();
    (is_name && !value.is_empty()).then(|| {
        let found = format!("the line `{}` has no `=`, so {name} is not set", line.trim());
        Finding::warning(path, found, format!("write {name}={value}")).because(at)
    })
}

/// Returns the home of the process's user by `/etc/passwd`. Without that file, the one that the system's superuser has.
fn home_of_user(machine: &dyn Machine) -> Option<String> {
    let status = machine.text("/proc/self/status").ok()?;
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.to_owned();
    let passwd = machine.text("/etc/passwd").unwrap_or_default();
    let of_user = |line: &str| {
        let fields: Vec<&str> = line.split(':').collect();
        (fields.get(2) == Some(&uid.as_str())).then(|| fields.get(5).map(|home| (*home).to_owned())).flatten()
    };
    passwd.lines().find_map(of_user).or_else(|| (uid == "0").then(|| "/root".to_owned()))
}

/// The number that `strtoll` with base 0 reads, as NCCL calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    Read {
        value: i64,
        /// The bytes that belong to the number.
        used: usize,
        octal: bool,
    },
    /// NCCL takes the default.
    Overflow,
}

pub(crate) fn read_number(text: &str) -> Number {
    let bytes = text.as_bytes();
    let mut at = bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    let negative = bytes.get(at) == Some(&b'-');
    at += usize::from(negative || bytes.get(at) == Some(&b'+'));
    let hexadecimal =
        bytes.len() > at + 2 && bytes[at] == b'0' && (bytes[at + 1] | 32) == b'x' && bytes[at + 2].is_ascii_hexdigit();
    let octal = !hexadecimal && bytes.get(at) == Some(&b'0') && bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
    let base = if hexadecimal {
        16
    } else if octal {
        8
    } else {
        10
    };
    at += if hexadecimal { 2 } else { 0 };
    let digits = bytes[at.min(bytes.len())..].iter().take_while(|byte| char::from(**byte).is_digit(base)).count();
    if digits == 0 {
        return Number::Read { value: 0, used: 0, octal: false };
    }
    let parsed = i64::from_str_radix(&text[at..at + digits], base);
    match parsed {
        Ok(value) => Number::Read { value: if negative { -value } else { value }, used: at + digits, octal },
        Err(_) => Number::Overflow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_strtoll_reads_them() {
        let read = |text| match read_number(text) {
            Number::Read { value, used, .. } => (value, used),
            Number::Overflow => (i64::MAX, 0),
        };
        assert_eq!(read("22"), (22, 2));
        assert_eq!(read("022"), (18, 3));
        assert_eq!(read("0x10"), (16, 4));
        assert_eq!(read("8M"), (8, 1));
        assert_eq!(read(" -1 "), (-1, 3));
        for nothing in ["", "true", "\"3\"", "-", "x"] {
            assert_eq!(read(nothing), (0, 0), "{nothing}");
        }
        assert_eq!(read("08"), (0, 1));
        assert_eq!(read_number("99999999999999999999"), Number::Overflow);
        assert!(matches!(read_number("012"), Number::Read { value: 10, octal: true, .. }));
    }
}
