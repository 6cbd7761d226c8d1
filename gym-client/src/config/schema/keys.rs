//! The keys of a server's block that its implementation does not read: misspelled ones, and those of NeMo Gym's own servers.
//!
//! NeMo Gym ignores all of them, so that a misspelled `max_steps` silently means "unlimited". A key that NeMo Gym's own server
//! reads is no mistake in a shared file; it is listed as ignored.

use crate::config::check;
use crate::config::problem::{Mistake, Origin, Problem, nearest};
use crate::config::reference::{
    BLOCK_KEYS, ENDPOINT_FILE_KEYS, composition_keys, nemo_keys_of_implementation, nemo_keys_of_kind, unsupported_keys,
};
use crate::config::schema::InstanceConfig;
use crate::config::yaml::deserialize::UnknownKey;
use serde_json::Value;

/// The unread keys of a block: errors and warnings.
#[derive(Debug, Default)]
pub(crate) struct UnreadKeys {
    pub(crate) errors: Vec<Problem>,
    /// Keys of NeMo Gym's own servers with a value that changes them.
    pub(crate) ignored: Vec<Problem>,
    /// The nearest names of the unknown keys.
    pub(crate) meant: Vec<&'static str>,
}

impl UnreadKeys {
    pub(crate) fn of(instance: &InstanceConfig, unknown: Vec<UnknownKey>) -> Self {
        let mut unread = Self::default();
        if instance.num_workers.is_some_and(|workers| workers > 1) {
            unread.ignored.push(problem(instance, &["num_workers".to_owned()], "one process serves all requests here"));
        }
        for UnknownKey { path, known } in unknown {
            let [key] = path.as_slice() else {
                // A reference may name the kind of its server, whether or not the type reads it. A misspelled kind is an error already.
                if let [above @ .., last] = path.as_slice()
                    && last == "type"
                    && instance.node.at(above).is_some_and(check::is_reference)
                {
                    continue;
                }
                unread.unknown(instance, &path, known, known);
                continue;
            };
            let key = key.as_str();
            let implementation = instance.implementation.as_str();
            let value = instance.settings.get(key).unwrap_or(&Value::Null);
            let has_effect = match value {
                Value::Null | Value::Bool(false) => false,
                Value::Array(items) => !items.is_empty(),
                Value::Object(map) => !map.is_empty(),
                _ => true,
            };
            let shared = || composition_keys(instance.kind).iter().chain(&BLOCK_KEYS).map(|known| known.name);
            let idle = implementation == "vllm_model" && ENDPOINT_FILE_KEYS.contains(&key);
            if idle || shared().any(|name| name == key) {
                continue;
            }
            if unsupported_keys(implementation).contains(&key) {
                if has_effect {
                    let what = format!("'{key}' is not supported by the {implementation} of this program");
                    let fix = "remove it, or run NeMo Gym's own server with a program that has no such implementation";
                    unread.errors.push(located(instance, &path, what).fix(fix));
                }
            } else if nemo_keys_of_kind(instance.kind).contains(&key)
                || nemo_keys_of_implementation(implementation).contains(&key)
            {
                if has_effect {
                    unread.ignored.push(problem(instance, &path, "only NeMo Gym's own server reads it"));
                }
            } else {
                let names: Vec<&'static str> = known.iter().copied().chain(shared()).collect();
                unread.unknown(instance, &path, known, &names);
            }
        }
        unread
    }

    fn unknown(&mut self, instance: &InstanceConfig, path: &[String], own: &[&'static str], names: &[&'static str]) {
        let key = path.last().map(String::as_str).unwrap_or_default();
        let reader = if path.len() == 1 { instance.implementation.as_str() } else { "its block" };
        let near = nearest(key, names.iter().copied());
        let near = near.and_then(|near| names.iter().copied().find(|name| *name == near));
        let near = near.or_else(|| own.iter().copied().find(|name| is_part(key, name)));
        let empty = || {
            check::composed_kinds(instance.kind)
                .map(|(key, _)| key)
                .find(|key| instance.settings.get(*key) == Some(&Value::Null))
        };
        let fix = match near {
            None if path.len() == 1 && ["type", "name"].contains(&key) && empty().is_some() => {
                format!("indent it under '{}'", empty().unwrap_or_default())
            }
            Some(near) => format!("did you mean '{near}'?"),
            None if own.is_empty() => format!("remove it; {reader} reads no keys of its own"),
            None => format!("remove it; {reader} reads {}", listed(own)),
        };
        self.meant.extend(near);
        self.errors.push(located(instance, path, format!("unknown key '{key}'")).fix(fix));
    }
}

/// Returns `true` if one name is the other with words before it: `base_url` and `openai_base_url`.
fn is_part(one: &str, other: &str) -> bool {
    let ends = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|before| before.ends_with('_'));
    ends(one, other) || ends(other, one)
}

/// Lists names, of which a reader wants only the first.
fn listed(names: &[&str]) -> String {
    const SHOWN: usize = 8;
    match names.get(..SHOWN) {
        Some(first) if names.len() > SHOWN + 2 => {
            format!("{}, and {} more; `config schema` has them all", first.join(", "), names.len() - SHOWN)
        }
        _ => names.join(", "),
    }
}

fn problem(instance: &InstanceConfig, path: &[String], why: &str) -> Problem {
    let key = path.last().map(String::as_str).unwrap_or_default();
    located(instance, path, format!("'{key}' is ignored: {why}")).fix("remove it")
}

fn located(instance: &InstanceConfig, path: &[String], what: String) -> Problem {
    let origin: &Origin = instance.node.at(path).map_or(&instance.origin, |node| &node.origin);
    let key = format!("{}.{}.{}.{}", instance.name, instance.kind, instance.implementation, path.join("."));
    Problem::new(Mistake::Value, origin, key, what).instance(&instance.name)
}
