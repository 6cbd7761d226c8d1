//! A generated page: its tables, and the comparison with the file on the disk.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// If this environment variable is set, a run writes the files.
const WRITES: &str = "GYM_REFERENCE";
const COMMAND: &str = "GYM_REFERENCE=1 cargo test -p gym-group-examples --test reference";

/// Returns the root of the workspace.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Writes the file if it is to be written, and otherwise checks that it has this text.
#[track_caller]
pub(crate) fn generated(file: &str, text: &str) {
    let path = workspace().join(file);
    if std::env::var_os(WRITES).is_some() {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    if found == text {
        return;
    }
    let line = found.lines().zip(text.lines()).take_while(|(found, text)| found == text).count();
    let (found, wanted) = (found.lines().nth(line).unwrap_or_default(), text.lines().nth(line).unwrap_or_default());
    panic!("{file}:{}: differs from the code\n  file: {found}\n  code: {wanted}\n  fix: {COMMAND}", line + 1);
}

/// A page in Markdown.
pub(crate) struct Page {
    file: String,
    text: String,
}

impl Page {
    /// Begins a page of `docs/reference`.
    pub(crate) fn new(file: &str, title: &str, about: &str) -> Self {
        let text = format!("# {title}\n\n{about}\n\nGenerated from the code by `{COMMAND}`.\n");
        Self { file: format!("docs/reference/{file}"), text }
    }

    pub(crate) fn section(&mut self, title: &str, about: &str) {
        self.text.push_str(&format!("\n## {title}\n"));
        if !about.is_empty() {
            self.text.push_str(&format!("\n{about}\n"));
        }
    }

    pub(crate) fn table<const N: usize>(&mut self, head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) {
        self.text.push_str(&format!("\n| {} |\n|{}\n", head.join(" | "), "---|".repeat(N)));
        for row in rows {
            // A bar would end the cell.
            let cells = row.map(|cell| cell.replace('|', "\\|").replace('\n', " "));
            let _ = writeln!(self.text, "| {} |", cells.join(" | "));
        }
    }

    /// Writes the page, or compares it with the file.
    #[track_caller]
    pub(crate) fn finish(self) {
        generated(&self.file, &self.text);
    }
}

/// Returns the text as code, or an empty cell.
pub(crate) fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}

/// Returns the Rust sources of the workspace: path and text.
pub(crate) fn sources() -> Vec<(String, String)> {
    fn collect(folder: &Path, root: &Path, into: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                collect(&path, root, into);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let file = path.strip_prefix(root).unwrap().display().to_string();
                into.push((file, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let root = workspace().canonicalize().unwrap();
    let mut all = Vec::new();
    collect(&root, &root, &mut all);
    all.sort();
    all
}
