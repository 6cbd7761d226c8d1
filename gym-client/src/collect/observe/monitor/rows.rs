//! Finds the row of one attempt in a file that a ledger appends to.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use crate::collect::observe::monitor::AttemptId;

/// Bytes of one read, from the end of the file towards its beginning: people mostly read rows that are new.
const BLOCK_BYTES: u64 = 1 << 20;
/// Maximum bytes of a row that is reported.
const ROW_BYTES_MAX: usize = 8 << 20;
/// Limit for the search: a gigabyte takes about a second.
const SEARCH_MAX: Duration = Duration::from_secs(8);

#[derive(Deserialize)]
struct Label {
    #[serde(rename = "_ng_task_index")]
    task: u32,
    #[serde(rename = "_ng_rollout_index")]
    repeat: u32,
    #[serde(default, rename = "_ng_attempt_index")]
    attempt: u32,
}

/// Returns the newest row of the attempt. The number of the attempt counts only if `exact`: a row that was recorded is the only one of its
/// rollout.
///
/// # Errors
/// The reason why there is none, for a person.
pub(super) fn find_row(path: &Path, wanted: AttemptId, exact: bool) -> Result<Box<RawValue>, String> {
    let read = |error: io::Error| format!("read {}: {error}", path.display());
    let mut file = File::open(path).map_err(read)?;
    let mut end = file.seek(SeekFrom::End(0)).map_err(read)?;
    let until = Instant::now() + SEARCH_MAX;
    // The beginning of a line whose end was in the block after.
    let mut rest: Vec<u8> = Vec::new();
    while end > 0 {
        if Instant::now() > until {
            return Err(format!("the row was not found within {SEARCH_MAX:?}; use `rgym view {}`", path.display()));
        }
        let begin = end.saturating_sub(BLOCK_BYTES);
        let mut block = vec![0; usize::try_from(end - begin).expect("a block fits into memory")];
        file.seek(SeekFrom::Start(begin)).and_then(|_| file.read_exact(&mut block)).map_err(read)?;
        block.append(&mut rest);
        end = begin;
        let first = match begin {
            0 => 0,
            _ => match memchr::memchr(b'\n', &block) {
                Some(at) => at + 1,
                None => {
                    if block.len() > 64 * ROW_BYTES_MAX {
                        return Err(format!("{} has a line that is too long to be shown", path.display()));
                    }
                    rest = block;
                    continue;
                }
            },
        };
        for line in block[first..].rsplit(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let Ok(label) = serde_json::from_slice::<Label>(line) else { continue };
            if label.task != wanted.task || label.repeat != wanted.repeat || (exact && label.attempt != wanted.attempt)
            {
                continue;
            }
            if line.len() > ROW_BYTES_MAX {
                let mebibytes = line.len() >> 20;
                return Err(format!("the row has {mebibytes} MiB; use `rgym view {}`", path.display()));
            }
            return serde_json::from_slice(line).map_err(|error| format!("the row cannot be read: {error}"));
        }
        block.truncate(first);
        rest = block;
    }
    Err(format!("{} has no such row", path.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn id(task: u32, repeat: u32, attempt: u32) -> AttemptId {
        AttemptId { task, repeat, attempt }
    }

    #[test]
    fn a_row_is_found_wherever_the_blocks_cut_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rollouts.jsonl");
        let mut file = File::create(&path).unwrap();
        // Rows of uneven lengths: some longer than a block, and a torn last line.
        for task in 0..40_u32 {
            let filler =
                "x".repeat(if task % 13 == 5 { (BLOCK_BYTES as usize) * 2 + 7 } else { 90_001 * (task as usize % 4) });
            writeln!(file, r#"{{"_ng_task_index":{task},"_ng_rollout_index":1,"filler":"{filler}","reward":{task}}}"#)
                .unwrap();
        }
        write!(file, r#"{{"_ng_task_index":7,"_ng_rollout_index":1,"rew"#).unwrap();
        for task in 0..40 {
            let row = find_row(&path, id(task, 1, 3), false).unwrap();
            let row: serde_json::Value = serde_json::from_str(row.get()).unwrap();
            assert_eq!(row["reward"], task);
        }
        assert!(find_row(&path, id(3, 0, 0), false).unwrap_err().contains("no such row"));
        assert!(find_row(&path, id(3, 1, 2), true).unwrap_err().contains("no such row"));
        assert!(find_row(&folder.path().join("none"), id(0, 0, 0), true).unwrap_err().contains("none"));
    }

    #[test]
    fn the_newest_row_of_a_failed_attempt_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("failures.jsonl");
        let rows = ["a", "b", "c"].map(|cause| {
            format!(r#"{{"_ng_task_index":1,"_ng_rollout_index":0,"_ng_attempt_index":2,"cause":"{cause}"}}"#)
        });
        std::fs::write(&path, rows.join("\n") + "\n").unwrap();
        assert!(find_row(&path, id(1, 0, 2), true).unwrap().get().contains(r#""cause":"c""#));
    }
}
