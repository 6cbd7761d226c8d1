//! What can be run: the tests of a build, and commands of the gate's script.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// Limit of a case, unless [`LIMITS`] has it: four times what the slowest of them takes on a quiet machine. Their own bounds are below it, so that
/// they can say what they wait for.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Cases that take longer: the begin of the name, and the limit in seconds.
const LIMITS: &[(&str, u64)] = &[("gym-examples::bad_input", 300), ("gym-examples::cluster", 240)];

/// Cases that compute: the begin of the name, and the cores that they use. All others mostly wait.
const CORES: &[(&str, usize)] = &[("gym-server::simulation no_seed", 2), ("gym-client::config_peer shipped_", 1)];

/// A test, or a command of the gate's script.
#[derive(Debug)]
pub(crate) struct Case {
    /// Such as `gym-group::workers c137_two_ranks_are_two_processes`.
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// The directory in which it runs.
    pub(crate) folder: PathBuf,
    pub(crate) limit: Duration,
    /// Cores that it uses, 0 if it mostly waits.
    pub(crate) cores: usize,
}

/// Returns the tests of all programs that the messages of a build name.
pub(crate) fn of_build(messages: &Path) -> Result<Vec<Case>> {
    let text = std::fs::read_to_string(messages).with_context(|| messages.display().to_string())?;
    let mut cases = Vec::new();
    for line in text.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).with_context(|| messages.display().to_string())?;
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            continue;
        }
        let text = |value: &Value| value.as_str().map(str::to_owned).with_context(|| format!("a text in {line}"));
        if message["executable"].is_null() {
            continue;
        }
        let program = PathBuf::from(text(&message["executable"])?);
        let manifest = PathBuf::from(text(&message["manifest_path"])?);
        let folder = manifest.parent().context("a folder")?.to_owned();
        let package = package(&text(&message["package_id"])?);
        let target = text(&message["target"]["name"])?;
        let group = match text(&message["target"]["kind"][0])?.as_str() {
            "test" => format!("{package}::{target}"),
            "lib" => package,
            kind => format!("{package}::{kind}/{target}"),
        };
        for test in list(&program, &folder)? {
            let name = format!("{group} {test}");
            let limit = found(LIMITS, &name).map_or(CALL_TIMEOUT, Duration::from_secs);
            let cores = found(CORES, &name).unwrap_or(0);
            let arguments = ["--exact", &test, "--nocapture"].map(str::to_owned).to_vec();
            cases.push(Case { name, program: program.clone(), arguments, folder: folder.clone(), limit, cores });
        }
    }
    if cases.is_empty() {
        bail!("{} names no test program", messages.display());
    }
    Ok(cases)
}

/// Returns the commands of a file: name, limit in seconds, cores and shell command.
pub(crate) fn of_commands(file: &Path) -> Result<Vec<Case>> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let case = |(at, line): (usize, &str)| {
        let place = || format!("{}:{}: name, limit, cores and command, separated by tabs", file.display(), at + 1);
        let [name, limit, cores, command] = line.split('\t').collect::<Vec<_>>()[..] else { bail!(place()) };
        Ok(Case {
            name: name.to_owned(),
            program: "bash".into(),
            arguments: ["-euo", "pipefail", "-c", command].map(str::to_owned).to_vec(),
            folder: std::env::current_dir()?,
            limit: Duration::from_secs(limit.parse().with_context(place)?),
            cores: cores.parse().with_context(place)?,
        })
    };
    text.lines().enumerate().map(case).collect()
}

/// Returns the names that a test program lists.
fn list(program: &Path, folder: &Path) -> Result<Vec<String>> {
    let mut command = Command::new(program);
    command.args(["--list", "--format", "terse"]).current_dir(folder).stdin(Stdio::null());
    let output = command.output().with_context(|| program.display().to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{} --list: {}: {text}{}", program.display(), output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Returns the name of a package from its id: `path+file:///…/gym-core#0.1.0`, or `…#gym-examples@0.1.0` if its folder has another name.
fn package(id: &str) -> String {
    let (path, version) = id.rsplit_once('#').unwrap_or((id, ""));
    let name = version.split_once('@').map(|(name, _)| name);
    name.or_else(|| path.rsplit('/').next()).unwrap_or(id).to_owned()
}

/// Returns the value of the longest begin of a name.
fn found<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    let fits = table.iter().filter(|(begin, _)| name.starts_with(begin));
    fits.max_by_key(|(begin, _)| begin.len()).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_named_by_its_id() {
        assert_eq!(package("path+file:///gym/gym-core#0.1.0"), "gym-core");
        assert_eq!(package("path+file:///gym/examples#gym-examples@0.1.0"), "gym-examples");
    }

    #[test]
    fn the_longest_begin_decides() {
        let table = [("a", 1), ("a b", 2)];
        assert_eq!(["a b c", "a c", "b"].map(|name| found(&table, name)), [Some(2), Some(1), None]);
    }
}
