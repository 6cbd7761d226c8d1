//! Describes the causes of failed attempts for the user.

use std::fmt::Write;

use gym_client::collect::{FailureCause, ProgressSnapshot};
use gym_core::base::ErrorLink;
use gym_core::message::shorten;

/// Characters of a cause in one line.
const LINE_CHARS_MAX: usize = 240;

/// Formats the causes, the most frequent first, each with the complete chain of one example; `None` if nothing failed.
pub(super) fn report(snapshot: &ProgressSnapshot) -> Option<String> {
    let causes = snapshot.causes_by_count();
    let most = causes.first()?.count;
    let width = most.max(snapshot.other_causes).to_string().len();
    let mut text = String::from("why attempts failed, most frequent first:");
    for cause in causes {
        let FailureCause { count, class, .. } = cause;
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "\n{count:>width$} x {class} in {}{}; the first: {}",
            cause.server,
            cause.route,
            example(cause)
        );
        for link in &cause.causes {
            for line in link.to_string().lines() {
                let _ = write!(text, "\n{:width$}     {line}", "");
            }
        }
    }
    if snapshot.other_causes > 0 {
        let _ = write!(text, "\n{:>width$} x other causes", snapshot.other_causes);
    }
    Some(text)
}

/// Formats a cause in one line, when it occurs for the first time.
pub(super) fn line(cause: &FailureCause) -> String {
    let FailureCause { class, server, route, causes, .. } = cause;
    format!("failed: {}: {class} in {server}{route}: {}", example(cause), why(causes))
}

/// Returns the innermost cause, and what the callers of its call add, such as the number of turns.
fn why(causes: &[ErrorLink]) -> String {
    let mut links = causes.iter().rev();
    let innermost = links.next().map(ErrorLink::to_string).unwrap_or_default();
    let added = links.map(|link| link.message.clone()).filter(|message| !message.is_empty());
    let why = std::iter::once(innermost).chain(added).collect::<Vec<_>>().join("; ");
    let mut why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    shorten(&mut why, LINE_CHARS_MAX);
    why
}

fn example(cause: &FailureCause) -> String {
    let key = cause.example.key;
    let attempt = match cause.example.number {
        0 => String::new(),
        number => format!(", attempt {}", number + 1),
    };
    let input = cause.input.as_ref().map(|place| format!(" ({place})")).unwrap_or_default();
    format!("task {}, repeat {}{attempt}{input}", key.task_index, key.rollout_index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_cause_has_what_the_callers_of_its_call_add() {
        let link =
            |subject: &str, message: &str| ErrorLink { subject: subject.to_owned(), message: message.to_owned() };
        let causes = [
            link("POST agent/run", ""),
            link("", "the episode had not ended after 412 turns"),
            link("POST env/slow", ""),
            link("", "the deadline\nhas passed"),
        ];
        assert_eq!(why(&causes), "the deadline has passed; the episode had not ended after 412 turns");
        assert_eq!(why(&[]), "");
    }
}
