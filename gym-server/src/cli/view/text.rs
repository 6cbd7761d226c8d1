//! A rollout as text for the terminal.

use std::fmt::Write as _;

use crate::head::page::conversation::{Item, ItemKind, Rollout, RowLabel};

/// Colors, or none if the output is not a terminal or `NO_COLOR` is set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub(super) color: bool,
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }
}

/// Returns a rollout as text.
pub(super) fn rollout(rollout: &Rollout, position: usize, count: usize, style: Style) -> String {
    let mut text = String::new();
    let label = &rollout.label;
    let calls = rollout.items.iter().filter(|item| item.kind == ItemKind::ToolCall).count();
    let mut heading = format!("rollout {} · {} · {}", label.id(), agent(label), result(label));
    if calls > 0 {
        let _ = write!(heading, " · {calls} tool call{}", if calls == 1 { "" } else { "s" });
    }
    let _ = writeln!(text, "{}  {}\n", style.bold(&heading), style.dim(&format!("{} of {count}", position + 1)));
    for item in &rollout.items {
        self::item(&mut text, item, style);
    }
    if rollout.items.is_empty() && rollout.causes.is_empty() {
        let _ = writeln!(text, "{}\n", style.dim("the row has no conversation"));
    }
    for (depth, cause) in rollout.causes.iter().enumerate() {
        let arrow = if depth == 0 { String::new() } else { format!("{}└ ", "  ".repeat(depth - 1)) };
        let _ = writeln!(text, "{}", style.paint("31", &format!("{arrow}{}", printable(cause))));
    }
    if !rollout.facts.is_empty() {
        let width = rollout.facts.iter().map(|(key, _)| key.chars().count()).max().unwrap_or_default();
        for (key, value) in &rollout.facts {
            let _ = writeln!(text, "{}  {}", style.dim(&format!("{:width$}", printable(key))), printable(value));
        }
    }
    text
}

/// Returns the line of a rollout in a list.
pub(super) fn row(label: &RowLabel) -> [String; 3] {
    [label.id(), agent(label).to_owned(), result(label)]
}

fn agent(label: &RowLabel) -> &str {
    if label.agent.is_empty() { "no agent" } else { &label.agent }
}

fn result(label: &RowLabel) -> String {
    match (&label.class, label.reward) {
        (Some(class), _) => format!("failed: {}", printable(class)),
        (None, Some(reward)) => format!("reward {reward}"),
        (None, None) => "no reward".to_owned(),
    }
}

fn item(text: &mut String, item: &Item, style: Style) {
    let said = printable(&item.text);
    match item.kind {
        ItemKind::Message => {
            let color = match item.who.as_str() {
                "assistant" => "1;36",
                "user" => "1;32",
                _ => "1;35",
            };
            let _ = writeln!(text, "{}\n{}\n", style.paint(color, &printable(&item.who)), indented(&said));
        }
        ItemKind::Reasoning => {
            let _ = writeln!(text, "{}\n{}\n", style.dim("reasoning"), style.dim(&indented(&said)));
        }
        ItemKind::ToolCall => {
            let call = format!("→ {}", printable(&item.who));
            let _ = writeln!(text, "{} {said}", style.paint("1;33", &call));
        }
        ItemKind::ToolOutput => {
            let mut lines = said.lines();
            let _ = writeln!(text, "{} {}", style.paint("33", "←"), lines.next().unwrap_or_default());
            for line in lines {
                let _ = writeln!(text, "  {line}");
            }
            text.push('\n');
        }
        ItemKind::Other => {
            let _ = writeln!(text, "{}\n{}\n", style.dim(&printable(&item.who)), indented(&said));
        }
    }
}

fn indented(text: &str) -> String {
    text.lines()
        .map(|line| if line.is_empty() { String::new() } else { format!("  {line}") })
        .collect::<Vec<_>>()
        .join("\n")
}

/// Replaces control characters: a model's text must not move the cursor or color the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::page::conversation::tests::read;

    #[test]
    fn a_rollout_is_printed_as_a_conversation() {
        let row = concat!(
            r#"{"_ng_task_index":3,"_ng_rollout_index":0,"agent_ref":{"name":"bank"},"reward":0.5,"found":"7","#,
            r#""responses_create_params":{"input":"Pay 5.\nThen stop."},"response":{"output":["#,
            r#"{"type":"function_call","name":"pay","arguments":"{\"cents\":5}"},"#,
            r#"{"type":"function_call_output","output":"paid\nbalance 2"},"#,
            r#"{"type":"message","role":"assistant","content":[{"type":"output_text","text":"\u001b[2Jdone"}]}]}}"#,
        );
        let text = rollout(&read(row.as_bytes()).unwrap(), 1, 9, Style { color: false });
        let expected = "rollout 3-0 · bank · reward 0.5 · 1 tool call  2 of 9\n\n\
            user\n  Pay 5.\n  Then stop.\n\n\
            → pay {\"cents\":5}\n← paid\n  balance 2\n\n\
            assistant\n  \u{fffd}[2Jdone\n\n\
            found  \"7\"\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_failure_is_printed_as_a_chain() {
        let row = r#"{"_ng_failure_class":"tool_error","_ng_failure_causes":["POST a/run","POST b/pay","disk full"]}"#;
        let text = rollout(&read(row.as_bytes()).unwrap(), 0, 1, Style { color: false });
        assert_eq!(
            text,
            "rollout 0-0 · no agent · failed: tool_error  1 of 1\n\nPOST a/run\n└ POST b/pay\n  └ disk full\n"
        );
    }
}
