//! The settings of servers that decide rewards.
//!
//! Every setting counts, also one that this SDK does not know, except for those that are known to decide none: addresses, credentials, texts for
//! people, and how fast and how often the servers call.

use std::collections::{BTreeMap, BTreeSet};

use gym_core::server::ServerKind;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::UNTOLD;
use crate::config::yaml::writer::{MASK, is_secret_key, mask};

/// Keys of a server's block that decide no reward. Addresses are recognized by their values as well.
const NO_REWARD_KEYS: [&str; 22] = [
    // Where and for whom the server runs. The rows of its datasets are in the materialized inputs.
    "host",
    "port",
    "num_workers",
    "datasets",
    "domain",
    "name",
    "description",
    "value",
    "verified",
    "verified_url",
    // How fast and how often it calls.
    "load_balancing_strategy",
    "max_concurrent_requests",
    "max_http_attempts",
    "retry_budget_seconds",
    "retry_backoff_ms",
    "retry_backoff_max_ms",
    "latency_ms",
    "replay_grace_seconds",
    "rollouts_max",
    "verifications_max",
    "worker_timeout_seconds",
    "weights",
];

/// Implementations of environment servers that only pass requests on. Whether one is in front of an agent decides no reward.
const PASSES_ON: [&str; 2] = ["legacy_agent", "pool"];

/// The settings of the servers that take part in a collection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::collect) struct RewardSettings {
    /// The block of each server: its kind, its implementation, its settings. Without what decides no reward.
    pub(in crate::collect) servers: BTreeMap<String, Value>,
    /// Servers and settings that are not known here, such as those from the environment of a head server on another machine.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(in crate::collect) untold: BTreeSet<String>,
}

impl RewardSettings {
    /// Returns the settings of the servers with these names, and of all servers that their settings name.
    pub(super) fn of(blocks: &BTreeMap<String, Value>, names: impl IntoIterator<Item = String>) -> Self {
        let mut settings = Self::default();
        let (mut open, mut seen): (Vec<String>, BTreeSet<String>) = (names.into_iter().collect(), BTreeSet::new());
        while let Some(name) = open.pop() {
            if !seen.insert(name.clone()) {
                continue;
            }
            let Some(block) = blocks.get(&name) else {
                settings.untold.insert(name);
                continue;
            };
            references(block, &mut open);
            let passes_on = |kind: &Value| PASSES_ON.iter().any(|implementation| kind.get(implementation).is_some());
            if block.get(ServerKind::Environment.as_str()).is_some_and(passes_on) {
                continue;
            }
            let mut block = block.clone();
            mask(&mut block);
            let kinds = block.as_object_mut().into_iter().flatten();
            for (kind, implementations) in kinds {
                for (implementation, own) in implementations.as_object_mut().into_iter().flatten() {
                    let Some(own) = own.as_object_mut() else { continue };
                    own.retain(|key, value| {
                        let mut path = format!("{name}.{kind}.{implementation}.{key}");
                        !NO_REWARD_KEYS.contains(&key.as_str()) && counts(value, &mut path, &mut settings.untold)
                    });
                }
            }
            settings.servers.insert(name, block);
        }
        settings
    }

    /// Adds the servers that only `newer` has.
    pub(in crate::collect) fn add_servers(&mut self, newer: &Self) {
        for (name, block) in &newer.servers {
            self.servers.entry(name.clone()).or_insert_with(|| block.clone());
        }
    }
}

/// Collects the names of the servers that a value refers to: mappings with a kind of server as `type`, and a `name`.
fn references(value: &Value, names: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            let kind = map.get("type").and_then(Value::as_str);
            if kind.is_some_and(|kind| ServerKind::ALL.into_iter().any(|known| known.as_str() == kind))
                && let Some(name) = map.get("name").and_then(Value::as_str)
            {
                names.push(name.to_owned());
            }
            map.values().for_each(|value| references(value, names));
        }
        Value::Array(items) => items.iter().for_each(|value| references(value, names)),
        _ => {}
    }
}

/// Returns `false` for a value that decides no reward, and removes such values from it: addresses, masked secrets, null and empty values. Texts
/// that are untold are removed as well, and their paths are added.
fn counts(value: &mut Value, path: &mut String, untold: &mut BTreeSet<String>) -> bool {
    let below = path.len();
    match value {
        Value::Null => false,
        Value::Object(map) => {
            map.retain(|key, value| {
                path.push('.');
                path.push_str(key);
                let counts = counts(value, path, untold);
                path.truncate(below);
                counts
            });
            !map.is_empty()
        }
        Value::Array(items) => {
            items.retain_mut(|value| counts(value, path, untold));
            !items.is_empty()
        }
        Value::String(text) if text.is_empty() || text == MASK || is_address(text) => false,
        Value::String(text) if text.contains(UNTOLD) => {
            // An address or a secret may come from the environment too, and is not missed.
            let key = path.rsplit('.').next().unwrap_or_default();
            if !key.ends_with("_url") && !is_secret_key(key) {
                untold.insert(path.clone());
            }
            false
        }
        _ => true,
    }
}

fn is_address(text: &str) -> bool {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    scheme.is_some_and(|scheme| ["http", "https", "ws", "wss", "grpc", "tcp"].contains(&scheme.as_str()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settings(configuration: &Value) -> RewardSettings {
        let blocks = configuration.as_object().unwrap().iter().map(|(name, block)| (name.clone(), block.clone()));
        RewardSettings::of(&blocks.collect(), ["relay".to_owned()])
    }

    fn configuration() -> Value {
        json!({
            "relay": {"environment_servers": {"legacy_agent": {"agent_server": {"type": "responses_api_agents", "name": "math"}}}},
            "math": {"responses_api_agents": {"simple_agent": {
                "max_steps": 5, "host": "127.0.0.1", "port": 7,
                "model_server": {"type": "responses_api_models", "name": "policy"},
                "resources_server": {"type": "resources_servers", "name": "sums"},
            }}},
            "policy": {"responses_api_models": {"openai_model": {
                "openai_base_url": "http://a:1/v1", "openai_api_key": "sk-1", "openai_model": "m", "extra_body": {"seed": 1},
            }}},
            "sums": {"resources_servers": {"sums": {"domain": "math", "tolerance": 0.5, "judge": {
                "urls": ["https://judge"], "model": {"type": "responses_api_models", "name": "elsewhere"},
            }}}},
            "unused": {"responses_api_models": {"openai_model": {"openai_model": "other"}}},
        })
    }

    #[test]
    fn the_settings_are_those_of_the_servers_that_take_part() {
        let RewardSettings { servers, untold } = settings(&configuration());
        assert_eq!(servers.keys().collect::<Vec<_>>(), ["math", "policy", "sums"]);
        assert_eq!(untold.into_iter().collect::<Vec<_>>(), ["elsewhere"]);
        let policy = json!({"openai_model": "m", "extra_body": {"seed": 1}});
        assert_eq!(servers["policy"]["responses_api_models"]["openai_model"], policy);
        let judge = json!({"model": {"type": "responses_api_models", "name": "elsewhere"}});
        assert_eq!(servers["sums"]["resources_servers"]["sums"], json!({"tolerance": 0.5, "judge": judge}));
    }

    #[test]
    fn every_setting_counts_but_those_that_decide_no_reward() {
        let changed = |server: &str, path: &str, value: Value| {
            let mut configuration = configuration();
            *configuration[server].pointer_mut(path).unwrap() = value;
            settings(&configuration) != settings(&self::configuration())
        };
        let added = |server: &str, path: &str, key: &str, value: Value| {
            let mut configuration = configuration();
            configuration[server].pointer_mut(path).unwrap()[key] = value;
            settings(&configuration) != settings(&self::configuration())
        };
        let (math, policy) = ("/responses_api_agents/simple_agent", "/responses_api_models/openai_model");
        for key in NO_REWARD_KEYS {
            assert!(!added("policy", policy, key, json!(3)), "{key}");
        }
        for (key, value) in [
            ("max_steps", json!(6)),
            ("anything", json!("x")),
            ("anything", json!({"deep": [1]})),
            ("entrypoint", json!("b.py")),
        ] {
            assert!(added("math", math, key, value), "{key}");
        }
        assert!(changed("policy", &format!("{policy}/openai_model"), json!("n")));
        assert!(changed("policy", &format!("{policy}/extra_body/seed"), json!(2)));
        for address in [json!("https://b/v1"), json!(["http://b:1/v1", "http://c:1/v1"]), json!([])] {
            assert!(!changed("policy", &format!("{policy}/openai_base_url"), address));
        }
        for secret in [json!("sk-2"), json!(""), Value::Null] {
            assert!(!changed("policy", &format!("{policy}/openai_api_key"), secret));
        }
        assert!(!added("policy", policy, "default_headers", json!({"Authorization": "Bearer x"})));
        // A source of data is no address.
        assert!(added("sums", "/resources_servers/sums", "data", json!("s3://bucket/x")));
    }

    #[test]
    fn what_only_the_environment_of_another_process_knows_is_untold() {
        let yaml = concat!(
            "name: m\nrelay:\n  responses_api_models:\n    openai_model:\n      openai_model: ${name}\n",
            "      extra_body: {seed: \"${oc.env:GYM_TEST_SEED,3}\"}\n      openai_base_url: ${oc.env:GYM_TEST_URL}\n",
            "      other: ${missing}\n"
        );
        let RewardSettings { servers, untold } = settings(&crate::config::parse_resolved(yaml, "head").unwrap());
        let expected = json!({"responses_api_models": {"openai_model": {"openai_model": "m"}}});
        assert_eq!(servers["relay"], expected);
        let block = "relay.responses_api_models.openai_model";
        assert_eq!(
            untold.into_iter().collect::<Vec<_>>(),
            [format!("{block}.extra_body.seed"), format!("{block}.other")]
        );
    }
}
