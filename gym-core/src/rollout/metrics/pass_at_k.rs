//! Metrics of benchmarks with repeated rollouts: pass@k, the mean of the first k, majority votes, the spread across
//! runs.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::series::exact_sum;

/// The scores of one rollout, and its answer if the benchmark extracts one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Score by name; a boolean score is 0 or 1.
    pub scores: Vec<(String, f64)>,
    /// The extracted answer; `None` if there is none.
    pub answer: Option<String>,
}

impl Sample {
    /// Creates a sample with a single score, `accuracy`.
    #[must_use]
    pub fn accuracy(score: f64) -> Self {
        Self { scores: vec![("accuracy".to_owned(), score)], answer: None }
    }

    /// Returns the score called `name`.
    #[must_use]
    pub fn score(&self, name: &str) -> Option<f64> {
        self.scores.iter().find(|(other, _)| other == name).map(|(_, score)| *score)
    }
}

/// The metrics of [`pass_at_k`], and the input of its companion functions.
#[derive(Clone, Debug, Default)]
pub struct PassAtK {
    /// `pass@{k}/{score}` and the other metrics in percent, and `per_sample_aggregate`.
    pub metrics: Map<String, Value>,
    /// The score names, sorted; with answers, `no_answer` is one of them.
    pub score_names: Vec<String>,
    /// The largest number of rollouts of one task.
    pub k_max: usize,
    /// The samples, with `no_answer` among their scores.
    samples: Vec<Vec<Sample>>,
}

impl PassAtK {
    /// Adds `…/avg_sample_std_dev`: the mean over tasks of the spread among a task's first k rollouts.
    #[must_use]
    pub fn with_sample_deviation(mut self) -> Self {
        for k in 2..=self.k_max {
            for name in &self.score_names {
                let deviations: Vec<f64> =
                    self.samples.iter().filter_map(|task| deviation(&scores(first(task, k), name))).collect();
                if let Some(mean) = mean(&deviations) {
                    self.metrics.insert(format!("pass@1[avg-of-{k}]/{name}/avg_sample_std_dev"), mean.into());
                }
            }
        }
        self
    }
}

/// Computes pass@k, `pass@1[avg-of-k]`, majority@k, no_answer and the spread across runs.
///
/// `tasks` holds the rollouts of each task in the order of their index. If all scores are 0 or 1, pass@k is the
/// unbiased estimate 1 − C(wrong, k) / C(all, k); otherwise it is the largest of the first k. With `answers`, equal
/// answers form a vote (majority@k; ties are averaged), and a missing answer counts in the score `no_answer`. A failed rollout is not
/// among the samples, and a task without samples counts nowhere. All metrics are in percent.
#[must_use]
pub fn pass_at_k(tasks: &[Vec<Sample>], answers: bool) -> PassAtK {
    let Some(k_max) = tasks.iter().map(Vec::len).max() else { return PassAtK::default() };
    let samples = with_no_answer(tasks, answers);
    let tasks = samples.as_slice();
    let score_names = score_names(tasks);
    let mut metrics = Map::new();
    for k in 1..=k_max {
        for name in &score_names {
            let passed: Vec<f64> = tasks.iter().filter_map(|task| passed_at(task, name, k)).collect();
            insert_percent(&mut metrics, format!("pass@{k}/{name}"), &passed);
            let means: Vec<f64> = tasks.iter().filter_map(|task| mean(&scores(first(task, k), name))).collect();
            insert_percent(&mut metrics, format!("pass@1[avg-of-{k}]/{name}"), &means);
            if answers {
                let votes: Vec<f64> =
                    tasks.iter().filter(|task| !task.is_empty()).map(|task| majority(first(task, k), name)).collect();
                insert_percent(&mut metrics, format!("majority@{k}/{name}"), &votes);
            }
        }
    }

    let mut runs: Vec<(&String, Vec<f64>)> = Vec::new();
    for name in &score_names {
        let by_run: Vec<f64> = (0..k_max)
            .filter_map(|run| {
                let scores: Vec<f64> =
                    tasks.iter().filter_map(|task| task.get(run)).filter_map(|sample| sample.score(name)).collect();
                mean(&scores).map(|mean| 100.0 * mean)
            })
            .collect();
        if !by_run.is_empty() {
            runs.push((name, by_run));
        }
    }
    let aggregate: Map<String, Value> =
        runs.iter().map(|(name, by_run)| ((*name).clone(), Value::from(by_run.clone()))).collect();
    metrics.insert("per_sample_aggregate".into(), aggregate.into());
    for k in 2..=k_max {
        for (name, by_run) in &runs {
            let first = &by_run[..k.min(by_run.len())];
            if let Some(deviation) = deviation(first) {
                let error = deviation / (first.len() as f64).sqrt();
                metrics.insert(format!("pass@1[avg-of-{k}]/{name}/std_dev_across_runs"), deviation.into());
                metrics.insert(format!("pass@1[avg-of-{k}]/{name}/std_err_across_runs"), error.into());
            }
        }
    }
    PassAtK { metrics, score_names, k_max, samples }
}

/// [`pass_at_k`] for each subset of the tasks, keys prefixed `{subset}/`, in the order in which subsets first appear.
///
/// `subset_of` returns the subset of the task at an index; `None` excludes the task.
#[must_use]
pub fn subset_metrics(
    tasks: &[Vec<Sample>],
    answers: bool,
    subset_of: impl Fn(usize) -> Option<String>,
) -> Map<String, Value> {
    let mut subsets: Vec<(String, Vec<Vec<Sample>>)> = Vec::new();
    for (index, task) in tasks.iter().enumerate() {
        let Some(name) = subset_of(index) else { continue };
        match subsets.iter_mut().find(|(other, _)| *other == name) {
            Some((_, members)) => members.push(task.clone()),
            None => subsets.push((name, vec![task.clone()])),
        }
    }
    let mut metrics = Map::new();
    for (subset, tasks) in subsets {
        for (key, value) in pass_at_k(&tasks, answers).metrics {
            if key != "per_sample_aggregate" {
                metrics.insert(format!("{subset}/{key}"), value);
            }
        }
    }
    metrics
}

/// Returns the entries `{family}@{k}/{score}` of the highest k, without statistics about them.
///
/// `pattern` is a family with `{k}` in place of the number: `pass@{k}`, `pass@1[avg-of-{k}]`, `majority@{k}`. `only`
/// restricts the scores, and `except` excludes scores.
#[must_use]
pub fn highest_k_metrics(
    metrics: &Map<String, Value>,
    pattern: &str,
    only: Option<&[&str]>,
    except: &[&str],
) -> Map<String, Value> {
    const COMPANIONS: [&str; 3] = ["std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev"];
    let Some((before, after)) = pattern.split_once("{k}") else { return Map::new() };
    let parse = |key: &str| -> Option<u64> {
        let rest = key.strip_prefix(before)?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (k, rest) = rest.split_at(digits);
        let score = rest.strip_prefix(after)?.strip_prefix('/').filter(|score| !score.is_empty())?;
        let wanted = !COMPANIONS.iter().any(|companion| score.ends_with(companion))
            && only.is_none_or(|only| only.contains(&score))
            && !except.contains(&score);
        wanted.then(|| k.parse().ok()).flatten()
    };
    let Some(highest) = metrics.keys().filter_map(|key| parse(key)).max() else { return Map::new() };
    metrics
        .iter()
        .filter(|(key, _)| parse(key) == Some(highest))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

const NO_ANSWER: &str = "no_answer";

/// The tasks, with `no_answer` among the scores if answers are requested.
fn with_no_answer(tasks: &[Vec<Sample>], answers: bool) -> Vec<Vec<Sample>> {
    let mut tasks = tasks.to_vec();
    if answers {
        for sample in tasks.iter_mut().flatten() {
            sample.scores.retain(|(name, _)| name != NO_ANSWER);
            sample.scores.push((NO_ANSWER.to_owned(), if sample.answer.is_none() { 1.0 } else { 0.0 }));
        }
    }
    tasks
}

fn score_names(tasks: &[Vec<Sample>]) -> Vec<String> {
    let names: BTreeSet<&str> =
        tasks.iter().flatten().flat_map(|sample| sample.scores.iter().map(|(name, _)| name.as_str())).collect();
    names.into_iter().map(str::to_owned).collect()
}

fn first(task: &[Sample], k: usize) -> &[Sample] {
    &task[..k.min(task.len())]
}

fn scores(samples: &[Sample], name: &str) -> Vec<f64> {
    samples.iter().filter_map(|sample| sample.score(name)).collect()
}

fn passed_at(task: &[Sample], name: &str, k: usize) -> Option<f64> {
    let scores = scores(task, name);
    if scores.is_empty() || k > scores.len() {
        return None;
    }
    if scores.iter().all(|score| *score == 0.0 || *score == 1.0) {
        let right = scores.iter().filter(|score| **score == 1.0).count();
        passed_of_counts(right, scores.len(), k)
    } else {
        scores[..k].iter().copied().reduce(f64::max)
    }
}

/// Returns the probability that at least one of `k` rollouts of a task passes, of which `right` of `all` passed: the unbiased estimate
/// 1 − C(wrong, k) / C(all, k). `None` if the task has fewer than `k` rollouts, or none.
#[must_use]
pub fn passed_of_counts(right: usize, all: usize, k: usize) -> Option<f64> {
    if all == 0 || k > all {
        return None;
    }
    let wrong = all.saturating_sub(right);
    if wrong < k {
        return Some(1.0);
    }
    // C(wrong, k) / C(all, k) as a product of ratios: the binomials themselves overflow.
    let none_right: f64 = (0..k).map(|i| (wrong - i) as f64 / (all - i) as f64).product();
    Some(1.0 - none_right)
}

fn majority(samples: &[Sample], name: &str) -> f64 {
    let mut counted: Vec<(&str, f64, usize)> = Vec::new();
    for sample in samples {
        let (Some(answer), Some(score)) = (sample.answer.as_deref(), sample.score(name)) else { continue };
        match counted.iter_mut().find(|(other, value, _)| *other == answer && *value == score) {
            Some((_, _, count)) => *count += 1,
            None => counted.push((answer, score, 1)),
        }
    }
    let most = counted.iter().map(|(_, _, count)| *count).max().unwrap_or(0);
    let tied: Vec<f64> = counted.iter().filter(|(_, _, count)| *count == most).map(|(_, score, _)| *score).collect();
    mean(&tied).unwrap_or(0.0)
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| exact_sum(values.iter().copied()) / values.len() as f64)
}

fn deviation(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() > 1)?;
    let squares = exact_sum(values.iter().map(|value| (value - mean) * (value - mean)));
    Some((squares / (values.len() - 1) as f64).sqrt())
}

fn insert_percent(metrics: &mut Map<String, Value>, key: String, values: &[f64]) {
    if let Some(mean) = mean(values) {
        metrics.insert(key, (100.0 * mean).into());
    }
}
