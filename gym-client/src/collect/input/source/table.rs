//! Tables of text, which some people have their tasks in: recognized, with the way to JSON lines.

use std::path::Path;

/// Columns that a message names.
const COLUMNS_MAX: usize = 8;
/// Endings of the names of such files.
const ENDINGS: [&str; 2] = ["csv", "tsv"];
/// Names of columns that have the text of a task, the most usual first.
const TASK_COLUMNS: [&str; 7] = ["input", "prompt", "question", "problem", "instruction", "task", "text"];

/// Returns the problem of a file that begins like a table of text, with the fix; `None` for all others.
pub(super) fn problem(file: &Path, begins: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(begins);
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(&text);
    let mut lines = text.lines();
    let header = lines.next()?;
    let json = if is_named(file) { &['{'][..] } else { &['{', '[', '"'] };
    if header.trim().is_empty() || header.trim_start().starts_with(json) {
        return None;
    }
    let (separator, kind) = match header.contains('\t') {
        true => ('\t', "tab-separated"),
        false => (',', "comma-separated"),
    };
    let columns: Vec<&str> = header.split(separator).map(|column| column.trim().trim_matches('"')).collect();
    let second = lines.next().map(|line| line.split(separator).count());
    // A quoted value may have separators, so the second line can have more.
    let like_a_table = columns.len() > 1 && second.is_none_or(|count| count >= columns.len());
    if !is_named(file) && !like_a_table {
        return None;
    }
    let shown = columns[..columns.len().min(COLUMNS_MAX)].join(", ");
    let more = if columns.len() > COLUMNS_MAX { ", …" } else { "" };
    let usual = TASK_COLUMNS.into_iter().find(|usual| columns.iter().any(|column| column.eq_ignore_ascii_case(usual)));
    let of_task = usual.and_then(|usual| columns.iter().find(|column| column.eq_ignore_ascii_case(usual)));
    let of_task = of_task.or(columns.first()).copied().unwrap_or_default();
    let delimiter = if separator == '\t' { ", delimiter=\"\\t\"" } else { "" };
    let name = file.display();
    let lines = file.with_extension("jsonl");
    Some(format!(
        "the input is a table of {kind} values ({shown}{more}); it must be JSON lines: an object for each task, in which \
         responses_create_params.input has the text of the task, and the environment reads the other keys\n  fix: convert it; if \
         the column `{of_task}` has the text: python3 -c 'import csv, json, sys; [print(json.dumps({{\"responses_create_params\": \
         {{\"input\": row.pop(\"{of_task}\")}}, **row}})) for row in csv.DictReader(open(sys.argv[1]){delimiter})]' {name} > {}",
        lines.display()
    ))
}

fn is_named(file: &Path) -> bool {
    let ending = file.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    ENDINGS.iter().any(|known| ending.eq_ignore_ascii_case(known))
}
