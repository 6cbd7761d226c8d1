//! The page on the files of a collection: the keys that the SDK adds to rows, and the classes of failures.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use gym_client::collect::{CollectOptions, OutputFiles, RolloutCollector};
use gym_core::rollout::FailureClass;
use gym_core::{
    CallContext, CancelToken, Code, Error, ModelResponse, ResourcesServer, Result, SessionId, Verdict, World,
};
use gym_server::{Servers, Stack, StackOptions};
use serde_json::{Value, json};

use crate::page::{Page, code, workspace};

/// A key of an output file.
struct Key {
    name: &'static str,
    /// The JSON types of the value.
    types: &'static str,
    meaning: &'static str,
}

const fn key(name: &'static str, types: &'static str, meaning: &'static str) -> Key {
    Key { name, types, meaning }
}

/// Keys of scored and failed rows, and of the materialized rows.
const IDENTITY: [Key; 10] = [
    key("_ng_task_index", "integer", "The position of the task in the input, from 0."),
    key("_ng_rollout_index", "integer", "The repeat of the task, from 0."),
    key("_ng_attempt_index", "integer", "The number of the attempt, from 0; absent if it is 0."),
    key("_ng_rollout_id", "string", "The identifier of the rollout, as in the input row."),
    key("_ng_environment_server", "string", "The environment server that ran the row."),
    key("_ng_result_type", "string", "The implementation of the environment server."),
    key("agent_ref", "mapping", "The agent: its `name`."),
    key("task_source", "string", "The server that declares the data set of the row, as in the input row."),
    key("skills_ref", "any", "The value of `MaterializeOptions::skills_ref`, if a program sets it."),
    key(
        "_gym_settings",
        "integer",
        "The version of the servers' settings in `OUTPUT_settings.json`, from 1; absent if it is the first one, 0.",
    ),
];

/// Keys that the collector adds to the rows of the input.
const MATERIALIZED: [&str; 2] = ["_ng_task_index", "_ng_rollout_index"];

/// Keys of scored rows.
const SCORED: [Key; 18] = [
    key(
        "responses_create_params",
        "mapping",
        "The request of the episode as the model received it: that of the input row, with the `tools` that an agent of this SDK took from \
         the resources server.",
    ),
    key("response", "mapping", "The last response of the model, with all items of the episode in `output`."),
    key("reward", "number or null", "The reward; `null` if the environment gives none."),
    key("mask_sample", "boolean", "Set by environments: if `true`, the reward does not count."),
    key(
        "_gym_episode",
        "mapping",
        "The course of the episode. Of agents in other languages, only `attempts` and `seconds`.",
    ),
    key("_gym_episode.turns", "integer", "Responses of the model."),
    key("_gym_episode.tool_calls", "integer", "Tool calls of the model."),
    key("_gym_episode.tool_errors", "integer", "Tool calls whose error went to the model."),
    key("_gym_episode.tool_failures", "integer", "Those of `tool_errors` that the model did not cause."),
    key("_gym_episode.outputs_cut", "integer", "Outputs of tools that were cut at their limit."),
    key("_gym_episode.input_tokens", "integer", "Tokens that the model read in all turns; absent if no response told."),
    key(
        "_gym_episode.output_tokens",
        "integer",
        "Tokens that the model wrote in all turns; absent if no response told.",
    ),
    key(
        "_gym_episode.prefix_breaks",
        "integer",
        "Turns whose prompt does not begin with the token ids of prompt and response of the turn before; absent if no two turns have ids.",
    ),
    key(
        "_gym_episode.truncated",
        "string or null",
        "The reason why the episode ended early: `max_steps`, `environment`, or a reason of the model such as `max_output_tokens`. \
         `null` if it ended by itself.",
    ),
    key(
        "_gym_episode.phases",
        "list",
        "The calls of the agent in order, each with `phase` (`seed`, `model`, `tool` or `verify`), `start_us` (microseconds from the start of \
         the episode to the call) and `took_us` (microseconds of the call). Calls after the 64th are added to the last one of their kind. \
         Absent if the agent does not report them. Rows of earlier versions have a text: `seed 0+310, model 402+120034`.",
    ),
    key(
        "_gym_episode.completion_unverified",
        "boolean",
        "`true` if the engine may have aborted a response, and cannot tell: a vLLM over the Responses API that does not count its aborted \
         requests. Absent otherwise.",
    ),
    key("_gym_episode.attempts", "integer", "Attempts of the rollout until it was scored, at least 1."),
    key("_gym_episode.seconds", "number", "Duration of the attempt in seconds."),
];

/// Keys that `vllm_model` adds to the response. The tests of `vllm_model` check them.
const REPORTED: [Key; 7] = [
    key(
        "response._gym_turns",
        "list",
        "One object for each response of the model, in order. A turn without a report is an empty object; absent if no turn has one.",
    ),
    key(
        "response._gym_turns[].finish_reason",
        "string",
        "The engine's word, such as `tool_calls`, `stop` or `length`. `length` is also that of a prompt that did not fit into the context.",
    ),
    key(
        "response._gym_turns[].native_finish_reason",
        "any",
        "The word of the provider behind a gateway. Absent if the engine writes none.",
    ),
    key(
        "response._gym_turns[].weight_version",
        "any",
        "The version of the weights that the engine names. Absent if it names none, or `null`.",
    ),
    key(
        "response._gym_turns[].weight_versions",
        "any",
        "The versions of the tokens of the turn: SGLang's list of `version`, `start` and `end`. Absent if the engine writes none.",
    ),
    key(
        "response._gym_prompt",
        "mapping",
        "Keys that the model server added to the request of the last turn and that shape the prompt, as the engine received them: \
         `chat_template_kwargs`, `chat_template` or `continue_final_message`. Absent if it added none.",
    ),
    key(
        "response._gym_completion_unverified",
        "boolean",
        "`true` if the engine may have aborted the last response; see `_gym_episode.completion_unverified`. Absent otherwise.",
    ),
];

/// Keys of failed rows.
const FAILED: [Key; 27] = [
    key("_ng_failure_class", "string", "The class of the failure; see below."),
    key("_ng_failure_type", "string", "The code of the error, such as `unavailable`."),
    key("_ng_failure_message", "string", "The message of the error, with its causes."),
    key(
        "_ng_failure_execution",
        "string",
        "The state of the request, as far as it is known: `not-started`, `finished` or `unknown`.",
    ),
    key(
        "_ng_failure_http_status",
        "integer or null",
        "The status of the response to `/run`; `null` without a response.",
    ),
    key("_ng_failure_response_body", "string or null", "The body of that response: its first 2,000 bytes."),
    key("_ng_failure_server", "string", "The innermost server whose call failed."),
    key("_ng_failure_route", "string", "The route of that call."),
    key("_ng_failure_causes", "list", "The causes, outermost first."),
    key("_ng_failure_causes[].subject", "string", "The operation that failed, such as `POST math/verify`."),
    key("_ng_failure_causes[].message", "string", "The reason."),
    key(
        "_ng_failure_input",
        "string",
        "The place of the task in the input, such as `tasks.jsonl, line 2`; absent if the rows come from no file.",
    ),
    key("_ng_failure_record", "mapping", "NeMo Gym's `RolloutFailure`."),
    key("_ng_failure_record.schema_version", "integer", "The version of the record: 1."),
    key("_ng_failure_record.episode_id", "mapping", "Identifies the attempt."),
    key(
        "_ng_failure_record.episode_id.rollout_id",
        "string",
        "The identifier of the rollout: `_ng_rollout_id`, or TASK-REPEAT.",
    ),
    key("_ng_failure_record.episode_id.attempt", "integer", "The number of the attempt, from 0."),
    key("_ng_failure_record.run_id", "string", "Identifies the run of the collector."),
    key(
        "_ng_failure_record.source",
        "string",
        "`environment` if the environment server responded with the failure, otherwise `collector`.",
    ),
    key("_ng_failure_record.delivery", "string", "`delivered`, `possibly_delivered` or `not_sent`."),
    key("_ng_failure_record.failure", "mapping", "The failure in NeMo Gym's terms."),
    key("_ng_failure_record.failure.failure_reason", "string", "The message: its first 2,000 characters."),
    key(
        "_ng_failure_record.failure.terminal",
        "boolean",
        "`true` if the environment has requested no further attempt.",
    ),
    key(
        "_ng_failure_record.failure.failure_kind",
        "string",
        "NeMo Gym's name of the class; a class of this SDK begins with `gym:`.",
    ),
    key(
        "_ng_failure_record.failure.stage",
        "string",
        "`agent` or `verification`; absent if the class does not tell the stage.",
    ),
    key("_ng_failure_record.http_status", "integer or null", "As `_ng_failure_http_status`."),
    key("_ng_failure_record.exception_type", "string or null", "As `_ng_failure_type`."),
];

/// Keys by which the response of an environment to `/run` decides the outcome of the attempt.
const DIRECTIVES: [Key; 3] = [
    key(
        "_ng_failure_class",
        "string",
        "The attempt failed with this class. An unknown class counts as `agent_run_error`.",
    ),
    key(
        "_ng_failure_terminal",
        "boolean",
        "With `_ng_failure_class`: no further attempt is made, also not by `--resume`.",
    ),
    key("_ng_no_persist", "boolean", "The attempt leaves no row; a resumed run tries again."),
];

/// Keys of each entry of the statistics.
const AGGREGATE: [Key; 8] = [
    key(
        "agent_ref",
        "mapping",
        "The agent, or the environment server if several servers have the same agent: its `name`.",
    ),
    key("_ng_environment_server", "string", "The environment server."),
    key("agent_metrics", "mapping", "Mean, deviation and others of each number in the rows."),
    key("key_metrics", "mapping", "The most important of these numbers."),
    key(
        "group_level_metrics",
        "list",
        "The numbers of each task. The collector corrects `expected_num_rollouts`, `missing_num_rollouts` and \
         `reward_profile_completion_pct` of tasks with missing rollouts. A task without a recorded rollout is in `_gym_coverage` alone.",
    ),
    key("repeat_level_metrics", "list", "The numbers of each repeat."),
    key("perf_summary", "any", "Statistics of an environment in Python that reports them."),
    key(
        "_gym_coverage",
        "mapping",
        "The collector's own count, from the materialized rows: `expected`, `recorded` and `missing` rollouts; `tasks`, `tasks_incomplete` \
         and `tasks_without_rollout`; and `incomplete_tasks`, each with `task_index`, `expected`, `recorded` and `missing`.",
    ),
];

/// Keys that the collection of this test does not write, and the reason.
const UNSEEN: [(&str, &str); 6] = [
    ("_gym_episode.completion_unverified", "only an episode with a vLLM over the Responses API has it"),
    ("_gym_episode.prefix_breaks", "only an episode with token ids has it"),
    ("_gym_settings", "only a collection with changed settings has it"),
    ("mask_sample", "only an environment sets it"),
    ("perf_summary", "only an environment in Python reports it"),
    ("skills_ref", "only a program sets it"),
];

/// Scores, fails or loses an episode, as its row says.
#[derive(Default)]
struct Moody {
    has_lost: AtomicBool,
}

#[derive(serde::Deserialize)]
struct Task {
    mood: String,
}

impl ResourcesServer for Moody {
    type Task = Task;

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, _: &ModelResponse) -> Result<Verdict> {
        match task.mood.as_str() {
            "good" => Ok(Verdict::correct(true)),
            // A new attempt begins a new session.
            "lost" if !self.has_lost.swap(true, Ordering::Relaxed) => {
                Err(Error::finished(Code::FailedPrecondition, "no such session"))
            }
            "lost" => Ok(Verdict::correct(false)),
            _ => Err(Error::internal("the verifier is in a bad mood")),
        }
    }
}

const CONFIG: &str = "\
policy: {responses_api_models: {scripted_model: {entrypoint: app.py}}}
moody: {resources_servers: {moody: {entrypoint: app.py, domain: other}}}
moody_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: moody}
      model_server: {type: responses_api_models, name: policy}
moody_environment: {environment_servers: {legacy_agent: {entrypoint: app.py, agent_server: {type: responses_api_agents, name: moody_agent}}}}
";

/// Collects rows that are scored, fail and are tried again, and returns the files.
async fn collected(folder: &Path) -> OutputFiles {
    let (config, input) = (folder.join("moody.yaml"), folder.join("tasks.jsonl"));
    std::fs::write(&config, CONFIG).unwrap();
    let rows = ["good", "good", "lost", "bad"].map(|mood| {
        json!({"responses_create_params": {"input": "?"}, "mood": mood, "agent_ref": {"name": "moody_agent"},
            "task_source": "moody_agent", "_ng_rollout_id": format!("moody-{mood}")})
        .to_string()
    });
    std::fs::write(&input, rows.join("\n")).unwrap();
    let stack = Stack::builder()
        .config_file(&config)
        .servers(Servers::stock().resources("moody", |_| Ok(Moody::default())))
        .set("+head_server.port=0")
        .options(StackOptions::default())
        .start()
        .await
        .unwrap();
    let collector = RolloutCollector::new(stack.client().clone(), stack.names().clone(), World::real());
    let options = CollectOptions::new(input, folder.join("rollouts.jsonl"));
    let summary = collector.collect(options, CancelToken::new()).await.unwrap();
    stack.stop().await;
    summary.files
}

/// Adds the keys of a value to `found`, with the types of their values. Goes into the mappings and lists that the SDK writes.
fn walk(value: &Value, prefix: &str, found: &mut BTreeMap<String, BTreeSet<&'static str>>) {
    for (name, value) in value.as_object().into_iter().flatten() {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "list",
            Value::Object(_) => "mapping",
        };
        found.entry(path.clone()).or_default().insert(kind);
        if ["_gym_episode", "_ng_failure_record"].iter().any(|own| path.starts_with(own)) {
            walk(value, &path, found);
        }
        if path == "_ng_failure_causes" {
            value.as_array().into_iter().flatten().for_each(|cause| walk(cause, &format!("{path}[]"), found));
        }
    }
}

/// Checks that the keys in the values are those of the table, with their types.
#[track_caller]
fn compare(file: &str, values: &[Value], table: &[&Key], of_user: &[&str]) {
    let mut found = BTreeMap::new();
    values.iter().for_each(|value| walk(value, "", &mut found));
    for (name, kinds) in found.iter().filter(|(name, _)| !of_user.contains(&name.as_str())) {
        let key = table.iter().find(|key| key.name == name).unwrap_or_else(|| panic!("{file}: {name} is in no table"));
        for kind in kinds {
            let fits = key.types.split(" or ").any(|word| word == *kind || (word == "number" && *kind == "integer"));
            assert!(fits || key.types == "any", "{file}: {name} is {kind}, in the table {}", key.types);
        }
    }
    for key in table {
        let unseen = UNSEEN.iter().any(|(name, _)| *name == key.name);
        assert_ne!(found.contains_key(key.name), unseen, "{file}: {} is in the table; is it in the file?", key.name);
    }
}

fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the classes of failures with the comments of their declaration.
fn classes() -> Vec<[String; 3]> {
    let source = std::fs::read_to_string(workspace().join("gym-core/src/base/failure.rs")).unwrap();
    let body = source.split_once("pub enum FailureClass {").unwrap().1.split_once("\n}").unwrap().0;
    let (mut meanings, mut meaning) = (BTreeMap::new(), Vec::new());
    for line in body.lines().map(str::trim) {
        match line.strip_prefix("/// ") {
            Some(text) => meaning.push(text),
            None => drop(meanings.insert(line.trim_end_matches(','), std::mem::take(&mut meaning).join(" "))),
        }
    }
    FailureClass::ALL
        .map(|class| {
            let again = if class.is_transient() { "at once" } else { "with `--resume`" };
            [code(class.as_str()), again.to_owned(), meanings[format!("{class:?}").as_str()].clone()]
        })
        .to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_on_rows_is_the_generated_one() {
    let folder = tempfile::tempdir().unwrap();
    let files = collected(folder.path()).await;
    let scored: Vec<&Key> = SCORED.iter().collect();
    let identity: Vec<&Key> = IDENTITY.iter().collect();
    let (rollouts, failures) = (lines(&files.rollouts), lines(&files.failures));
    assert_eq!((rollouts.len(), failures.is_empty()), (3, false));
    compare("rollouts", &rollouts, &[identity.clone(), scored.clone()].concat(), &["mood"]);
    let failed: Vec<&Key> = IDENTITY.iter().filter(|key| key.name != "_ng_attempt_index").chain(&FAILED).collect();
    compare("failures", &failures, &failed, &[]);
    let of_input = ["responses_create_params", "mood", "agent_ref", "task_source", "_ng_rollout_id"];
    let added: Vec<&Key> = IDENTITY.iter().filter(|key| MATERIALIZED.contains(&key.name)).collect();
    compare("materialized inputs", &lines(&files.materialized), &added, &of_input);
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&files.aggregate).unwrap()).unwrap();
    compare("statistics", report.as_array().unwrap(), &AGGREGATE.iter().collect::<Vec<_>>(), &[]);

    let mut page = Page::new(
        "rows.md",
        "Files of a collection",
        "The keys that the SDK writes. All other keys of a row are those of its task and of its environment, unchanged. The names that \
         begin with `_ng_` are NeMo Gym's.",
    );
    let row = |key: &Key| [code(key.name), key.types.to_owned(), key.meaning.to_owned()];
    let head = ["key", "type", "meaning"];
    page.section("Every row", "The rows of `OUTPUT.jsonl` and `OUTPUT_failures.jsonl`.");
    page.table(head, IDENTITY.iter().map(row));
    let added = MATERIALIZED.map(code).join(" and ");
    page.section(
        "Materialized rows",
        &format!(
            "`OUTPUT_materialized_inputs.jsonl` has the rows as they are sent: those of the input, with {added}. `agent_ref` and \
             `responses_create_params` are changed as the options of the collection say. New rows, and statistics, are written to files whose \
             names end in `.PID.partial`, which are renamed; one that a killed collection left can be removed."
        ),
    );
    page.section("Scored rows", "`OUTPUT.jsonl` has one row for each rollout that was scored.");
    page.table(head, scored.into_iter().map(row));
    page.section(
        "Turns of `vllm_model`",
        "Keys of the response. Values keep the engine's text, of whatever type they are.\n\n\
         - Training reads the entries of `_gym_turns` in order. With `return_token_id_information`, an entry belongs to the item of `output` \
         that has `generation_token_ids`, the first entry to the first such item. The weights changed within the episode if two entries \
         have different versions.\n\
         - The version is read from the first of these that is not `null`: `weight_version` of the choice, or of the completion; then that of \
         `metadata` (SGLang), `sglext` or `meta_info` in either. vLLM's chat completions have none. Before the first update, SGLang writes `default`. \
         With `is_responses_native`, the same keys of the response are read, and there is no finish reason.\n\
         - The prompt of a turn is `instructions`, `input` and `tools` of `responses_create_params`, and the items of `output` before the turn, \
         rendered with `_gym_prompt`. `vllm_model` sends tools without `strict`, unless `keep_strict_tools` is set. `prompt_token_ids` are the ids that the engine has read.\n\
         - An agent in Python keeps these keys of the last turn only. NeMo Gym's types drop unknown keys of items, and keep those of the response.",
    );
    page.table(head, REPORTED.iter().map(row));
    page.section("Failed attempts", "`OUTPUT_failures.jsonl` has one row for each attempt that failed.");
    page.table(head, FAILED.iter().map(row));
    page.section(
        "Classes of failures",
        "The values of `_ng_failure_class`. The collector tries a rollout again at once, up to `--attempts`, or a resumed run does.",
    );
    page.table(["class", "tried again", "meaning"], classes());
    page.section(
        "Directives of environments",
        "Keys of the response to `/run` by which an environment decides on its attempt.",
    );
    page.table(head, DIRECTIVES.iter().map(row));
    page.section(
        "Statistics",
        "`OUTPUT_aggregate_metrics.json` is a list with an entry for each environment server. The number of rollouts has no limit for \
         servers of this SDK. Agents with statistics of their own, and servers in other languages, receive all rollouts in one request of at \
         most 1 GiB.",
    );
    page.table(head, AGGREGATE.iter().map(row));
    page.section(
        "Settings",
        "`OUTPUT_settings.json` has the settings of the models, resources servers, agents and environment servers that made the rewards, also \
         those of a remote head server: `versions`, a list with `servers` by name, and `untold`, what the head server does not tell. Addresses, \
         secrets, texts for people, and how fast and how often a server calls are left out. `--resume` compares them, and rejects a difference \
         with what changed; `--changed-settings mark` adds a version and marks the new rows with its number. Results without the file resume with \
         one warning, and `rollouts_before` counts them.",
    );
    page.finish();
}

#[test]
fn the_collector_reads_the_directives() {
    let source = std::fs::read_to_string(workspace().join("gym-client/src/collect/run/outcome.rs")).unwrap();
    for key in &DIRECTIVES {
        assert!(source.contains(&format!("rename = \"{}\"", key.name)), "{}", key.name);
    }
}
