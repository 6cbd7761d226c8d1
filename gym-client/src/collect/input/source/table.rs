//! Tables of text, which some people have their tasks in: recognized, with the way to JSON lines.

use std::path::{Path, PathBuf};

/// Columns that a message names.
const COLUMNS_MAX: usize = 8;
/// Endings of the names of such files.
const ENDINGS: [&str; 2] = ["csv", "tsv"];
/// Names of columns that have the text of a task, the most usual first.
const TASK_COLUMNS: [&str; 7] = ["input", "prompt", "question", "problem", "instruction", "task", "text"];

/// Returns the problem of a file that begins like a table of text, with the fix; `None` for all others.
pub(super) fn problem(file: &Path, begins: &[u8]) -> Option<String> {
    if begins.starts_with(&[0xFF, 0xFE]) || begins.starts_with(&[0xFE, 0xFF]) {
        return Some(format!(
            "the input is UTF-16; it must be UTF-8\n  fix: convert it: iconv -f UTF-16 -t UTF-8 {} > {}",
            file.display(),
            converted(file).display()
        ));
    }
    let text = String::from_utf8_lossy(begins);
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(&text);
    let mut lines = text.lines();
    let header = lines.next()?;
    let json = if is_named(file) { &['{'][..] } else { &['{', '[', '"'] };
    if header.trim().is_empty() || header.trim_start().starts_with(json) {
        return None;
    }
    let count = |separator| header.matches(separator).count();
    let (separator, kind, delimiter) = match (count('\t'), count(';')) {
        (1.., _) => ('\t', "tab-separated", ", delimiter=\"\\t\""),
        (0, semicolons) if semicolons > count(',') => (';', "semicolon-separated", ", delimiter=\";\""),
        _ => (',', "comma-separated", ""),
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
    let name = file.display();
    let lines = converted(file);
    Some(format!(
        "the input is a table of {kind} values ({shown}{more}); it must be JSON lines: an object for each task, in which \
         responses_create_params.input has the text of the task, and the environment reads the other keys\n  fix: convert it; if \
         the column `{of_task}` has the text: python3 -c 'import csv, json, sys; [print(json.dumps({{\"responses_create_params\": \
         {{\"input\": row.pop(\"{of_task}\")}}, **row}})) for row in csv.DictReader(open(sys.argv[1]){delimiter})]' {name} > {}",
        lines.display()
    ))
}

/// Returns the name of the file for the converted rows, which is not that of the input.
fn converted(file: &Path) -> PathBuf {
    let lines = file.with_extension("jsonl");
    if lines != file {
        return lines;
    }
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    file.with_file_name(format!("{stem}-rows.jsonl"))
}

fn is_named(file: &Path) -> bool {
    let ending = file.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    ENDINGS.iter().any(|known| ending.eq_ignore_ascii_case(known))
}
