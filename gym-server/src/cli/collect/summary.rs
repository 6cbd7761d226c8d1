//! Formats the result of a collection for the user.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use gym_client::Transports;
use gym_client::collect::{CollectSummary, RunEnd};
use gym_core::transport::Transport;

use crate::cli::collect::causes;
use crate::cli::console::table;

/// Returns the tables and the list of files.
pub(super) fn text(collected: &CollectSummary, took: Duration) -> String {
    let snapshot = &collected.snapshot;
    let mut text = String::new();
    // Writing to a string cannot fail.
    if !snapshot.scores.is_empty() {
        let rows = snapshot.scores.iter().map(|(agent, score)| {
            let mean =
                if score.count == 0 { "-".to_owned() } else { format!("{:.4}", score.reward_sum / score.count as f64) };
            [agent.to_string(), (score.count + score.unscored).to_string(), mean, score.unscored.to_string()]
        });
        let _ = writeln!(text, "{}\n", table(["agent", "rollouts", "mean reward", "without reward"], rows));
    }
    if !snapshot.failures.is_empty() {
        let rows = snapshot.failures.iter().map(|(class, count)| [class.as_str().to_owned(), count.to_string()]);
        let _ = writeln!(text, "{}\n", table(["failure", "attempts"], rows));
    }
    if let Some(causes) = causes::report(snapshot) {
        let _ = writeln!(text, "{causes}\n");
    }
    let _ = write!(text, "{} of {} rollouts are recorded", recorded(collected), snapshot.total);
    if snapshot.already_completed > 0 {
        let _ = write!(text, " ({} of them by earlier runs)", snapshot.already_completed);
    }
    let failed = snapshot.given_up + snapshot.already_given_up;
    if failed > 0 {
        let _ = write!(text, ", {failed} failed");
    }
    let open = snapshot.total.saturating_sub(snapshot.done());
    if open > 0 {
        let _ = write!(text, ", {open} incomplete");
    }
    let seconds = took.as_secs_f64();
    let rate = if seconds > 0.0 { snapshot.completed as f64 / seconds } else { 0.0 };
    let _ = writeln!(text, "; {seconds:.1} s, {rate:.1} rollouts/s");
    if snapshot.tool_failures > 0 {
        let _ = writeln!(
            text,
            "{} tool calls failed, and their errors went to the model; `tool_errors: fail` in the agent's block fails such attempts",
            snapshot.tool_failures
        );
    }
    let files = &collected.files;
    let written = [
        ("rollouts", &files.rollouts, true),
        ("failures", &files.failures, failed > 0 || !snapshot.failures.is_empty()),
        ("inputs", &files.materialized, true),
        ("statistics", &files.aggregate, collected.ended == RunEnd::Exhausted && files.aggregate.exists()),
    ];
    for (what, path, show) in written {
        if show {
            let _ = writeln!(text, "{what:<10}  {}", path.display());
        }
    }
    text.truncate(text.trim_end().len());
    text
}

/// Returns advice on the next step if rollouts are missing.
pub(super) fn advice(collected: &CollectSummary) -> Option<String> {
    let snapshot = &collected.snapshot;
    if collected.is_complete() {
        return None;
    }
    let open = snapshot.total.saturating_sub(snapshot.done());
    Some(match collected.ended {
        RunEnd::Stopped => {
            format!("stopped with {open} rollouts incomplete; repeat the command with --resume to continue")
        }
        RunEnd::FailedFast => format!(
            "stopped because {} rollouts failed{}; {open} rollouts are incomplete, and each failed attempt is in {}\n  fix: remove the \
             cause and repeat the command with --resume, or continue despite the failures with --resume --fail-fast 0",
            snapshot.given_up,
            if snapshot.completed == 0 && snapshot.causes.len() == 1 { ", all with the same cause" } else { "" },
            collected.files.failures.display()
        ),
        RunEnd::Exhausted => format!(
            "{} rollouts failed; see {}, and repeat the command with --resume to retry those with attempts left",
            snapshot.total.saturating_sub(recorded(collected)),
            collected.files.failures.display()
        ),
    })
}

fn recorded(collected: &CollectSummary) -> u64 {
    collected.snapshot.completed + collected.snapshot.already_completed
}

/// Counts the reached servers by transport: `transports: mem 3, http 1 (servers reached)`; `None` if none was reached.
pub(super) fn transports(transports: &Transports) -> Option<String> {
    let mut counts: BTreeMap<(Transport, &str), usize> = BTreeMap::new();
    for peer in transports.paths() {
        if let Some(transport) = peer.transport {
            *counts.entry((transport, transport.as_str())).or_default() += 1;
        }
    }
    let words: Vec<String> = counts.into_iter().map(|((_, name), count)| format!("{name} {count}")).collect();
    (!words.is_empty()).then(|| format!("transports: {} (servers reached)", words.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use gym_client::collect::{AgentScore, OutputFiles, ProgressSnapshot};
    use gym_core::rollout::FailureClass;

    use super::*;

    fn collected(ended: RunEnd, completed: u64, given_up: u64) -> CollectSummary {
        let score = AgentScore { count: completed, reward_sum: completed as f64 / 2.0, unscored: 0 };
        let snapshot = ProgressSnapshot {
            total: 10,
            completed,
            given_up,
            scores: BTreeMap::from([(Arc::from("math"), score)]),
            failures: BTreeMap::from([(FailureClass::AgentRunError, given_up)]),
            ..ProgressSnapshot::default()
        };
        let files = OutputFiles::beside("out/r.jsonl");
        CollectSummary { files, ended, snapshot, warnings: Vec::new(), aggregate_error: None }
    }

    #[test]
    fn it_names_agents_failures_counts_and_files() {
        let text = text(&collected(RunEnd::Exhausted, 8, 2), Duration::from_secs(4));
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(words.contains(&vec!["math", "8", "0.5000", "0"]), "{text}");
        assert!(words.contains(&vec!["agent_run_error", "2"]), "{text}");
        assert!(text.contains("8 of 10 rollouts are recorded, 2 failed; 4.0 s, 2.0 rollouts/s"), "{text}");
        assert!(text.contains("out/r_failures.jsonl") && text.contains("out/r.jsonl"), "{text}");
    }

    #[test]
    fn a_run_that_stopped_early_says_why_and_how_to_go_on() {
        let mut collected = collected(RunEnd::FailedFast, 0, 5);
        collected.snapshot.scores.clear();
        let said = advice(&collected).unwrap();
        for words in ["5 rollouts failed", "5 rollouts are incomplete", "--resume --fail-fast 0", "r_failures.jsonl"] {
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn failed_tools_that_the_model_saw_are_counted_with_the_key_that_fails_them() {
        let mut collected = collected(RunEnd::Exhausted, 10, 0);
        assert!(!text(&collected, Duration::from_secs(1)).contains("tool"));
        collected.snapshot.tool_failures = 3;
        let text = text(&collected, Duration::from_secs(1));
        assert!(text.contains("3 tool calls failed") && text.contains("`tool_errors: fail`"), "{text}");
    }

    #[test]
    fn missing_rollouts_are_reported_with_the_next_step() {
        assert_eq!(advice(&collected(RunEnd::Exhausted, 10, 0)), None);
        let stopped = advice(&collected(RunEnd::Stopped, 4, 1)).unwrap();
        assert!(stopped.contains("5 rollouts incomplete") && stopped.contains("--resume"), "{stopped}");
        let failed = advice(&collected(RunEnd::Exhausted, 8, 2)).unwrap();
        assert!(failed.contains("2 rollouts failed") && failed.contains("r_failures.jsonl"), "{failed}");
    }
}
