//! The known name that a misspelled one probably means.

/// Characters of a name up to which two replaced letters make it another word.
const SHORT_CHARS: usize = 5;

/// Returns the element of `names` that is closest to `wanted`, if it differs by at most a typing mistake. An ending that both have, such
/// as `.yaml`, makes no names alike.
pub fn nearest<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = wanted.to_lowercase();
    names
        .into_iter()
        .filter_map(|name| Some((similarity(&wanted, &name.to_lowercase())?, name)))
        .max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(a.1)))
        .map(|(_, name)| name)
}

/// Returns how alike two names are, up to 1; `None` if they are different words.
fn similarity(wanted: &str, name: &str) -> Option<f64> {
    let (wanted, name) = without_common_ending(wanted, name);
    let length = wanted.chars().count().max(name.chars().count());
    let distance = strsim::damerau_levenshtein(wanted, name);
    let replaced =
        distance == 2 && length <= SHORT_CHARS && !(has_letters_of(wanted, name) || has_letters_of(name, wanted));
    let score = 1.0 - distance as f64 / length.max(1) as f64;
    (!replaced && score >= 0.6).then_some(score)
}

fn without_common_ending<'a>(wanted: &'a str, name: &'a str) -> (&'a str, &'a str) {
    match (wanted.rsplit_once('.'), name.rsplit_once('.')) {
        (Some((wanted, ending)), Some((name, other))) if ending == other => (wanted, name),
        _ => (wanted, name),
    }
}

/// Returns `true` if all letters of `part` are in `whole`, each as often: none was replaced by another.
fn has_letters_of(whole: &str, part: &str) -> bool {
    let mut left: Vec<char> = whole.chars().collect();
    part.chars().all(|letter| match left.iter().position(|other| *other == letter) {
        Some(at) => {
            left.swap_remove(at);
            true
        }
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_mistake_is_recognized_and_another_word_is_not() {
        for (wanted, name) in [
            ("mahts", "math"),
            ("usr", "user"),
            ("Temprature", "temperature"),
            ("gmy.yaml", "gym.yaml"),
            ("tally_agnet", "tally_agent"),
        ] {
            assert_eq!(nearest(wanted, [name, "something_else"]), Some(name));
        }
        for (wanted, name) in [("typo.yaml", "gymn.yaml"), ("stop", "store"), ("a.yaml", "b.yaml"), ("n", "m")] {
            assert_eq!(nearest(wanted, [name]), None, "{wanted}");
        }
    }
}
