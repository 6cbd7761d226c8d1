//! The keys of a configuration that do not belong to one implementation: their types, defaults and meanings.
//!
//! The checks of a configuration, its JSON schema and the pages in `docs/reference` read these tables, so that they agree. The keys
//! of an implementation are the fields of its settings type.

use gym_core::server::ServerKind;
use serde_json::{Value, json};

/// One key, and what it means.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ConfigKey {
    /// The name.
    pub name: &'static str,
    /// The type of the value.
    pub value: KeyType,
    /// The default as YAML. Empty if the key has none, or if its meaning explains it.
    pub default: &'static str,
    /// The effect of the key, in one or two sentences. Empty if this SDK ignores the key.
    pub meaning: &'static str,
}

/// The type of a value.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum KeyType {
    /// Any value.
    Any,
    /// A string.
    Text,
    /// A boolean.
    Flag,
    /// A number.
    Number,
    /// An integer in this range.
    Integer(u64, u64),
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// A string or a list of strings.
    Texts,
    /// A list of strings.
    TextList,
    /// A list of integers.
    Integers,
    /// A mapping with any keys.
    Map,
    /// A mapping from names to strings.
    TextMap,
    /// A mapping from names to lists of strings.
    TextsMap,
    /// A positive integer, or a mapping from names to positive integers.
    Counts,
    /// The `host` and `port` of a server.
    Address,
    /// `auto`, or names of transports: a list, or a string with commas.
    Transports,
    /// The name of a transport.
    Transport,
    /// A list of data sets, whose keys are [`DATASET_KEYS`].
    Datasets,
}

impl KeyType {
    /// Returns the JSON schema of the type in a program with these transports.
    #[must_use]
    pub fn schema(self, transports: &[&str]) -> Value {
        let positive = json!({"type": "integer", "minimum": 1});
        match self {
            Self::Any => json!({}),
            Self::Text => json!({"type": "string"}),
            Self::Flag => json!({"type": "boolean"}),
            Self::Number => json!({"type": "number"}),
            Self::Integer(least, u64::MAX) => json!({"type": "integer", "minimum": least}),
            Self::Integer(least, most) => json!({"type": "integer", "minimum": least, "maximum": most}),
            Self::Choice(names) => json!({"enum": names}),
            Self::Texts => json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
            Self::TextList => json!({"type": "array", "items": {"type": "string"}}),
            Self::Integers => json!({"type": "array", "items": {"type": "integer"}}),
            Self::Map => json!({"type": "object"}),
            Self::TextMap => json!({"type": "object", "additionalProperties": {"type": "string"}}),
            Self::TextsMap => {
                json!({"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}})
            }
            Self::Counts => json!({"anyOf": [positive, {"type": "object", "additionalProperties": positive}]}),
            Self::Address => json!({"type": "object", "properties": {
                "host": {"description": "Host name or address. By default that of `default_host`.", "type": "string"},
                "port": {"description": "TCP port.", "type": "integer", "minimum": 0, "maximum": 65_535, "default": 11_000},
            }, "additionalProperties": true}),
            Self::Transports => {
                let one = format!("({})", transports.join("|"));
                let text = format!("^ *(auto|{one}( *, *{one})*) *$");
                json!({"anyOf": [
                    {"type": "string", "pattern": text},
                    {"type": "array", "items": {"enum": transports}, "minItems": 1},
                ]})
            }
            Self::Transport => json!({"enum": transports}),
            Self::Datasets => {
                let keys = DATASET_KEYS.iter().map(|key| (key.name.to_owned(), key.schema(transports)));
                let keys: serde_json::Map<String, Value> = keys.collect();
                let items = json!({"type": "object", "properties": keys, "additionalProperties": true,
                    "required": ["name", "type", "jsonl_fpath"]});
                json!({"type": "array", "items": items})
            }
        }
    }
}

impl ConfigKey {
    /// Returns the JSON schema of the key's value in a program with these transports. `null` is accepted as well, and means that
    /// the key is absent.
    #[must_use]
    pub fn schema(&self, transports: &[&str]) -> Value {
        let mut schema = match self.value.schema(transports) {
            Value::Object(any) if any.is_empty() => json!({}),
            value => json!({"anyOf": [value, {"type": "null"}]}),
        };
        schema["description"] = Value::from(if self.is_ignored() { IGNORED } else { self.meaning });
        if !self.default.is_empty() {
            schema["default"] = serde_json::from_str(self.default).unwrap_or_else(|_| Value::from(self.default));
        }
        schema
    }

    /// Returns `true` if only NeMo Gym's own servers read the key.
    #[must_use]
    pub fn is_ignored(&self) -> bool {
        self.meaning.is_empty()
    }
}

/// The description of a key that only NeMo Gym reads.
pub const IGNORED: &str = "Read by NeMo Gym's Python servers only. This SDK passes it on to them.";

const fn key(name: &'static str, value: KeyType, default: &'static str, meaning: &'static str) -> ConfigKey {
    ConfigKey { name, value, default, meaning }
}

const fn nemo(name: &'static str) -> ConfigKey {
    key(name, KeyType::Any, "", "")
}

const PORT: KeyType = KeyType::Integer(0, 65_535);

/// The top-level keys that are neither servers nor variables.
pub const TOP_LEVEL_KEYS: [ConfigKey; 46] = [
    key(
        "config_paths",
        KeyType::TextList,
        "[]",
        "Further configuration files. In a file, they are read before the file itself, which overrides them. Relative paths are \
         searched in the directories of `--search-dir` and `NEMO_GYM_EXTRA_ROOTS`, then in the working directory.",
    ),
    nemo("entrypoint"),
    key("default_host", KeyType::Text, "127.0.0.1", "The host of all servers that set none."),
    key(
        "head_server",
        KeyType::Address,
        "",
        "The address of the head server. By default port 11000 on `default_host`.",
    ),
    key(
        "disallowed_ports",
        KeyType::Integers,
        "",
        "Ports in use. The loader replaces the value by the ports of the head server and of all servers.",
    ),
    nemo("head_server_deps"),
    key(
        "python_version",
        KeyType::Any,
        "",
        "The Python version that NeMo Gym's servers request. By default that of the interpreter of `--python`.",
    ),
    nemo("pip_install_verbose"),
    key(
        "use_absolute_ip",
        KeyType::Flag,
        "false",
        "Uses the IPv4 address of this machine's host name as `default_host`.",
    ),
    nemo("uv_pip_set_python"),
    nemo("skip_venv_if_present"),
    nemo("hf_token"),
    key(
        "ray_head_node_address",
        KeyType::Text,
        "",
        "The Ray cluster on which worker groups run: `ray://HOST:10001`, `HOST:6379`, `http://HOST:8265`, `auto`, or `local` for a head of this \
         machine, which `rgym run` starts and ends. By default none: nothing of Ray is contacted. `RAY_ADDRESS` sets it too, with the lowest precedence.",
    ),
    key("ray_dashboard_address", KeyType::Text, "", "The URL of Ray's dashboard, if it is not `http://HOST:8265`."),
    key("port_range_low", PORT, "10001", "The first port from which the ports of servers are chosen."),
    key("port_range_high", PORT, "20000", "The last port from which the ports of servers are chosen."),
    nemo("dry_run"),
    nemo("server_spinup_timeout_seconds"),
    nemo("model_endpoint_readiness_timeout_seconds"),
    nemo("allow_openai_version_skew"),
    nemo("uv_cache_dir"),
    nemo("uv_lock_timeout_seconds"),
    nemo("uv_venv_dir"),
    key(
        "results_dir",
        KeyType::Text,
        "results",
        "A directory of NeMo Gym's servers; passed on to them as an absolute path.",
    ),
    key(
        "cache_dir",
        KeyType::Text,
        "cache",
        "A directory of NeMo Gym's servers; passed on to them as an absolute path.",
    ),
    key(
        "_inherit_from",
        KeyType::Text,
        "",
        "The dotted path of a mapping that is moved here. The keys beside it override its keys.",
    ),
    key(
        "_copy",
        KeyType::Text,
        "",
        "The dotted path of a mapping that is copied here. The keys beside it override its keys.",
    ),
    nemo("nemo_gym_log_dir"),
    nemo("verbose"),
    nemo("json"),
    nemo("query"),
    nemo("observability_enabled"),
    nemo("model_call_capture_dir"),
    nemo("token_id_capture"),
    nemo("component_name"),
    key(
        "skip_verification",
        KeyType::Flag,
        "",
        "The value of `skip_verification` for all agents that do not set it in their block.",
    ),
    key(
        "skip_verification_reward",
        KeyType::Number,
        "",
        "The value of `skip_verification_reward` for all agents that do not set it in their block.",
    ),
    nemo("telemetry"),
    key(
        "allow_unsupported_pairing",
        KeyType::Flag,
        "false",
        "Ignores `allowed_agents` and `allowed_model_types` of resources servers.",
    ),
    key(
        "environment_server_name",
        KeyType::Text,
        "",
        "The environment server of all rows without `task_id.taskset` and `task_input`. Required if `environment_routing_mode` is \
         `legacy`.",
    ),
    key(
        "environment_server_routes",
        KeyType::TextMap,
        "{}",
        "The environment server of each taskset, for rows with `task_id.taskset` and `task_input`.",
    ),
    key(
        "environment_routing_mode",
        KeyType::Choice(&["agent", "legacy", "taskset"]),
        "agent",
        "Selects the environment server of rows without `task_id.taskset` and `task_input`: the server in front of the row's agent, \
         `environment_server_name`, or none (such a row is an error).",
    ),
    key(
        "error_on_agent_without_environment_server",
        KeyType::Flag,
        "false",
        "Reports an error for an agent that no environment server names, instead of generating a `legacy_agent` for it.",
    ),
    key(
        "error_on_almost_servers",
        KeyType::Flag,
        "true",
        "Reports an invalid server as an error. If `false`, it is reported as a warning and not started.",
    ),
    key(
        "transport",
        KeyType::Transports,
        "",
        "The transports between servers: `auto`, or one or more names. By default all but those of UCX.",
    ),
    key(
        "require_transport",
        KeyType::Transport,
        "",
        "The minimum transport. Connecting fails instead of falling back below it. By default there is no minimum.",
    ),
];

/// The top-level keys that `rgym collect` reads. An option of the command takes precedence over its key.
pub const COLLECT_KEYS: [ConfigKey; 14] = [
    key("agent_name", KeyType::Text, "", "The agent of all rows (`--agent`). By default, each row names its agent."),
    key("input_jsonl_fpath", KeyType::Text, "", "The file of the tasks, one JSON object per line (`--input`)."),
    key("output_jsonl_fpath", KeyType::Text, "", "The file for the rollouts (`--output`)."),
    key(
        "num_repeats",
        KeyType::Counts,
        "1",
        "Rollouts per row (`--num-repeats`): a number, or a number for each agent, with `_default` for all others.",
    ),
    key("num_repeats_add_seed", KeyType::Flag, "false", "Sets the seed of each repeat to its index (`--add-seed`)."),
    key(
        "interleave_repeats",
        KeyType::Flag,
        "false",
        "Dispatches the repeats in rounds instead of row by row (`--interleave-repeats`).",
    ),
    key(
        "num_samples_in_parallel",
        KeyType::Integer(1, 4_294_967_295),
        "1024",
        "Maximum number of rollouts in flight (`--concurrency`).",
    ),
    key(
        "limit",
        KeyType::Integer(0, u64::MAX),
        "",
        "Maximum number of input rows (`--limit`). By default, and with 0, all rows.",
    ),
    key(
        "resume_from_cache",
        KeyType::Flag,
        "false",
        "Continues from the files of the output (`--resume`). Otherwise, existing files are an error.",
    ),
    key(
        "prompt_config",
        KeyType::Text,
        "",
        "The file of a prompt template that creates the input of each row (`--prompt-config`).",
    ),
    key(
        "responses_create_params",
        KeyType::Map,
        "{}",
        "Fields that replace those of each row's `responses_create_params`, such as `temperature` (`--temperature`).",
    ),
    key(
        "agent_map",
        KeyType::TextMap,
        "{}",
        "Replacement agents, by the row's agent or task source; `_default` applies to all other rows.",
    ),
    key("fan_out", KeyType::TextsMap, "{}", "Agents that each run the rows of an agent or task source once."),
    key(
        "disable_aggregation",
        KeyType::Flag,
        "false",
        "Skips the statistics of the servers at the end (`--disable-aggregation`).",
    ),
];

/// The top-level keys that `rgym collect` has in common with [`TOP_LEVEL_KEYS`].
pub const COLLECT_SHARED_KEYS: [&str; 3] =
    ["environment_routing_mode", "environment_server_name", "environment_server_routes"];

/// NeMo Gym's keys that request this collector's default behavior, or that do not affect its files.
pub const COLLECT_IGNORED_KEYS: [&str; 8] = [
    "max_resident_rollout_tasks",
    "retain_results_in_memory",
    "route_failures_to_sidecar",
    "require_complete",
    "disable_health_check",
    "health_check_workers",
    "health_check_ignored_checks",
    "head_server",
];

/// NeMo Gym's keys that would change the collected rollouts and that this collector does not support yet.
pub const COLLECT_UNSUPPORTED_KEYS: [&str; 10] = [
    "skills",
    "rollout_collection_driver",
    "count_failure_classes_as_zero",
    "count_missing_rollouts_as_zero",
    "dispatch_budget_s",
    "drain_margin_s",
    "dispatch_longest_first",
    "retry_terminal_timeouts",
    "retry_invalid_judge_responses",
    "upload_rollouts",
];

/// Keys of each block that the configuration itself reads, or that describe the server to people.
pub const BLOCK_KEYS: [ConfigKey; 11] = [
    key(
        "entrypoint",
        KeyType::Text,
        "",
        "The Python file of the server, in the directory KIND/IMPLEMENTATION. Every server needs this key, but the file of a native \
         implementation is not started.",
    ),
    key("host", KeyType::Text, "", "The host on which the server listens. By default that of `default_host`."),
    key(
        "port",
        PORT,
        "",
        "The TCP port on which the server listens. By default, and with 0, a free port from `port_range_low` to `port_range_high`.",
    ),
    key(
        "num_workers",
        KeyType::Integer(1, 4_096),
        "",
        "The worker processes of a Python server. A native server is one process that serves all requests.",
    ),
    key("domain", KeyType::Choice(&DOMAINS), "", "The domain of a resources server, which requires this key."),
    key("datasets", KeyType::Datasets, "[]", "The data sets of the server."),
    key("name", KeyType::Any, "", "A text for people, which has no effect."),
    key("description", KeyType::Any, "", "A text for people, which has no effect."),
    key("value", KeyType::Any, "", "A text for people, which has no effect."),
    key("verified", KeyType::Any, "", "A note for people, which has no effect."),
    key("verified_url", KeyType::Any, "", "A note for people, which has no effect."),
];

/// The keys of a data set, in `datasets` of a server.
pub const DATASET_KEYS: [ConfigKey; 9] = [
    key("name", KeyType::Text, "", "The name of the data set. Required."),
    key("type", KeyType::Choice(&DATASET_TYPES), "", "The purpose of the data set. Required."),
    key("jsonl_fpath", KeyType::Text, "", "The file of the rows, one JSON object per line. Required."),
    key("num_repeats", KeyType::Integer(1, 4_294_967_295), "1", "Rollouts per row."),
    key("agent", KeyType::Text, "", "The agent that runs the rows."),
    key("taskset", KeyType::Text, "", "The task set that selects the environment server of the rows."),
    key("prompt_config", KeyType::Text, "", "The file of a prompt template."),
    key("prepare_script", KeyType::Text, "", "The preparation script. Required by the type `benchmark`."),
    key("license", KeyType::Choice(&LICENSES), "", "The license. Required by the types `train` and `validation`."),
];

pub(crate) const DOMAINS: [&str; 12] = [
    "math",
    "coding",
    "agent",
    "knowledge",
    "instruction_following",
    "long_context",
    "safety",
    "games",
    "translation",
    "e2e",
    "rlhf",
    "other",
];

pub(crate) const LICENSES: [&str; 10] = [
    "Apache 2.0",
    "MIT",
    "Creative Commons Attribution 4.0 International",
    "Creative Commons Attribution-ShareAlike 4.0 International",
    "CC BY-SA 4.0",
    "CC BY-NC 3.0",
    "NVIDIA Internal Use Only, Do Not Distribute",
    "NVIDIA Evaluation Dataset License Agreement",
    "TBD",
    "GNU General Public License v3.0",
];

pub(crate) const DATASET_TYPES: [&str; 4] = ["train", "validation", "example", "benchmark"];

/// Returns the keys by which the configuration composes servers of a kind, whether or not the implementation reads them.
#[must_use]
pub fn composition_keys(kind: ServerKind) -> &'static [ConfigKey] {
    const RESOURCES_SERVER: ConfigKey =
        key("resources_server", KeyType::Map, "", "The resources server: `{type: resources_servers, name: NAME}`.");
    const MODEL_SERVER: ConfigKey =
        key("model_server", KeyType::Map, "", "The model server: `{type: responses_api_models, name: NAME}`.");
    const AGENT_SERVER: ConfigKey =
        key("agent_server", KeyType::Map, "", "The agent: `{type: responses_api_agents, name: NAME}`.");
    const ALLOWED: [ConfigKey; 2] = [
        key(
            "allowed_agents",
            KeyType::Texts,
            "",
            "The implementations of agents that may use this server. By default, all may.",
        ),
        key(
            "allowed_model_types",
            KeyType::Texts,
            "",
            "The implementations of model servers that its agents may use. By default, all.",
        ),
    ];
    match kind {
        ServerKind::Agent => const { &[RESOURCES_SERVER, MODEL_SERVER] },
        ServerKind::Environment => const { &[AGENT_SERVER, RESOURCES_SERVER] },
        ServerKind::Resources => const { &ALLOWED },
        ServerKind::Model => &[],
    }
}

/// Returns the keys of all servers of a kind in NeMo Gym 0.7.0. Native implementations that do not read them ignore them with a
/// warning.
#[must_use]
pub fn nemo_keys_of_kind(kind: ServerKind) -> &'static [&'static str] {
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

/// Returns the keys of single servers in NeMo Gym 0.7.0 which the SDK's servers of the same name do not read and can do without.
#[must_use]
pub fn nemo_keys_of_implementation(implementation: &str) -> &'static [&'static str] {
    match implementation {
        "simple_agent" => &["execute_tools"],
        "vllm_model" => &["render_chat_template", "tokenizer"],
        _ => &[],
    }
}

/// Keys of `vllm_model` which NeMo Gym reads only with `endpoint_file`, and which its own file sets without it.
pub const ENDPOINT_FILE_KEYS: [&str; 3] =
    ["endpoint_stale_grace_s", "endpoint_connection_retries", "endpoint_check_interval_s"];

/// Returns the keys of single servers in NeMo Gym 0.7.0 without which rollouts would differ. A value other than `false`, `null`, or
/// an empty list or mapping is an error.
#[must_use]
pub fn unsupported_keys(implementation: &str) -> &'static [&'static str] {
    match implementation {
        "vllm_model" => &["use_completions_api", "supply_prefix_token_ids", "endpoint_file", "audio_root"],
        _ => &[],
    }
}
