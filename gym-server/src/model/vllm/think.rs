//! Wraps reasoning in `<think>` tags and extracts it again.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Wraps each text that is not empty in tags.
pub(super) fn wrap<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    texts.into_iter().filter(|text| !text.is_empty()).map(|text| format!("{OPEN}{text}{CLOSE}")).collect()
}

/// Returns the tagged texts, and the remaining content.
pub(super) fn split(content: &str) -> (Vec<String>, String) {
    let (mut thoughts, mut rest, mut left) = (Vec::new(), content, String::new());
    while let Some((before, after)) = rest.split_once(OPEN) {
        let Some((thought, following)) = after.split_once(CLOSE) else { break };
        left.push_str(before);
        thoughts.push(thought.to_owned());
        rest = following;
    }
    left.push_str(rest);
    (thoughts, left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_tagged_comes_out_and_the_rest_stays() {
        let (thoughts, left) = split("a<think>b\n<think>c</think>d<think></think>e</think><think>open");
        assert_eq!(thoughts, ["b\n<think>c", ""]);
        assert_eq!(left, "ade</think><think>open");
        assert_eq!(wrap(["x", "", "y"]), "<think>x</think><think>y</think>");
    }
}
