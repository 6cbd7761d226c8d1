//! One self-contained page: a list with filters, the conversation, and a histogram of the rewards. It loads nothing.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cli::exit::Failure;
use crate::head::page::PAGE;
use crate::head::page::conversation::{Rollout, RowLabel};

/// Conversations on a page without `--limit`. A browser opens a page of some tens of megabytes at once.
pub(super) const ROLLOUTS_MAX: usize = 2_000;
/// Further rollouts that are listed without their conversation: about 25 bytes each.
pub(super) const LISTED_MAX: usize = 1_000_000;

#[derive(Serialize)]
struct PageData<'a> {
    title: &'a str,
    /// Sentences on rollouts that were requested and are not recorded.
    missing: &'a [String],
    rollouts: &'a [Rollout],
    /// Rollouts without their conversation.
    columns: Columns<'a>,
    /// The number of rollouts with those that are not on the page.
    total: usize,
}

/// The labels of many rollouts, a list for each key. Names are numbers in a list of names; -1 is none.
#[derive(Default, Serialize)]
struct Columns<'a> {
    names: Vec<&'a str>,
    task: Vec<u64>,
    repeat: Vec<u64>,
    attempt: Vec<u64>,
    agent: Vec<usize>,
    class: Vec<isize>,
    reward: Vec<Option<f64>>,
}

impl<'a> Columns<'a> {
    fn of(labels: impl Iterator<Item = &'a RowLabel>) -> Self {
        let (mut columns, mut numbers) = (Self::default(), BTreeMap::new());
        for label in labels {
            columns.task.push(label.task);
            columns.repeat.push(label.repeat);
            columns.attempt.push(label.attempt);
            let mut number = |name: &'a str| {
                *numbers.entry(name).or_insert_with(|| {
                    columns.names.push(name);
                    columns.names.len() - 1
                })
            };
            let (agent, class) = (number(&label.agent), label.class.as_deref().map(&mut number));
            columns.agent.push(agent);
            columns.class.push(class.map_or(-1, usize::cast_signed));
            columns.reward.push(label.reward);
        }
        columns
    }
}

/// Returns the page with these rollouts, and with the labels of others.
///
/// # Errors
/// `Failed` if the rows cannot be written as JSON.
pub(super) fn page<'a>(
    title: &str,
    missing: &[String],
    rollouts: &[Rollout],
    others: impl Iterator<Item = &'a RowLabel>,
    total: usize,
) -> Result<String, Failure> {
    let data = PageData { title, missing, rollouts, columns: Columns::of(others), total };
    let data = serde_json::to_string(&data).map_err(|error| Failure::Failed(format!("write the page: {error}")))?;
    // A text that contains `</script>` must not end the element that it is in.
    let data = data.replace('<', "\\u003c");
    let (before, after) = PAGE.split_once("__DATA__").expect("the page has a place for the data");
    Ok([before, &data, after].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::page::conversation::tests::read;

    #[test]
    fn the_data_cannot_leave_its_element() {
        let row = r#"{"responses_create_params":{"input":"</script><script>alert(1)</script><!--"}}"#;
        let other = RowLabel { task: 7, agent: "b".into(), class: Some("tool_error".into()), ..RowLabel::default() };
        let page = page(
            "a<b",
            &["b: 3 of 4 rollouts are missing".to_owned()],
            &[read(row.as_bytes()).unwrap()],
            [&other, &RowLabel::default()].into_iter(),
            3,
        )
        .unwrap();
        let (_, data) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
        let (data, _) = data.split_once("</script>").unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["title"], "a<b");
        let columns = serde_json::json!({"names": ["b", "tool_error", ""], "task": [7, 0], "repeat": [0, 0], "attempt": [0, 0],
            "agent": [0, 2], "class": [1, -1], "reward": [null, null]});
        assert_eq!(data["columns"], columns);
        assert_eq!(data["rollouts"][0]["items"][0]["text"], "</script><script>alert(1)</script><!--");
    }
}
