//! Formats the result of a collection for the user.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use gym_client::Transports;
use gym_client::collect::{CollectSummary, RunEnd, UnrecordedRollouts};
use gym_core::rollout::FailureClass;
use gym_core::transport::Transport;

use crate::cli::collect::figures::rate;
use crate::cli::collect::{causes, figures};
use crate::cli::console::table;

/// Returns the tables and the list of files.
pub(super) fn text(collected: &CollectSummary, took: Duration) -> String {
    let snapshot = &collected.snapshot;
    let mut text = String::new();
    // Writing to a string cannot fail.
    if !collected.agents.is_empty() {
        let _ = writeln!(text, "{}\n", figures::agents(&collected.agents));
    }
    let missing = figures::missing(&collected.agents, &collected.incomplete_tasks);
    if !missing.is_empty() {
        let _ = writeln!(text, "{}\n", missing.join("\n"));
    }
    if !snapshot.failures.is_empty() {
        // Those of earlier runs are in the failures file, and not counted again.
        let resumed = snapshot.already_completed + snapshot.already_given_up > 0;
        let attempts = if resumed { "attempts of this run" } else { "attempts" };
        let rows = snapshot.failures.iter().map(|(class, count)| [class.as_str().to_owned(), count.to_string()]);
        let _ = writeln!(text, "{}\n", table(["failure", attempts], rows));
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
    let _ = writeln!(text, "; {:.1} s, {:.1} rollouts/s", took.as_secs_f64(), rate(snapshot.completed, took));
    if snapshot.tool_failures > 0 {
        let _ = writeln!(
            text,
            "{} tool calls failed, and their errors went to the model; `tool_errors: fail` in the agent's block fails such attempts",
            snapshot.tool_failures
        );
    }
    if snapshot.rewardless > 0 {
        let _ = writeln!(
            text,
            "{} rollouts were recorded without a reward: the agent's response to `/run` has no `reward`; return the response of `/verify`, \
             as `Episode::verify` does, or add `reward` to the row",
            snapshot.rewardless
        );
    }
    let unverified: u64 = collected.agents.values().filter_map(|agent| agent.completion_unverified).sum();
    if unverified > 0 {
        let _ = writeln!(
            text,
            "{unverified} rollouts have a response that the engine may have aborted (`_gym_episode.completion_unverified`); ask vLLM over \
             `vllm_model` without `is_responses_native`, or refuse such rollouts with --truncated fail"
        );
    }
    let files = &collected.files;
    let written = [
        ("rollouts", Some(files.rollouts.as_path())),
        ("failures", Some(files.failures.as_path()).filter(|_| failed > 0 || !snapshot.failures.is_empty())),
        ("inputs", Some(files.materialized.as_path())),
        ("statistics", statistics_file(collected)),
    ];
    for (what, path) in written.into_iter().filter_map(|(what, path)| Some((what, path?))) {
        let _ = writeln!(text, "{what:<10}  {}", path.display());
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
    let failed = snapshot.given_up + snapshot.already_given_up;
    let failures = collected.files.failures.display();
    let mut advice = match collected.ended {
        RunEnd::Stopped => {
            format!("stopped with {open} rollouts incomplete; repeat the command with --resume to continue")
        }
        RunEnd::FailedFast => format!(
            "stopped because {} rollouts failed{}; {open} rollouts are incomplete, and each failed attempt is in {failures}\n  fix: remove \
             the cause and repeat the command with --resume, or continue despite the failures with --resume --fail-fast 0",
            snapshot.given_up,
            if snapshot.completed == 0 && snapshot.causes.len() == 1 { ", all with the same cause" } else { "" },
        ),
        RunEnd::Exhausted => format!("{failed} rollouts failed; each failed attempt is in {failures}"),
    };
    let misfits = snapshot.failures.get(&FailureClass::RowInvalid).copied().unwrap_or_default();
    let UnrecordedRollouts { attempts_left, attempts_spent, attempts_used, workers_lost, terminal } =
        snapshot.unrecorded;
    let CollectSummary { attempts_max, lost_max, .. } = collected;
    let attempts_used = attempts_used.max(*attempts_max);
    let parts = [
        // Unless all of them have rows that do not fit, of which the last line says what helps.
        (
            if attempts_left > misfits { attempts_left } else { 0 },
            "have attempts left: repeat the command with --resume to try them again".to_owned(),
        ),
        (
            attempts_spent,
            format!(
                "have used all their attempts ({attempts_used}): --resume --attempts {} tries them again",
                attempts_used.saturating_mul(2)
            ),
        ),
        (
            workers_lost,
            format!(
                "lost their worker or reached no server {lost_max} times: --resume --lost-attempts {} tries them again",
                lost_max.saturating_mul(2)
            ),
        ),
        (terminal, "are not tried again: their environment asked for no further attempt".to_owned()),
    ];
    for (count, what) in parts.iter().filter(|(count, _)| *count > 0) {
        // Writing to a string cannot fail.
        let _ = write!(advice, "\n  {count} of the failed {what}");
    }
    if misfits > 0 {
        let _ = write!(
            advice,
            "\n  {misfits} attempts had a row that does not fit its environment: correct the lines that `_ng_failure_input` names in {failures}, and \
             collect again with --overwrite or another --output; or correct the environment, and repeat the command with --resume"
        );
    }
    Some(advice)
}

/// Returns the file of the statistics, if they are about the recorded rollouts.
pub(super) fn statistics_file(collected: &CollectSummary) -> Option<&Path> {
    let file = collected.files.aggregate.as_path();
    (collected.ended == RunEnd::Exhausted && file.exists()).then_some(file)
}

/// Returns the number of rollouts in the rollouts file.
pub(super) fn recorded(collected: &CollectSummary) -> u64 {
    collected.snapshot.completed + collected.snapshot.already_completed
}

/// Counts the reached servers by transport, the preferred transport first.
pub(super) fn transports(transports: &Transports) -> Vec<(&'static str, usize)> {
    let mut counts: BTreeMap<(Transport, &'static str), usize> = BTreeMap::new();
    for peer in transports.paths() {
        if let Some(transport) = peer.transport {
            *counts.entry((transport, transport.as_str())).or_default() += 1;
        }
    }
    counts.into_iter().map(|((_, name), count)| (name, count)).collect()
}

/// Formats the reached servers: `transports: mem 3, http 1 (servers reached)`; `None` if none was reached.
pub(super) fn transports_line(counts: &[(&'static str, usize)]) -> Option<String> {
    let words: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    (!words.is_empty()).then(|| format!("transports: {} (servers reached)", words.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use gym_client::collect::{
        AgentSummary, BestOfK, OutputFiles, PassRate, ProgressSnapshot, RewardBin, TaskCoverage,
    };

    use super::*;

    fn collected(ended: RunEnd, completed: u64, given_up: u64) -> CollectSummary {
        let mut agent = AgentSummary::default();
        (agent.rollouts, agent.scored) = (completed, completed);
        (agent.mean_reward, agent.min_reward, agent.max_reward) = (Some(0.5), Some(0.0), Some(1.0));
        let bin = |value, count| RewardBin { from: value, to: value, count };
        agent.reward_histogram = vec![bin(0.0, completed / 2), bin(1.0, completed - completed / 2)];
        agent.pass_at_k = [(1, 0.5), (2, 0.75)].map(|(k, rate)| PassRate { k, rate, tasks: 5 }).to_vec();
        let mut snapshot = ProgressSnapshot::default();
        snapshot.total = 10;
        snapshot.completed = completed;
        snapshot.given_up = given_up;
        snapshot.failures = BTreeMap::from([(FailureClass::AgentRunError, given_up)]);
        let files = OutputFiles::beside("out/r.jsonl");
        let agents = BTreeMap::from([(Arc::from("math"), agent)]);
        let mut summary = CollectSummary::new(files, ended, snapshot);
        summary.agents = agents;
        summary.attempts_max = 3;
        summary.lost_max = 10;
        summary
    }

    #[test]
    fn it_names_agents_failures_counts_and_files() {
        let text = text(&collected(RunEnd::Exhausted, 8, 2), Duration::from_secs(4));
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(words.contains(&vec!["AGENT", "ROLLOUTS", "MEAN", "REWARD", "PASS@2", "REWARDS"]), "{text}");
        assert!(words.contains(&vec!["math", "8", "0.5000", "0.7500", "0", "██", "1"]), "{text}");
        assert!(words.contains(&vec!["agent_run_error", "2"]), "{text}");
        assert!(text.contains("8 of 10 rollouts are recorded, 2 failed; 4.0 s, 2.0 rollouts/s"), "{text}");
        assert!(text.contains("out/r_failures.jsonl") && text.contains("out/r.jsonl"), "{text}");
    }

    #[test]
    fn figures_that_some_agents_lack_are_dashes_and_those_that_all_lack_are_left_out() {
        let mut collected = collected(RunEnd::Exhausted, 8, 0);
        let mut other = AgentSummary::default();
        (other.rollouts, other.unscored, other.mean_turns) = (2, 2, Some(1.5));
        other.pass_at_k = Vec::new();
        collected.agents.insert(Arc::from("poet"), other);
        let text = text(&collected, Duration::from_secs(4));
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let header = ["AGENT", "ROLLOUTS", "WITHOUT", "REWARD", "MEAN", "REWARD", "PASS@2", "TURNS", "REWARDS"];
        assert_eq!(words[0], header, "{text}");
        assert_eq!(words[1], ["math", "8", "0", "0.5000", "0.7500", "-", "0", "██", "1"], "{text}");
        assert_eq!(words[2], ["poet", "2", "2", "-", "-", "1.5", "-"], "{text}");
    }

    #[test]
    fn missing_rollouts_are_beside_the_figures_that_do_not_contain_them() {
        let mut collected = collected(RunEnd::Exhausted, 8, 12);
        let task = |task_index, recorded| TaskCoverage { task_index, expected: 4, recorded, missing: 4 - recorded };
        let agent = collected.agents.get_mut("math").unwrap();
        (agent.expected, agent.missing, agent.tasks) = (20, 12, 5);
        (agent.tasks_incomplete, agent.tasks_without_rollout) = (4, 2);
        collected.incomplete_tasks =
            BTreeMap::from([(Arc::from("math"), vec![task(1, 0), task(3, 0), task(0, 1), task(2, 3)])]);
        let said = text(&collected, Duration::from_secs(1));
        let words: Vec<&str> = said.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words[..4], ["math", "8", "of", "20"], "{said}");
        assert!(said.contains("math: 12 of 20 rollouts are missing, in 4 of 5 tasks"), "{said}");
        assert!(said.contains("tasks without a recorded rollout: 1, 3\n"), "{said}");
    }

    #[test]
    fn partial_rewards_have_a_best_of_k_and_no_pass_rate() {
        let mut collected = collected(RunEnd::Exhausted, 10, 0);
        let agent = collected.agents.get_mut("math").unwrap();
        (agent.pass_at_k, agent.best_of_k) = (Vec::new(), Some(BestOfK { k: 10, mean_reward: 0.625, tasks: 1 }));
        let said = text(&collected, Duration::from_secs(1));
        assert!(said.contains("BEST OF 10") && said.contains("0.6250") && !said.contains("PASS"), "{said}");
    }

    #[test]
    fn a_run_that_stopped_early_says_why_and_how_to_go_on() {
        let collected = collected(RunEnd::FailedFast, 0, 5);
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
    fn rollouts_of_an_agent_that_returns_no_reward_are_counted_with_what_it_should_return() {
        let mut collected = collected(RunEnd::Exhausted, 10, 0);
        assert!(!text(&collected, Duration::from_secs(1)).contains("without a reward"));
        collected.snapshot.rewardless = 10;
        let text = text(&collected, Duration::from_secs(1));
        assert!(
            text.contains("10 rollouts were recorded without a reward") && text.contains("`Episode::verify`"),
            "{text}"
        );
    }

    #[test]
    fn the_next_step_is_one_that_can_run_what_failed() {
        let mut collected = collected(RunEnd::Exhausted, 0, 10);
        collected.snapshot.unrecorded =
            UnrecordedRollouts { attempts_left: 4, attempts_spent: 3, attempts_used: 3, workers_lost: 2, terminal: 1 };
        let said = advice(&collected).unwrap();
        for words in [
            "10 rollouts failed",
            "4 of the failed have attempts left: repeat the command with --resume",
            "3 of the failed have used all their attempts (3): --resume --attempts 6",
            "2 of the failed lost their worker or reached no server 10 times: --resume --lost-attempts 20",
            "1 of the failed are not tried again",
        ] {
            assert!(said.contains(words), "{said}");
        }
        collected.snapshot.unrecorded = UnrecordedRollouts { attempts_spent: 10, ..UnrecordedRollouts::default() };
        let said = advice(&collected).unwrap();
        assert!(!said.contains("attempts left") && said.contains("--attempts 6"), "{said}");
        // An earlier run allowed more attempts.
        collected.snapshot.unrecorded.attempts_used = 5;
        let said = advice(&collected).unwrap();
        assert!(said.contains("have used all their attempts (5): --resume --attempts 10"), "{said}");
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
