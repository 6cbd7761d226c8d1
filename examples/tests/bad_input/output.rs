//! Output paths, and the files of an earlier run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gym_client::collect::ledger::{JsonlLedger, OpenMode};
use gym_client::collect::{CollectOptions, ExistingOutput, OutputFiles};
use gym_core::{CallContext, World};

use super::ground::{Ground, outcome};
use super::support;
use super::{Case, Got};

const ROWS: usize = 6;

fn options(ground: &Ground, output: impl Into<PathBuf>) -> CollectOptions {
    let input = ground.fresh().join("tasks.jsonl");
    std::fs::write(&input, ground.solved_rows(ROWS)).unwrap();
    let mut options = CollectOptions::new(input, output);
    options.driver.attempts_max = 1;
    options
}

fn place(
    name: &'static str,
    result: &'static str,
    says: &'static [&'static str],
    output: fn(&Path) -> PathBuf,
) -> Case {
    Case::new("output that cannot be written", name, result, says, move |ground| {
        Box::pin(async move {
            let output = output(&ground.fresh());
            outcome(ground.run(options(ground, output)).await)
        })
    })
}

/// Damages the files of a finished collection, and resumes it. Complete rows must remain, regardless of the others.
fn damaged(name: &'static str, result: &'static str, says: &'static [&'static str], damage: fn(&OutputFiles)) -> Case {
    Case::new("damaged earlier run", name, result, says, move |ground| {
        Box::pin(async move {
            let output = ground.fresh().join("rollouts.jsonl");
            let options = options(ground, &output);
            ground.run(options.clone()).await.unwrap();
            let files = OutputFiles::beside(&output);
            let before = std::fs::read(&output).unwrap();
            damage(&files);
            let damaged = std::fs::read(&output).unwrap();
            let mut options = options;
            options.existing = ExistingOutput::Resume;
            let got = outcome(ground.run(options).await);
            let after = std::fs::read(&output).unwrap();
            if got.outcome.starts_with("refused") {
                assert_eq!(after, damaged, "what is there is left as it is");
            } else {
                let whole = before.iter().position(|byte| *byte == b'\n').unwrap();
                assert_eq!(after[..whole], before[..whole], "the first row");
                assert_eq!(after.iter().filter(|byte| **byte == b'\n').count(), ROWS);
            }
            got
        })
    })
}

/// Collects again into the output of a finished collection, with other options. No file may change.
fn existing(name: &'static str, says: &'static [&'static str], change: fn(&mut CollectOptions)) -> Case {
    Case::new("existing output", name, "refused: invalid_argument", says, move |ground| {
        Box::pin(async move {
            let mut options = options(ground, ground.fresh().join("rollouts.jsonl"));
            ground.run(options.clone()).await.unwrap();
            let files = OutputFiles::beside(&options.output);
            let texts =
                || [&files.rollouts, &files.materialized, &files.aggregate].map(|path| std::fs::read(path).unwrap());
            let (input, recorded) = (std::fs::read(&options.input).unwrap(), texts());
            let path = options.input.clone();
            change(&mut options);
            let got = outcome(ground.run(options).await);
            assert!(
                texts() == recorded && std::fs::read(path).unwrap() == input,
                "a rejected collection changed a file"
            );
            got
        })
    })
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        existing("without --resume or --overwrite", &["rollouts.jsonl exists", "--resume", "--overwrite"], |_| {}),
        existing("the input is the output", &["the input ", "are the same file"], |options| {
            (options.output, options.existing) = (options.input.clone(), ExistingOutput::Overwrite);
        }),
        existing("the input is the events file", &["the input ", "the events ", "are the same file"], |options| {
            (options.events, options.existing) = (Some(options.input.clone()), ExistingOutput::Overwrite);
        }),
        existing("its events file is a directory", &["write events to ", "is a directory"], |options| {
            let folder = options.input.parent().map(Path::to_owned);
            (options.events, options.existing) = (folder, ExistingOutput::Overwrite);
        }),
        existing("resumed with a limit", &["fewer tasks", "task 4"], |options| {
            (options.existing, options.materialize.limit) = (ExistingOutput::Resume, Some(4));
        }),
        existing(
            "resumed with an override",
            &["responses_create_params.top_p: was absent, is 0.5 (6 rows"],
            |options| {
                options.existing = ExistingOutput::Resume;
                options.materialize.overrides.insert("top_p".to_owned(), serde_json::json!(0.5));
            },
        ),
        place(
            "a file as its directory",
            "refused: invalid_argument",
            &["file/rollouts", "a part of the path is a file"],
            |folder| {
                std::fs::write(folder.join("file"), "").unwrap();
                folder.join("file/rollouts.jsonl")
            },
        ),
        place("a directory with its name", "refused: invalid_argument", &["rollouts.jsonl"], |folder| {
            std::fs::create_dir(folder.join("rollouts.jsonl")).unwrap();
            folder.join("rollouts.jsonl")
        }),
        // Not writable, even for root.
        place("a directory that cannot be written", "refused: invalid_argument", &["/proc/rollouts", "write"], |_| {
            PathBuf::from("/proc/rollouts.jsonl")
        }),
        Case::new(
            "output of another collector",
            "in use",
            "refused: failed_precondition",
            &["rollouts.jsonl", "another collector writes to this file"],
            |ground| {
                Box::pin(async move {
                    let output = ground.fresh().join("rollouts.jsonl");
                    std::fs::write(&output, "").unwrap();
                    let cx = CallContext::within(Duration::from_secs(10));
                    let files = World::real().files;
                    let (other, _) = JsonlLedger::open(&cx, files, &output, OpenMode::Resume).await.unwrap();
                    let got = outcome(ground.run(options(ground, &output)).await);
                    other.close(&cx).await.unwrap();
                    let left: Vec<_> = std::fs::read_dir(output.parent().unwrap()).unwrap().collect();
                    assert!(left.len() <= 3, "only the other's files: {left:?}");
                    got
                })
            },
        ),
        Case::new(
            "full disk",
            "in the middle of a run",
            "exit 1",
            &["append to rollouts.jsonl", "the file has reached the size limit", "free space", "then resume"],
            |ground| Box::pin(full_disk(ground)),
        ),
        damaged("a row in the middle is garbage", "refused: data_loss", &["rollouts.jsonl", "line 3"], |files| {
            change_line(&files.rollouts, 3, |line| line.replace_range(10..40, "~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~"))
        }),
        damaged(
            "a row in the middle is garbage, and there is no index",
            "refused: data_loss",
            &["rollouts.jsonl", "line 3"],
            |files| {
                std::fs::remove_file(files.rollouts.with_file_name("rollouts.jsonl.index")).unwrap();
                change_line(&files.rollouts, 3, |line| line.insert_str(0, "###"));
            },
        ),
        damaged("the last row is cut off", "recorded: 6", &["\"reward\":1.0"], |files| {
            let text = std::fs::read(&files.rollouts).unwrap();
            std::fs::write(&files.rollouts, &text[..text.len() - 200]).unwrap();
        }),
        damaged("the index is garbage", "recorded: 6", &["\"reward\":1.0"], |files| {
            std::fs::write(files.rollouts.with_file_name("rollouts.jsonl.index"), vec![0x5a; 1_000]).unwrap();
        }),
        damaged(
            "a materialized row is cut off",
            "refused: invalid_argument",
            &["rollouts_materialized_inputs.jsonl, line 6: malformed JSON"],
            |files| {
                let text = std::fs::read(&files.materialized).unwrap();
                std::fs::write(&files.materialized, &text[..text.len() - 200]).unwrap();
            },
        ),
        damaged(
            "a materialized row without its index",
            "refused: invalid_argument",
            &["rollouts_materialized_inputs.jsonl, line 2: _ng_task_index is not an integer", "with --overwrite"],
            |files| {
                change_line(&files.materialized, 2, |line| *line = line.replace("_ng_task_index", "_ng_tusk_index"))
            },
        ),
    ]
}

fn change_line(path: &Path, number: usize, change: impl FnOnce(&mut String)) {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    change(&mut lines[number - 1]);
    std::fs::write(path, lines.join("\n") + "\n").unwrap();
}

/// Runs a collector that may write files of 64 KiB only, which needs no privilege. Then removes the limit and resumes.
async fn full_disk(ground: &Ground) -> Got {
    const TASKS: usize = 100;
    let folder = ground.fresh();
    // Small enough for the materialized inputs, too large for the rollouts.
    let row = r#"{"responses_create_params":{"input":"2+2?"},"expected_answer":"4","agent_ref":{"name":"a_good"},"n":"#;
    let rows: String = (0..TASKS).map(|at| format!("{row}{at}}}\n")).collect();
    std::fs::write(folder.join("tasks.jsonl"), rows).unwrap();
    let line = format!(
        "exec \"$0\" collect --head-url {} --input tasks.jsonl --output rollouts.jsonl --progress none --concurrency 8",
        ground.head()
    );
    let collector = |script: String| {
        let mut command = tokio::process::Command::new("sh");
        command.current_dir(&folder).stdin(std::process::Stdio::null()).kill_on_drop(true);
        command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_gym-examples"));
        support::clean(&mut command);
        ground.output_of(command)
    };
    // Without the trap, the signal would end the process. `ulimit -f` counts 512 bytes in dash, 1,024 in bash.
    let got = collector(format!("trap '' XFSZ; ulimit -f 50; {line}")).await;
    let output = folder.join("rollouts.jsonl");
    let kept = std::fs::read(&output).unwrap();
    let whole = kept.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
    let rows = kept[..whole].iter().filter(|byte| **byte == b'\n').count();
    assert!(rows > 0 && rows < TASKS, "{rows} rows fit; {got:?}");
    let resumed = collector(format!("{line} --resume")).await;
    assert_eq!(resumed.outcome, "exit 0", "{resumed:?}");
    let told = format!("{TASKS} of {TASKS} rollouts are recorded ({rows} of them by earlier runs)");
    assert!(resumed.text.contains(&told), "{told}: {resumed:?}");
    let after = std::fs::read(&output).unwrap();
    assert_eq!(after[..whole], kept[..whole], "what was recorded");
    assert_eq!(after.iter().filter(|byte| **byte == b'\n').count(), TASKS);
    got
}
