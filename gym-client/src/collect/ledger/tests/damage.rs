//! Files that are torn, damaged, rewritten, or written by NeMo Gym's own collector.

use gym_core::rollout::KeyState;
use gym_core::testing::FileFault;

use super::*;

/// Returns a closed ledger with rows and failures.
async fn written(rows: u32) -> SimFiles {
    let files = SimFiles::new(9);
    let (ledger, _) = open(&files).await.unwrap();
    for task in 0..rows {
        complete(&ledger, task).await.unwrap();
        fail(&ledger, 1_000 + task).await.unwrap();
    }
    close(ledger).await;
    files
}

async fn opened(files: &SimFiles) -> RecoveryReport {
    let (ledger, opened) = open(files).await.unwrap();
    close(ledger).await;
    opened
}

#[tokio::test(start_paused = true)]
async fn a_line_cut_short_is_dropped_at_every_byte() {
    let whole = written(3).await.contents(&output());
    let line = lines(&whole)[2].len();
    for cut in 1..=line + 1 {
        for with_index in [false, true] {
            let files = written(3).await;
            files.set_contents(&output(), &whole[..whole.len() - cut]);
            if !with_index {
                files.remove(&index_path(&output())).await.unwrap();
            }
            let found = opened(&files).await;
            // Only the newline is missing: the row is complete, and the newline is added.
            let kept = u64::from(cut == 1);
            assert_eq!(found.completed, 2 + kept, "cut {cut}");
            let dropped = if cut == 1 { 0 } else { line + 1 - cut };
            assert_eq!(found.dropped_tail_bytes, dropped as u64, "cut {cut}");
            assert!(found.rebuilt_index);
            let contents = files.contents(&output());
            assert!(contents.ends_with(b"\n") && lines(&contents).len() as u64 == 2 + kept);
            let wanted = RecoveryReport { completed: 2 + kept, failed: 3, ..RecoveryReport::default() };
            assert_eq!(opened(&files).await, wanted, "the second opening finds all in order");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn zeros_in_blocks_that_never_reached_the_disk_are_dropped() {
    let files = written(4).await;
    let good = files.contents(&output());
    // A group of three rows follows: the size is on disk, and the second row contains zeros up to the end of a sector.
    let attempt = |task| Attempt { key: TaskKey::new(task, 0), number: 0 };
    let mut contents = good.clone();
    for task in 10..13 {
        contents.extend_from_slice(row(attempt(task), 1_500).text());
        contents.push(b'\n');
    }
    let start = (good.len() + 1_700).next_multiple_of(512);
    contents[start..start + 512].fill(0);
    files.set_contents(&output(), contents.clone());
    let found = opened(&files).await;
    assert_eq!(found.completed, 5, "the row before the hole was whole");
    assert_eq!(files.contents(&output()), contents[..good.len() + row(attempt(10), 1_500).text().len() + 1]);

    // The same zeros in a line that the index lists as acknowledged are damage, not a torn end.
    let start = good.len().next_multiple_of(512) - 512;
    let mut damaged = good.clone();
    damaged[start..].fill(0);
    let files = written(4).await;
    files.set_contents(&output(), damaged);
    assert_eq!(open(&files).await.unwrap_err().code(), Code::DataLoss);
}

#[tokio::test(start_paused = true)]
async fn any_flipped_bit_in_an_indexed_file_is_an_error_that_names_the_line() {
    let files = written(3).await;
    let (good, index) = (files.contents(&output()), files.contents(&index_path(&output())));
    let sidecar = failures_path(&output());
    let lengths: Vec<usize> = lines(&good).iter().map(|line| line.len() + 1).collect();
    for bit in (0..good.len() * 8).step_by(3) {
        let mut flipped = good.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        files.set_contents(&output(), flipped);
        files.set_contents(&index_path(&output()), index.clone());
        let error = open(&files).await.expect_err(&format!("bit {bit}"));
        assert_eq!(error.code(), Code::DataLoss, "bit {bit}: {error}");
        let line = 1 + usize::from(bit / 8 >= lengths[0]) + usize::from(bit / 8 >= lengths[0] + lengths[1]);
        let place = format!("results/rollouts.jsonl line {line} (byte ");
        assert!(error.to_string().contains(&place), "bit {bit}: {error}");
        assert!(error.to_string().contains("resume"), "it says what to do: {error}");
    }
    files.set_contents(&output(), good);
    files.set_contents(&index_path(&output()), index);
    let mut flipped = files.contents(&sidecar);
    flipped[5] ^= 1;
    files.set_contents(&sidecar, flipped);
    let error = open(&files).await.unwrap_err();
    assert!(error.to_string().contains("rollouts_failures.jsonl line 1 (byte 0)"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_broken_line_without_an_index_is_named_to_the_byte() {
    let files = SimFiles::new(1);
    let first = r#"{"_ng_task_index": 0, "_ng_rollout_index": 0}"#;
    for (second, within, why) in [
        (r#"{"_ng_task_index": 1, "#, 21, "not a JSON object"),
        (r#"[1, 2]"#, 0, "not a JSON object"),
        (r#"{"_ng_rollout_index": 0}"#, 0, "no `_ng_task_index`"),
        (r#"{"_ng_task_index": -1, "_ng_rollout_index": 0}"#, 0, "`_ng_task_index` is not an integer"),
        (r#"{"_ng_task_index": "1", "_ng_rollout_index": 0}"#, 0, "`_ng_task_index` is not an integer"),
    ] {
        files.set_contents(&output(), format!("{first}\n{second}\n{first}\n"));
        let error = open(&files).await.unwrap_err();
        assert_eq!(error.code(), Code::DataLoss, "{second}");
        let text = error.to_string();
        assert!(text.contains("rollouts.jsonl line 2 (byte ") && text.contains(why), "{text}");
        let byte: usize = text.split("(byte ").nth(1).unwrap().split(')').next().unwrap().parse().unwrap();
        assert!(byte >= first.len() + 1 + within && byte <= first.len() + 1 + second.len(), "{text}");
        // Unchanged, so that a backup can be compared.
        assert_eq!(lines(&files.contents(&output())).len(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn an_index_that_is_missing_torn_stale_or_ahead_is_mended() {
    let whole = written(5).await;
    let index = whole.contents(&index_path(&output()));
    let wanted = RecoveryReport { completed: 5, failed: 5, ..RecoveryReport::default() };
    assert_eq!(opened(&whole).await, wanted);
    let mut flipped = index.clone();
    flipped[40 * 3 + 7] ^= 16;
    let other = SimFiles::new(4);
    let (ledger, _) = open(&other).await.unwrap();
    for task in 50..60 {
        complete(&ledger, task).await.unwrap();
    }
    close(ledger).await;
    let stale = other.contents(&index_path(&output()));
    for (name, damaged) in [
        ("empty", Vec::new()),
        ("torn", index[..index.len() - 17].to_vec()),
        ("behind", index[..40 * 4].to_vec()),
        ("flipped", flipped),
        ("garbage", vec![0x5a; 999]),
        ("zeros at the end", [&index[..], &[0; 80]].concat()),
        ("another file's", stale),
    ] {
        whole.set_contents(&index_path(&output()), damaged);
        let found = opened(&whole).await;
        assert_eq!(found, RecoveryReport { rebuilt_index: true, ..wanted }, "{name}");
        assert_eq!(opened(&whole).await, wanted, "{name}: mended");
    }
    whole.remove(&index_path(&output())).await.unwrap();
    assert_eq!(opened(&whole).await, RecoveryReport { rebuilt_index: true, ..wanted });
    // The index is ahead: another program has truncated the rows.
    let contents = whole.contents(&output());
    let three: usize = lines(&contents)[..3].iter().map(|line| line.len() + 1).sum();
    whole.set_contents(&output(), &contents[..three]);
    assert_eq!(opened(&whole).await, RecoveryReport { completed: 3, rebuilt_index: true, ..wanted });
    assert_eq!(opened(&whole).await, RecoveryReport { completed: 3, ..wanted });
}

#[tokio::test(start_paused = true)]
async fn a_file_that_another_program_wrote_anew_is_read_again() {
    let files = written(5).await;
    let mut rows = lines(&files.contents(&output()));
    rows.remove(1);
    rows.push(r#"{"_ng_task_index":77,"_ng_rollout_index":0}"#.to_owned());
    files.set_contents(&output(), rows.join("\n") + "\n");
    let error = open(&files).await.unwrap_err();
    // For a line of the same length, only the user can distinguish a change from damage.
    assert!(error.to_string().contains("remove results/rollouts.jsonl.index"), "{error}");
    files.remove(&index_path(&output())).await.unwrap();
    assert_eq!(opened(&files).await.completed, 5);
    rows[0].insert(1, ' ');
    files.set_contents(&output(), rows.join("\n") + "\n");
    assert_eq!(
        opened(&files).await,
        RecoveryReport { completed: 5, failed: 5, rebuilt_index: true, ..RecoveryReport::default() }
    );
}

#[tokio::test(start_paused = true)]
async fn files_of_nemo_gyms_collector_open_and_are_gone_on_with() {
    let files = SimFiles::new(2);
    let rollouts = concat!(
        r#"{"reward":1.0,"response":{"id":"r","output":[]},"_ng_task_index":0,"_ng_rollout_index":0,"agent_ref":{"name":"a"}}"#,
        "\n",
        r#"{"reward":0.0,"_ng_task_index":0,"_ng_rollout_index":1,"_ng_attempt_index":1,"x":"\u00e9\n","n":12345678901234567890123}"#,
        "\n\n",
        r#"{"reward":1.0,"_ng_task_index":1,"_ng_rollout_in"#,
    );
    let failures = concat!(
        r#"{"_ng_failure_class":"agent_run_error","_ng_failure_type":"E","_ng_task_index":0,"_ng_rollout_index":1}"#,
        "\n",
        r#"{"_ng_failure_class":"agent_request_failed","_ng_task_index":1,"_ng_rollout_index":0,"_ng_failure_terminal":false}"#,
        "\n",
        r#"{"_ng_failure_class":"agent_request_failed","_ng_task_index":1,"_ng_rollout_index":0,"_ng_attempt_index":1}"#,
        "\n",
        r#"{"_ng_failure_class":"skipped","_ng_task_index":1,"_ng_rollout_index":1,"_ng_failure_terminal":1}"#,
        "\n",
        r#"{"_ng_failure_class":"names no rollout"}"#,
        "\n",
        r#"{"_ng_failure_class":"agent_run_error","_ng_task_index":2,"_ng_rollout_index":0}"#,
    );
    files.set_contents(&output(), rollouts);
    files.set_contents(&failures_path(&output()), failures);
    let (ledger, found) = open(&files).await.unwrap();
    assert_eq!((found.completed, found.failed, found.rebuilt_index), (2, 5, true));
    assert_eq!(found.dropped_tail_bytes, rollouts.lines().last().unwrap().len() as u64);
    let state = |task, rollout| ledger.state(TaskKey::new(task, rollout));
    assert_eq!(state(0, 0), KeyState::Completed);
    assert_eq!(state(0, 1), KeyState::Completed);
    assert_eq!(state(1, 0), KeyState::Open { failures: 2, lost: 0 });
    assert_eq!(state(1, 1), KeyState::Terminal);
    assert_eq!(state(2, 0), KeyState::Open { failures: 1, lost: 0 });
    assert_eq!(ledger.begin(TaskKey::new(1, 0)).unwrap().number, 2, "the number of earlier failures");
    complete(&ledger, 2).await.unwrap();
    close(ledger).await;
    let contents = files.contents(&output());
    assert!(contents.starts_with(&rollouts.as_bytes()[..rollouts.rfind('\n').unwrap() + 1]), "kept bit for bit");
    assert!(lines(&contents).last().unwrap().contains(r#""_ng_attempt_index": 1"#));
    assert!(files.contents(&failures_path(&output())).ends_with(b"}\n"), "the whole last line got its newline");
    let found = opened(&files).await;
    assert_eq!(found, RecoveryReport { completed: 3, failed: 5, ..RecoveryReport::default() });
}

/// Found by the simulation: after a failed append while opening, all later appends to the file failed.
#[tokio::test(start_paused = true)]
async fn after_an_opening_that_met_a_bad_disk_the_next_one_goes_on() {
    for fault in [FileFault::DiskFull, FileFault::SyncFailed] {
        for ending in ["", "\n"] {
            let files = written(3).await;
            let contents = files.contents(&output());
            let mut whole = contents[..contents.len() - 1].to_vec();
            whole.extend_from_slice(ending.as_bytes());
            files.set_contents(&output(), whole);
            // Without it, all lines are written again.
            files.remove(&index_path(&output())).await.unwrap();
            files.fail_write(0, fault);
            open(&files).await.unwrap_err();
            let (ledger, opened) = open(&files).await.unwrap();
            assert_eq!(opened.completed, 3, "{fault:?}, {ending:?}");
            complete(&ledger, 100).await.unwrap();
            close(ledger).await;
            assert_eq!(lines(&files.contents(&output())).len(), 4, "{fault:?}, {ending:?}");
        }
    }
}
