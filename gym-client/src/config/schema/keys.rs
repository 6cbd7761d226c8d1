//! The keys of a server's block that its implementation does not read: misspelled ones, and those of NeMo Gym's own servers.
//!
//! NeMo Gym ignores all of them, so that a misspelled `max_steps` silently means "unlimited". A key that NeMo Gym's own server
//! reads is no mistake in a shared file; it is listed as ignored.

use crate::config::problem::{Mistake, Origin, Problem, nearest};
use crate::config::schema::InstanceConfig;
use crate::config::yaml::deserialize::UnknownKey;
use gym_core::server::ServerKind;
use serde_json::Value;

/// Keys of each block that the configuration itself reads, or that describe the server to people.
const EVERY_BLOCK: [&str; 11] = [
    "entrypoint",
    "host",
    "port",
    "num_workers",
    "domain",
    "datasets",
    "name",
    "description",
    "value",
    "verified",
    "verified_url",
];

/// Keys by which the configuration composes servers of a kind, whether or not the implementation reads them.
fn of_composition(kind: ServerKind) -> &'static [&'static str] {
    match kind {
        ServerKind::Agent => &["resources_server", "model_server"],
        ServerKind::Environment => &["agent_server", "resources_server"],
        ServerKind::Resources => &["allowed_agents", "allowed_model_types"],
        ServerKind::Model => &[],
    }
}

/// Keys of all servers of a kind in NeMo Gym 0.7.0.
fn of_kind(kind: ServerKind) -> &'static [&'static str] {
    match kind {
        ServerKind::Agent => &[
            "session_close_retry_window_seconds",
            "skip_verification",
            "skip_verification_reward",
            "token_id_capture",
            "tool_accesses",
        ],
        ServerKind::Model => &["token_id_capture_non_generating_requests"],
        ServerKind::Resources => &["expose_tools_over_mcp"],
        ServerKind::Environment => &[
            "max_concurrent_episodes",
            "queue_timeout_seconds",
            "default_episode_timeout_seconds",
            "cleanup_timeout_seconds",
        ],
    }
}

/// Keys of single servers in NeMo Gym 0.7.0 which the SDK's servers of the same name do not read and can do without.
fn of_implementation(implementation: &str) -> &'static [&'static str] {
    match implementation {
        "simple_agent" => &["execute_tools"],
        "vllm_model" => &["render_chat_template", "tokenizer"],
        _ => &[],
    }
}

/// Keys of `vllm_model` which NeMo Gym reads only with `endpoint_file`, and which its own file sets without it.
const OF_ENDPOINT_FILE: [&str; 3] =
    ["endpoint_stale_grace_s", "endpoint_connection_retries", "endpoint_check_interval_s"];

/// Keys of single servers in NeMo Gym 0.7.0 without which rollouts would differ.
fn unsupported(implementation: &str) -> &'static [&'static str] {
    match implementation {
        "vllm_model" => &["use_completions_api", "supply_prefix_token_ids", "endpoint_file", "audio_root"],
        _ => &[],
    }
}

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
            let composed = of_composition(instance.kind);
            let idle = implementation == "vllm_model" && OF_ENDPOINT_FILE.contains(&key);
            if idle || EVERY_BLOCK.contains(&key) || composed.contains(&key) {
                continue;
            }
            if unsupported(implementation).contains(&key) {
                if has_effect {
                    let what = format!("'{key}' is not supported by the {implementation} of this program");
                    let fix = "remove it, or run NeMo Gym's own server with a program that has no such implementation";
                    unread.errors.push(located(instance, &path, what).fix(fix));
                }
            } else if of_kind(instance.kind).contains(&key) || of_implementation(implementation).contains(&key) {
                if has_effect {
                    unread.ignored.push(problem(instance, &path, "only NeMo Gym's own server reads it"));
                }
            } else {
                let names: Vec<&'static str> = known.iter().chain(composed).copied().chain(EVERY_BLOCK).collect();
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
        let fix = match near {
            Some(near) => format!("did you mean '{near}'?"),
            None if own.is_empty() => format!("remove it; {reader} reads no keys of its own"),
            None => format!("remove it; {reader} reads {}", own.join(", ")),
        };
        self.meant.extend(near);
        self.errors.push(located(instance, path, format!("unknown key '{key}'")).fix(fix));
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
