//! One self-contained page: a list with filters, the conversation, and a histogram of the rewards. It loads nothing.

use serde::Serialize;

use crate::cli::exit::Failure;
use crate::head::page::PAGE;
use crate::head::page::conversation::Rollout;

/// Rollouts on a page without `--limit`. A browser opens a page of some tens of megabytes at once.
pub(super) const ROLLOUTS_MAX: usize = 2_000;

#[derive(Serialize)]
struct PageData<'a> {
    title: &'a str,
    rollouts: &'a [Rollout],
    /// The number of rollouts with those that are not on the page.
    total: usize,
}

/// Returns the page.
///
/// # Errors
/// `Failed` if the rows cannot be written as JSON.
pub(super) fn page(title: &str, rollouts: &[Rollout], total: usize) -> Result<String, Failure> {
    let data = serde_json::to_string(&PageData { title, rollouts, total })
        .map_err(|error| Failure::Failed(format!("write the page: {error}")))?;
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
        let page = page("a<b", &[read(row.as_bytes()).unwrap()], 1).unwrap();
        let (_, data) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
        let (data, _) = data.split_once("</script>").unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["title"], "a<b");
        assert_eq!(data["rollouts"][0]["items"][0]["text"], "</script><script>alert(1)</script><!--");
    }
}
