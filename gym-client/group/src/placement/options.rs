//! Merging of worker options from several sources, and selection of the workers to profile.

use gym_core::{Error, Result};
use serde_json::{Map, Value};

/// Merges `extra` over `defaults`: objects are merged key by key, all other values are replaced. Profiler settings that
/// `defaults` has under `runtime_env._nsight` are renamed to `nsight`, unless `nsight` exists already.
#[must_use]
pub fn merge_options(defaults: &Map<String, Value>, extra: &Map<String, Value>) -> Map<String, Value> {
    let mut merged = defaults.clone();
    if let Some(Value::Object(environment)) = merged.get_mut("runtime_env")
        && !environment.contains_key("nsight")
        && let Some(settings) = environment.remove("_nsight")
    {
        environment.insert("nsight".to_owned(), settings);
    }
    merge(&mut merged, extra);
    merged
}

fn merge(into: &mut Map<String, Value>, extra: &Map<String, Value>) {
    for (key, value) in extra {
        match (into.get_mut(key), value) {
            (Some(Value::Object(inner)), Value::Object(value)) => merge(inner, value),
            _ => drop(into.insert(key.clone(), value.clone())),
        }
    }
}

/// The workers and steps to profile with Nsight Systems, from NeMo RL's `NRL_NSYS_…` variables.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfilerRequest {
    patterns: Vec<String>,
    steps: String,
    extra: Map<String, Value>,
}

impl ProfilerRequest {
    /// Reads `NRL_NSYS_WORKER_PATTERNS` (comma-separated patterns with `*` and `?`), `NRL_NSYS_PROFILE_STEP_RANGE` and
    /// `NRL_NSYS_EXTRA_OPTIONS` (a JSON object) through `variable`. Returns `None` if no worker is to be profiled.
    ///
    /// # Errors
    /// `InvalidArgument` if only one of the first two is set, or if the options are not a JSON object.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let (patterns, steps) = match (set("NRL_NSYS_WORKER_PATTERNS"), set("NRL_NSYS_PROFILE_STEP_RANGE")) {
            (None, None) => return Ok(None),
            (Some(patterns), Some(steps)) => (patterns, steps),
            _ => {
                let text = "NRL_NSYS_WORKER_PATTERNS and NRL_NSYS_PROFILE_STEP_RANGE go together; set both or none";
                return Err(Error::invalid(text).about("profiler"));
            }
        };
        let extra = match set("NRL_NSYS_EXTRA_OPTIONS") {
            None => Map::new(),
            Some(text) => serde_json::from_str(&text).map_err(|error| {
                Error::invalid("NRL_NSYS_EXTRA_OPTIONS is not a JSON object").about("profiler").caused_by(error)
            })?,
        };
        let patterns = patterns.split(',').map(|pattern| pattern.trim().to_owned()).filter(|one| !one.is_empty());
        Ok(Some(Self { patterns: patterns.collect(), steps, extra }))
    }

    /// Returns the profiler options for this worker; `None` if it is not profiled.
    #[must_use]
    pub fn options_for(&self, worker: &str) -> Option<Map<String, Value>> {
        if !self.patterns.iter().any(|pattern| matches(pattern.as_bytes(), worker.as_bytes())) {
            return None;
        }
        let options: Map<String, Value> = [
            ("t", Value::from("cuda,cudnn,cublas,nvtx")),
            // The quotes are for the shell that Nsight starts; %p is the process id.
            ("o", Value::from(format!("'{worker}_{}_%p'", self.steps))),
            ("stop-on-exit", Value::from("true")),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
        Some(merge_options(&options, &self.extra))
    }

    /// Returns the command prefix that runs this worker's program under the profiler; `None` if it is not profiled.
    #[must_use]
    pub fn command_for(&self, worker: &str) -> Option<Vec<String>> {
        let mut command = vec!["nsys".to_owned(), "profile".to_owned()];
        for (key, value) in self.options_for(worker)? {
            let value = value.as_str().map_or_else(|| value.to_string(), |text| text.trim_matches('\'').to_owned());
            match key.len() {
                1 => command.extend([format!("-{key}"), value]),
                _ => command.push(format!("--{key}={value}")),
            }
        }
        Some(command)
    }
}

/// Returns `true` if all of `text` matches a pattern with `*` (anything) and `?` (any one byte).
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while from < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == text[from] => {
                at += 1;
                from += 1;
            }
            _ => {
                // The last star matches one byte more.
                let Some((star_at, star_from)) = star else { return false };
                (at, from) = (star_at + 1, star_from + 1);
                star = Some((star_at, star_from + 1));
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        let Value::Object(object) = value else { panic!("{value} is no object") };
        object
    }

    #[test]
    fn c160_options_merge_by_key_and_lists_are_replaced() {
        let merged = |defaults: Value, extra: Value| Value::Object(merge_options(&object(defaults), &object(extra)));
        assert_eq!(merged(json!({"a": 1, "b": 2}), json!({"b": 3, "c": 4})), json!({"a": 1, "b": 3, "c": 4}));
        let deep = merged(json!({"e": {"x": {"p": 1}, "y": 2}}), json!({"e": {"x": {"q": 3}}}));
        assert_eq!(deep, json!({"e": {"x": {"p": 1, "q": 3}, "y": 2}}));
        assert_eq!(merged(json!({"a": {"x": 1}}), json!({"a": 2})), json!({"a": 2}));
        assert_eq!(merged(json!({"a": 2}), json!({"a": {"x": 1}})), json!({"a": {"x": 1}}));
        assert_eq!(merged(json!({"a": [1, 2]}), json!({"a": [3]})), json!({"a": [3]}));
        let renamed =
            merged(json!({"runtime_env": {"_nsight": "n"}, "in": {"runtime_env": {"_nsight": 1}}}), json!({}));
        assert_eq!(renamed, json!({"runtime_env": {"nsight": "n"}, "in": {"runtime_env": {"_nsight": 1}}}));
        let kept = json!({"runtime_env": {"_nsight": "old", "nsight": "new"}});
        assert_eq!(merged(kept.clone(), json!({})), kept);
    }

    fn request(variables: &[(&str, &str)]) -> Result<Option<ProfilerRequest>> {
        ProfilerRequest::from_variables(|name| {
            variables.iter().find(|(known, _)| name.ends_with(known)).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn c161_workers_whose_name_fits_a_pattern_are_profiled() {
        let both = [("PATTERNS", " *policy* ,, *critic*"), ("STEP_RANGE", "1:5")];
        let asked = request(&both).unwrap().unwrap();
        assert_eq!(asked.options_for("dtensor_policy_worker").unwrap()["o"], "'dtensor_policy_worker_1:5_%p'");
        assert!(asked.options_for("my_critic").is_some());
        assert_eq!(asked.options_for("vllm_generation"), None);
        assert_eq!(request(&[]).unwrap(), None);
        assert!(request(&both[..1]).is_err() && request(&both[1..]).is_err());
        assert_eq!(
            request(&[("PATTERNS", " , "), ("STEP_RANGE", "1:5")]).unwrap().unwrap().options_for("policy"),
            None
        );

        let command = asked.command_for("my_critic").unwrap().join(" ");
        assert_eq!(command, "nsys profile -t cuda,cudnn,cublas,nvtx -o my_critic_1:5_%p --stop-on-exit=true");
        let extra = |json| [both[0], both[1], ("EXTRA_OPTIONS", json)];
        let asked = request(&extra(r#"{"t": "cuda", "gpu": "all"}"#)).unwrap().unwrap();
        let options = asked.options_for("policy").unwrap();
        assert_eq!((&options["t"], &options["gpu"]), (&json!("cuda"), &json!("all")));
        assert!(request(&extra("{")).is_err() && request(&extra("[1]")).is_err());
    }

    #[test]
    fn stars_stand_for_anything_and_question_marks_for_one() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("?olicy", "policy", true),
            ("policy", "policy2", false),
            ("", "x", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), fits, "{pattern} on {text}");
        }
    }
}
