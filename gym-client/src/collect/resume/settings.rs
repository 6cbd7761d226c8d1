//! The file of the settings that made the rewards of a collection, `<output>_settings.json`.
//!
//! It has one version for each set of settings. A collection has one, unless somebody resumed it with others and let their rows be marked.

use std::path::Path;

use gym_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::collect::names::settings::RewardSettings;
use crate::collect::resume::{differing, shortened};

/// The format of the file.
const FORMAT: u32 = 1;
/// Differences that an error lists; the rest is counted.
const LISTED_MAX: usize = 10;

/// The behavior of a resumed collection if its servers' settings are not those that made the recorded rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChangedSettings {
    /// The collection is rejected before its first rollout.
    #[default]
    Reject,
    /// The collection continues, and its rows get `_gym_settings`: the number of their version in `<output>_settings.json`. The rows of version
    /// 0 have no number.
    Mark,
}

/// The content of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::collect) struct RecordedSettings {
    format: u32,
    versions: Vec<SettingsVersion>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SettingsVersion {
    #[serde(flatten)]
    settings: RewardSettings,
    /// Rollouts that were recorded before the settings were.
    #[serde(default, skip_serializing_if = "is_zero")]
    rollouts_before: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The settings of a collection that begins or continues.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::collect) struct AcceptedSettings {
    /// The new text of the file; `None` if it stays.
    pub(in crate::collect) text: Option<String>,
    /// The version that the rows of this run are marked with; `None` for version 0.
    pub(in crate::collect) mark: Option<u32>,
    pub(in crate::collect) warnings: Vec<String>,
}

/// Returns the settings of a collection that has no outcome yet.
pub(in crate::collect) fn first_settings(is: &RewardSettings) -> Result<AcceptedSettings> {
    let recorded = RecordedSettings { format: FORMAT, versions: vec![SettingsVersion::of(is, 0)] };
    Ok(AcceptedSettings { text: Some(recorded.to_text()?), mark: None, warnings: Vec::new() })
}

/// Compares the settings with those that made the recorded rewards. `text` is that of the file; `None` if there is none.
///
/// # Errors
/// `InvalidArgument`, with each difference, if they differ and `changed` rejects that, or if the file cannot be read.
pub(in crate::collect) fn resumed_settings(
    path: &Path,
    text: Option<&str>,
    is: &RewardSettings,
    changed: ChangedSettings,
    recorded_rollouts: u64,
) -> Result<AcceptedSettings> {
    let Some(text) = text else {
        let recorded = RecordedSettings { format: FORMAT, versions: vec![SettingsVersion::of(is, recorded_rollouts)] };
        let warning = format!(
            "the recorded rewards are not checked against the servers' settings, which their run did not record; {} has those of now, and \
             the next --resume compares them",
            path.display()
        );
        return Ok(AcceptedSettings { text: Some(recorded.to_text()?), mark: None, warnings: vec![warning] });
    };
    let mut recorded = RecordedSettings::parse(path, text)?;
    let before = recorded.clone();
    let mut warnings = Vec::new();
    let same = recorded.versions.iter().position(|version| version.differences(is).is_empty());
    let at = match (same, changed) {
        (Some(at), _) => at,
        (None, ChangedSettings::Mark) => {
            recorded.versions.push(SettingsVersion::of(is, 0));
            recorded.versions.len() - 1
        }
        (None, ChangedSettings::Reject) => {
            let newest = recorded.versions.last().expect("a file has a version");
            return Err(rejected(path, &newest.differences(is)));
        }
    };
    let version = &mut recorded.versions[at];
    let untold: Vec<&str> = version.settings.untold.union(&is.untold).map(String::as_str).collect();
    if !untold.is_empty() {
        warnings.push(format!("not checked, because the head server does not tell them: {}", untold.join(", ")));
    }
    version.settings.add_servers(is);
    let mark = u32::try_from(at).ok().filter(|at| *at > 0);
    let text = if recorded == before { None } else { Some(recorded.to_text()?) };
    Ok(AcceptedSettings { text, mark, warnings })
}

impl RecordedSettings {
    fn parse(path: &Path, text: &str) -> Result<Self> {
        let fail = |problem: String| {
            let text = format!(
                "{problem}\n  fix: restore the file; or remove it, and the rewards are resumed without a check of the settings"
            );
            Error::invalid(text).about(format!("read {}", path.display()))
        };
        let recorded: Self = serde_json::from_str(text).map_err(|error| fail(format!("no settings: {error}")))?;
        match (recorded.format, recorded.versions.is_empty()) {
            (FORMAT, false) => Ok(recorded),
            (FORMAT, true) => Err(fail("it has no version".to_owned())),
            (other, _) => Err(fail(format!("its format is {other}, and this program reads {FORMAT}"))),
        }
    }

    fn to_text(&self) -> Result<String> {
        let text = serde_json::to_string_pretty(self);
        text.map(|text| text + "\n").map_err(|error| Error::internal("cannot write the settings").caused_by(error))
    }
}

impl SettingsVersion {
    fn of(settings: &RewardSettings, rollouts_before: u64) -> Self {
        Self { settings: settings.clone(), rollouts_before }
    }

    /// Returns a line for each setting that differs. Servers that only one of both has are not compared: they made no recorded reward, or
    /// they will make none.
    fn differences(&self, is: &RewardSettings) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, was) in &self.settings.servers {
            let Some(is_now) = is.servers.get(name) else { continue };
            let mut path = name.clone();
            differing(&mut path, 0, Some(&was.to_string()), Some(&is_now.to_string()), &mut |path, was, now| {
                if !self.settings.untold.contains(path) && !is.untold.contains(path) {
                    let shown = |value: Option<&str>| value.map_or_else(|| "absent".to_owned(), shortened);
                    lines.push(format!("{path}: was {}, is {}", shown(was), shown(now)));
                }
            });
        }
        lines
    }
}

fn rejected(path: &Path, differences: &[String]) -> Error {
    let mut text = "the settings of the servers are not those that made the recorded rewards:".to_owned();
    for line in differences.iter().take(LISTED_MAX) {
        text.push_str("\n  ");
        text.push_str(line);
    }
    if differences.len() > LISTED_MAX {
        text.push_str(&format!("\n  and {} further differences", differences.len() - LISTED_MAX));
    }
    text.push_str(
        "\n  fix: restore the settings, or name another output, or mark the rows of this run with --changed-settings mark",
    );
    Error::invalid(text).about(format!("compare with {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;

    fn settings(servers: Value) -> RewardSettings {
        RewardSettings { servers: serde_json::from_value(servers).unwrap(), untold: BTreeSet::new() }
    }

    fn resumed(
        text: Option<&str>,
        is: &RewardSettings,
        changed: ChangedSettings,
    ) -> std::result::Result<AcceptedSettings, String> {
        resumed_settings(Path::new("r_settings.json"), text, is, changed, 5).map_err(|error| error.to_string())
    }

    #[test]
    fn equal_settings_resume_and_others_are_refused_with_each_difference() {
        let was = settings(json!({"policy": {"m": {"model": "a", "extra": {"seed": 1, "deep": [1, 2]}}}}));
        let text = first_settings(&was).unwrap().text.unwrap();
        let same = resumed(Some(&text), &was, ChangedSettings::Reject).unwrap();
        assert_eq!(same, AcceptedSettings { text: None, mark: None, warnings: Vec::new() });
        // Numbers as another program spells them, and the order of the keys, are no difference.
        let spelled = settings(json!({"policy": {"m": {"extra": {"deep": [1.0, 2], "seed": 1.0}, "model": "a"}}}));
        assert_eq!(resumed(Some(&text), &spelled, ChangedSettings::Reject).unwrap().text, None);
        for (is, expected) in [
            (
                json!({"policy": {"m": {"model": "b", "extra": {"seed": 1, "deep": [1, 2]}}}}),
                vec![r#"policy.m.model: was "a", is "b""#],
            ),
            (
                json!({"policy": {"m": {"model": "a", "extra": {"deep": [1, 3], "new": null}}}}),
                vec![
                    "policy.m.extra.seed: was 1, is absent",
                    "policy.m.extra.deep[1]: was 2, is 3",
                    "policy.m.extra.new: was absent",
                ],
            ),
            (json!({"policy": {"n": {}}}), vec!["policy.m: was {", "policy.n: was absent, is {}"]),
        ] {
            let error = resumed(Some(&text), &settings(is), ChangedSettings::Reject).unwrap_err();
            assert!(expected.iter().all(|line| error.contains(line)), "{error}");
            assert!(error.contains("r_settings.json") && error.contains("--changed-settings mark"), "{error}");
        }
    }

    #[test]
    fn changed_settings_that_are_allowed_mark_the_rows_and_are_known_from_then_on() {
        let [a, b, c] = ["a", "b", "c"].map(|model| settings(json!({"policy": {"m": {"model": model}}})));
        let mut text = first_settings(&a).unwrap().text.unwrap();
        let mut step = |is: &RewardSettings, changed| {
            let accepted = resumed(Some(&text), is, changed);
            if let Ok(AcceptedSettings { text: Some(newer), .. }) = &accepted {
                text.clone_from(newer);
            }
            accepted.map(|accepted| accepted.mark)
        };
        assert_eq!(step(&b, ChangedSettings::Mark), Ok(Some(1)));
        assert_eq!(step(&b, ChangedSettings::Reject), Ok(Some(1)));
        assert_eq!(step(&a, ChangedSettings::Reject), Ok(None));
        let error = step(&c, ChangedSettings::Reject).unwrap_err();
        assert!(error.contains(r#"was "b", is "c""#), "{error}");
        assert_eq!(step(&c, ChangedSettings::Mark), Ok(Some(2)));
    }

    #[test]
    fn servers_that_take_part_later_are_added() {
        let text = first_settings(&settings(json!({"a": {"m": {"x": 1}}}))).unwrap().text.unwrap();
        let both = resumed(
            Some(&text),
            &settings(json!({"a": {"m": {"x": 1}}, "b": {"m": {"y": 1}}})),
            ChangedSettings::Reject,
        );
        let text = both.unwrap().text.unwrap();
        let error =
            resumed(Some(&text), &settings(json!({"b": {"m": {"y": 2}}})), ChangedSettings::Reject).unwrap_err();
        assert!(error.contains("b.m.y: was 1, is 2"), "{error}");
    }

    #[test]
    fn results_without_recorded_settings_resume_with_one_warning() {
        let is = settings(json!({"policy": {"m": {"model": "a"}}}));
        let first = resumed(None, &is, ChangedSettings::Reject).unwrap();
        assert_eq!((first.mark, first.warnings.len()), (None, 1));
        let text = first.text.unwrap();
        assert!(text.contains(r#""rollouts_before": 5"#), "{text}");
        assert_eq!(resumed(Some(&text), &is, ChangedSettings::Reject).unwrap().warnings, [] as [&str; 0]);
        let other = settings(json!({"policy": {"m": {"model": "b"}}}));
        resumed(Some(&text), &other, ChangedSettings::Reject).unwrap_err();
    }

    #[test]
    fn what_a_head_server_does_not_tell_is_not_checked() {
        let was = settings(json!({"policy": {"m": {"model": "a", "seed": 1}}}));
        let text = first_settings(&was).unwrap().text.unwrap();
        let mut is = settings(json!({"policy": {"m": {"model": "a"}}}));
        is.untold = BTreeSet::from(["policy.m.seed".to_owned(), "judge".to_owned()]);
        let accepted = resumed(Some(&text), &is, ChangedSettings::Reject).unwrap();
        assert_eq!(accepted.text, None);
        assert!(accepted.warnings[0].contains("not checked") && accepted.warnings[0].contains("judge, policy.m.seed"));
    }

    #[test]
    fn a_file_that_is_no_settings_is_an_error_with_its_fix() {
        for text in [
            "",
            "null",
            "{}",
            "[]",
            r#"{"format": 2, "versions": [{"servers": {}}]}"#,
            r#"{"format": 1, "versions": []}"#,
        ] {
            let error = resumed(Some(text), &settings(json!({})), ChangedSettings::Mark).unwrap_err();
            assert!(error.contains("r_settings.json") && error.contains("fix: restore the file"), "{error}");
        }
    }
}
