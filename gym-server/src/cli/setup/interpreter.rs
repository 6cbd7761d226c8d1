//! Finds a Python interpreter with nemo-gym, and the directories of the package.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;

/// Limit for the check. An interpreter starts in 20 ms, or in seconds from a cold network disk.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// Prints the JSON that [`ProbeOutput`] parses, without importing nemo_gym, which would take seconds.
const PROBE_SCRIPT: &str = r#"
import importlib.util, json, os, platform, sys
spec = importlib.util.find_spec("nemo_gym")
home = [os.path.dirname(os.path.dirname(spec.origin))] if spec and spec.origin else []
kinds = ("resources_servers", "responses_api_models", "responses_api_agents", "environment_servers")
more = [os.path.abspath(p) for p in sys.path if p and any(os.path.isdir(os.path.join(p, k)) for k in kinds)]
print(json.dumps({"version": platform.python_version(), "has": bool(home), "roots": list(dict.fromkeys(home + more))}))
"#;

/// A Python interpreter with nemo-gym.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Interpreter {
    pub(in crate::cli) path: PathBuf,
    pub(in crate::cli) version: String,
    /// The directories that contain `resources_servers` and the other kinds of servers.
    pub(in crate::cli) roots: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct ProbeOutput {
    version: String,
    has: bool,
    roots: Vec<PathBuf>,
}

impl Interpreter {
    /// Checks the interpreter at `typed`, or by default that of the active virtual environment, else the first
    /// `python3`.
    ///
    /// # Errors
    /// The cause and the fix.
    pub(in crate::cli) async fn find(typed: Option<&Path>) -> Result<Self, String> {
        const FIX: &str = "fix: pass --python PATH of an interpreter with nemo-gym (Python 3.13.14 or later), or activate its virtual environment";
        let path = match typed {
            Some(typed) => program(typed).ok_or_else(|| format!("--python {}: program not found", typed.display())),
            None => default_program().ok_or_else(|| format!("no python3 found in PATH\n  {FIX}")),
        }?;
        let result = tokio::time::timeout(PROBE_TIMEOUT, probe(&path)).await;
        let result = result.unwrap_or_else(|_| Err(format!("no response within {PROBE_TIMEOUT:?}")));
        let result =
            result.map_err(|why| format!("the interpreter {} cannot be used: {why}\n  {FIX}", path.display()))?;
        if !result.has {
            return Err(format!(
                "the interpreter {} (Python {}) has no nemo-gym\n  {FIX}",
                path.display(),
                result.version
            ));
        }
        Ok(Self { path, version: result.version, roots: result.roots })
    }
}

async fn probe(path: &Path) -> Result<ProbeOutput, String> {
    let output = Command::new(path)
        .args(["-c", PROBE_SCRIPT])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}", output.status, stderr.lines().last().unwrap_or_default().trim()));
    }
    // Site customizations may print; the result is the last line.
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line)
        .map_err(|_| format!("unexpected output `{}`", line.chars().take(200).collect::<String>()))
}

fn default_program() -> Option<PathBuf> {
    let active = std::env::var_os("VIRTUAL_ENV").map(|folder| PathBuf::from(folder).join("bin/python"));
    active.filter(|python| python.is_file()).or_else(|| program(Path::new("python3")))
}

/// Returns an absolute path, because children run in other working directories. Links are kept, because Python finds a
/// virtual environment through its link.
fn program(named: &Path) -> Option<PathBuf> {
    if named.components().count() > 1 || named.is_absolute() {
        return std::path::absolute(named).ok().filter(|path| path.is_file());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(named)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(folder: &Path, text: &str) -> PathBuf {
        let path = folder.join("python");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[tokio::test]
    async fn the_last_line_is_the_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = script(folder.path(), r#"echo hello; echo '{"version": "3.13.1", "has": true, "roots": ["/r"]}'"#);
        let found = Interpreter::find(Some(&path)).await.unwrap();
        assert_eq!(found, Interpreter { path, version: "3.13.1".to_owned(), roots: vec![PathBuf::from("/r")] });
    }

    #[tokio::test]
    async fn an_interpreter_that_cannot_be_used_is_named_with_the_fix() {
        let folder = tempfile::tempdir().unwrap();
        for (text, why) in [
            (r#"echo '{"version": "3.9.2", "has": false, "roots": []}'"#, "(Python 3.9.2) has no nemo-gym"),
            ("echo broken >&2; exit 3", "exit status: 3: broken"),
            ("echo nonsense", "unexpected output `nonsense`"),
        ] {
            let path = script(folder.path(), text);
            let error = Interpreter::find(Some(&path)).await.unwrap_err();
            assert!(error.contains(why) && error.contains("--python PATH"), "{error}");
        }
        let error = Interpreter::find(Some(Path::new("no/such/python"))).await.unwrap_err();
        assert!(error.contains("no/such/python: program not found"), "{error}");
    }
}
