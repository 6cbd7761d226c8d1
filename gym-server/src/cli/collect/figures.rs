//! Formats the figures of the agents as a table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use gym_client::collect::{AgentSummary, RewardBin, TaskCoverage, TokenSummary};

use crate::cli::console::wide_table;

/// The heights of a bin with rollouts; a bin without any is a dot.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const EMPTY_BIN: char = '·';
/// Tasks that a sentence names.
const TASKS_NAMED_MAX: usize = 10;

/// A column: its name, and the text of an agent's cell. `None` if the figure is not known.
type Column<'a> = (String, Box<dyn Fn(&AgentSummary) -> Option<String> + 'a>);

/// Returns the table of the agents. A column that no agent has a figure for is left out.
pub(super) fn agents(agents: &BTreeMap<Arc<str>, AgentSummary>) -> String {
    let unscored = agents.values().any(|agent| agent.unscored > 0);
    let seconds = |seconds: f64| duration(Duration::try_from_secs_f64(seconds).unwrap_or_default());
    let columns: Vec<Column<'_>> = vec![
        (
            "rollouts".to_owned(),
            Box::new(|agent| {
                let AgentSummary { rollouts, expected, missing, .. } = agent;
                Some(if *missing == 0 { rollouts.to_string() } else { format!("{rollouts} of {expected}") })
            }),
        ),
        ("without reward".to_owned(), Box::new(|agent| unscored.then(|| agent.unscored.to_string()))),
        ("mean reward".to_owned(), Box::new(|agent| Some(format!("{:.4}", agent.mean_reward?)))),
        of_k(agents, "pass@", |agent| agent.pass_at_k.last().map(|pass| (pass.k, pass.rate))),
        of_k(agents, "best of ", |agent| agent.best_of_k.map(|best| (best.k, best.mean_reward))),
        ("turns".to_owned(), Box::new(|agent| Some(format!("{:.1}", agent.mean_turns?)))),
        ("truncated".to_owned(), Box::new(|agent| Some(format!("{:.1}%", 100.0 * agent.truncated_share?)))),
        ("tool errors".to_owned(), Box::new(|agent| Some(agent.tool_errors?.to_string()))),
        ("prefix breaks".to_owned(), Box::new(|agent| Some(agent.prefix_breaks?.to_string()))),
        (
            "tokens in/out".to_owned(),
            Box::new(|agent| {
                let TokenSummary { episodes, input, output, .. } = agent.tokens?;
                // The mean of a rollout, which is comparable between agents and runs.
                let mean = |tokens: u64| tokens as f64 / episodes as f64;
                Some(format!("{:.0}/{:.0}", mean(input), mean(output)))
            }),
        ),
        ("latency p50".to_owned(), Box::new(|agent| Some(seconds(agent.latency?.p50_seconds)))),
        ("latency p99".to_owned(), Box::new(|agent| Some(seconds(agent.latency?.p99_seconds)))),
        ("rewards".to_owned(), Box::new(rewards)),
    ];
    let columns: Vec<Column<'_>> =
        columns.into_iter().filter(|(_, cell)| agents.values().any(|agent| cell(agent).is_some())).collect();
    let header: Vec<&str> = ["agent"].into_iter().chain(columns.iter().map(|(name, _)| name.as_str())).collect();
    let rows = agents.iter().map(|(name, agent)| {
        let cells = columns.iter().map(|(_, cell)| cell(agent).unwrap_or_else(|| "-".to_owned()));
        std::iter::once(name.to_string()).chain(cells).collect()
    });
    wide_table(&header, rows)
}

/// Returns the column of a figure over k rollouts of a task. One k for all agents is in the header.
fn of_k<'a>(
    agents: &BTreeMap<Arc<str>, AgentSummary>,
    name: &str,
    figure: impl Fn(&AgentSummary) -> Option<(u32, f64)> + 'a,
) -> Column<'a> {
    let all: BTreeSet<u32> = agents.values().filter_map(|agent| Some(figure(agent)?.0)).collect();
    let common = all.first().filter(|_| all.len() == 1);
    let header = common.map_or_else(|| format!("{name}k"), |k| format!("{name}{k}"));
    let says_k = common.is_none();
    let cell = move |agent: &AgentSummary| {
        let (k, figure) = figure(agent)?;
        Some(if says_k { format!("{figure:.4} (k={k})") } else { format!("{figure:.4}") })
    };
    (header, Box::new(cell))
}

/// Returns a sentence on each agent of which rollouts are missing: its figures say nothing about them.
pub(in crate::cli) fn missing(
    agents: &BTreeMap<Arc<str>, AgentSummary>,
    incomplete_tasks: &BTreeMap<Arc<str>, Vec<TaskCoverage>>,
) -> Vec<String> {
    let incomplete = agents.iter().filter(|(_, agent)| agent.missing > 0);
    let sentence = |(name, agent): (&Arc<str>, &AgentSummary)| {
        let AgentSummary { missing, expected, tasks_incomplete, tasks, tasks_without_rollout: without, .. } = agent;
        let mut text = format!(
            "{name}: {missing} of {expected} rollouts are missing, in {tasks_incomplete} of {tasks} tasks; the figures are those of the \
             recorded ones"
        );
        let listed = incomplete_tasks.get(name).into_iter().flatten().filter(|task| task.recorded == 0);
        let listed: Vec<String> = listed.take(TASKS_NAMED_MAX).map(|task| task.task_index.to_string()).collect();
        if !listed.is_empty() {
            let more = without.saturating_sub(listed.len() as u64);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let noun = if *without == 1 { "task" } else { "tasks" };
            // Writing to a string cannot fail.
            let _ = write!(text, "; {noun} without a recorded rollout: {}{more}", listed.join(", "));
        }
        text
    };
    incomplete.map(sentence).collect()
}

/// Formats a histogram between the smallest and the largest reward: `0 ▂█ 1`.
fn rewards(agent: &AgentSummary) -> Option<String> {
    let (min, max) = (agent.min_reward?, agent.max_reward?);
    let bars = bars(&agent.reward_histogram);
    Some(if min < max { format!("{} {bars} {}", short(min), short(max)) } else { format!("{} {bars}", short(min)) })
}

fn bars(bins: &[RewardBin]) -> String {
    let most = bins.iter().map(|bin| bin.count).max().unwrap_or(0).max(1);
    let bar = |bin: &RewardBin| match bin.count {
        0 => EMPTY_BIN,
        // At least the lowest bar, so that a rare reward is visible.
        count => BARS[(count as f64 / most as f64 * 8.0).ceil() as usize - 1],
    };
    bins.iter().map(bar).collect()
}

/// Formats a reward with at most four decimals, and a very large or small one with an exponent.
fn short(reward: f64) -> String {
    if reward != 0.0 && !(1e-3..1e6).contains(&reward.abs()) {
        return format!("{reward:.2e}");
    }
    let text = format!("{reward:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Returns rollouts per second; 0 if no time has passed.
pub(super) fn rate(rollouts: u64, took: Duration) -> f64 {
    let seconds = took.as_secs_f64();
    if seconds > 0.0 { rollouts as f64 / seconds } else { 0.0 }
}

/// Formats a duration in the unit that a person would use, with two or three digits.
pub(in crate::cli) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        ..0.009_95 => format!("{:.1} ms", seconds * 1e3),
        ..0.999_5 => format!("{:.0} ms", seconds * 1e3),
        ..99.95 => format!("{seconds:.1} s"),
        ..3_600.0 => format!("{seconds:.0} s"),
        _ => format!("{:.1} h", seconds / 3_600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_shows_its_bounds_and_no_bin_with_rollouts_as_empty() {
        let bin = |count| RewardBin { from: 0.0, to: 1.0, count };
        assert_eq!(bars(&[bin(1), bin(0), bin(500), bin(1_000)]), "▁·▄█");
        assert_eq!(bars(&[]), "");
        for (reward, expected) in
            [(0.0, "0"), (1.0, "1"), (-0.25, "-0.25"), (12_000.0, "12000"), (1e9, "1.00e9"), (1e-9, "1.00e-9")]
        {
            assert_eq!(short(reward), expected);
        }
    }

    #[test]
    fn a_duration_has_the_unit_that_suits_it() {
        for (micros, expected) in [
            (0, "0.0 ms"),
            (1_234, "1.2 ms"),
            (9_960, "10 ms"),
            (999_400, "999 ms"),
            (999_600, "1.0 s"),
            (99_940_000, "99.9 s"),
            (600_000_000, "600 s"),
            (7_200_000_000, "2.0 h"),
        ] {
            assert_eq!(duration(Duration::from_micros(micros)), expected);
        }
    }
}
