//! The settings of a collection: options of the command take precedence over the keys that NeMo Gym's collector reads
//! from the configuration.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gym_client::collect::input::PromptTemplate;
use gym_client::collect::input::{MaterializeOptions, Repeats, Routing};
use gym_client::collect::{
    ChangedSettings, CollectOptions, DriverOptions, ExistingOutput, FailFast, TruncatedRollouts, fix_of_unopened,
};
use gym_client::config::reference::{
    COLLECT_IGNORED_KEYS, COLLECT_KEYS, COLLECT_SHARED_KEYS, COLLECT_UNSUPPORTED_KEYS,
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::cli::args::options::{CollectArgs, SettingsChange, Truncated};
use crate::cli::console::otlp;
use crate::cli::exit::Failure;
use crate::cli::setup::configuration::{LoadedConfig, find_file};

/// Minimum similarity at which a name counts as a misspelling.
const SIMILARITY_MIN: f64 = 0.8;

/// Combines options and configuration.
pub(super) fn read(
    args: &CollectArgs,
    loaded: &LoadedConfig,
    overrides: &[String],
    mut warn: impl FnMut(String),
) -> Result<CollectOptions, Failure> {
    let keys = ConfigKeys(&loaded.config.merged);
    if let Some(key) = COLLECT_UNSUPPORTED_KEYS.into_iter().find(|key| keys.asks_for(key)) {
        return Err(Failure::Usage(format!("{key} is not supported yet\n  fix: remove it")));
    }
    warn_of_misspelled_keys(overrides, &mut warn);
    let input = match &args.input {
        Some(input) => input.clone(),
        None => {
            let input: PathBuf = keys.get("input_jsonl_fpath")?.ok_or_else(|| no_input(loaded))?;
            find_file(&input, &loaded.roots)
        }
    };
    let output = args.output.clone().map_or_else(|| keys.get("output_jsonl_fpath"), |output| Ok(Some(output)))?;
    let output = output.ok_or_else(|| missing("output file", "--output FILE", "output_jsonl_fpath"))?;
    if output.file_name().is_none() {
        return Err(Failure::Usage(format!(
            "--output {}: the path has no file name\n  fix: name a file, such as results/rollouts.jsonl",
            output.display()
        )));
    }
    let mut options = CollectOptions::new(&input, output);
    options.existing = existing(args, &keys)?;
    options.changed_settings = match args.changed_settings {
        SettingsChange::Reject => ChangedSettings::Reject,
        SettingsChange::Mark => ChangedSettings::Mark,
    };
    options.aggregate = !(args.disable_aggregation || keys.flag("disable_aggregation")?);
    options.materialize = materialize(args, &keys, loaded, &input)?;
    options.driver = driver(args, &keys)?;
    options.driver.sampled = otlp::endpoint().is_some();
    options.events.clone_from(&args.events);
    options.tensorboard.clone_from(&args.tensorboard);
    Ok(options)
}

fn existing(args: &CollectArgs, keys: &ConfigKeys<'_>) -> Result<ExistingOutput, Failure> {
    let resume = args.resume || keys.flag("resume_from_cache")?;
    match (resume, args.overwrite) {
        (true, true) => Err(Failure::Usage(
            "--overwrite: the configuration has resume_from_cache: true\n  fix: remove --overwrite to resume, or add \
             ++resume_from_cache=false to replace the results"
                .to_owned(),
        )),
        (true, false) => Ok(ExistingOutput::Resume),
        (false, true) => Ok(ExistingOutput::Overwrite),
        (false, false) if args.overwrite_by_default => Ok(ExistingOutput::Overwrite),
        (false, false) => Ok(ExistingOutput::Reject),
    }
}

fn materialize(
    args: &CollectArgs,
    keys: &ConfigKeys<'_>,
    loaded: &LoadedConfig,
    input: &Path,
) -> Result<MaterializeOptions, Failure> {
    let usage = |error: &dyn std::fmt::Display| Failure::Usage(error.to_string());
    let mut options = MaterializeOptions::new(input.display().to_string());
    options.limit = args.limit.map_or_else(|| keys.get("limit"), |limit| Ok(Some(limit)))?;
    options.agent_map = keys.get("agent_map")?.unwrap_or_default();
    options.fan_out = keys.get("fan_out")?.unwrap_or_default();
    options.repeats = match (args.num_repeats, keys.value("num_repeats")) {
        (Some(repeats), _) => Repeats::Each(repeats),
        (None, None) => Repeats::Each(1),
        (None, Some(Value::Object(_))) => {
            Repeats::PerAgent(keys.get::<BTreeMap<String, u32>>("num_repeats")?.unwrap_or_default())
        }
        (None, Some(_)) => Repeats::Each(keys.get("num_repeats")?.unwrap_or(1)),
    };
    options.add_seed = args.add_seed || keys.flag("num_repeats_add_seed")?;
    options.interleave = args.interleave_repeats || keys.flag("interleave_repeats")?;
    options.overrides = keys.get::<Map<String, Value>>("responses_create_params")?.unwrap_or_default();
    let typed = [
        ("temperature", args.temperature.map(Value::from)),
        ("top_p", args.top_p.map(Value::from)),
        ("max_output_tokens", args.max_output_tokens.map(Value::from)),
    ];
    for (key, value) in typed {
        if let Some(value) = value {
            options.overrides.insert(key.to_owned(), value);
        }
    }
    let prompt = args.prompt_config.clone().map_or_else(|| keys.get("prompt_config"), |path| Ok(Some(path)))?;
    if let Some(prompt) = prompt {
        let path = find_file(&prompt, &loaded.roots);
        let name = path.display().to_string();
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let otherwise = "name a YAML file with `user` and `system`, templates of messages, with --prompt-config";
            let fix = fix_of_unopened(&path, &error, otherwise);
            Failure::Usage(format!("cannot read the prompt file {name}: {error}\n  fix: {fix}"))
        })?;
        options.prompt = Some(PromptTemplate::from_yaml(&text, &name).map_err(|error| usage(&error))?);
    }
    options.environment_server_routes = keys.get("environment_server_routes")?.unwrap_or_default();
    options.routing = match keys.get::<String>("environment_routing_mode")?.as_deref() {
        None | Some("agent") => Routing::Agent,
        Some("taskset") => Routing::Taskset,
        Some("legacy") => Routing::Legacy(keys.get("environment_server_name")?.ok_or_else(|| {
            Failure::Usage(
                "environment_routing_mode legacy requires a server\n  fix: add +environment_server_name=NAME"
                    .to_owned(),
            )
        })?),
        Some(other) => {
            return Err(Failure::Usage(format!(
                "environment_routing_mode: unknown mode `{other}`\n  fix: use agent, legacy or taskset"
            )));
        }
    };
    let agent = args.agent.clone().map_or_else(|| keys.get("agent_name"), |agent| Ok(Some(agent)))?;
    match agent {
        Some(agent) => options.with_agent(&agent).map_err(|error| usage(&error)),
        None => Ok(options),
    }
}

fn driver(args: &CollectArgs, keys: &ConfigKeys<'_>) -> Result<DriverOptions, Failure> {
    let mut options = DriverOptions::default();
    let concurrency: Option<u32> =
        args.concurrency.map_or_else(|| keys.get("num_samples_in_parallel"), |concurrency| Ok(Some(concurrency)))?;
    if concurrency == Some(0) {
        return Err(Failure::Usage(
            "num_samples_in_parallel: must be at least 1, got 0\n  fix: use 1 or more, or remove the key".to_owned(),
        ));
    }
    options.concurrency = concurrency.map_or(options.concurrency, |concurrency| concurrency as usize);
    options.attempts_max = args.attempts.unwrap_or(options.attempts_max);
    options.lost_max = args.lost_attempts;
    options.attempt_timeout = args.attempt_timeout;
    options.stop_grace = args.stop_grace;
    options.fail_fast = match args.fail_fast {
        None => FailFast::Alike,
        Some(0) => FailFast::Never,
        Some(failed_max) => FailFast::After(failed_max),
    };
    options.truncated = match args.truncated {
        Truncated::Score => TruncatedRollouts::Score,
        Truncated::Fail => TruncatedRollouts::Fail,
    };
    Ok(options)
}

/// Reads the top level of the merged configuration.
struct ConfigKeys<'a>(&'a Value);

impl ConfigKeys<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, Failure> {
        let Some(value) = self.value(key) else { return Ok(None) };
        T::deserialize(value).map(Some).map_err(|error| {
            Failure::Usage(format!(
                "{key}: {error}\n  fix: correct the value in the configuration, or override it with ++{key}=…"
            ))
        })
    }

    fn flag(&self, key: &str) -> Result<bool, Failure> {
        Ok(self.get(key)?.unwrap_or_default())
    }

    /// Returns `true` if a key is set to anything but `false`, `[]` or `{}`.
    fn asks_for(&self, key: &str) -> bool {
        self.value(key).is_some_and(|value| match value {
            Value::Bool(flag) => *flag,
            Value::Array(items) => !items.is_empty(),
            Value::Object(map) => map.values().any(|value| !value.is_null()),
            _ => true,
        })
    }
}

/// Warns about overrides whose key resembles a known one, because such a key would be ignored silently.
fn warn_of_misspelled_keys(overrides: &[String], warn: &mut impl FnMut(String)) {
    for text in overrides {
        let key = text.trim_start_matches(['"', '\'', '+']).split(['=', '.']).next().unwrap_or_default();
        let read = || COLLECT_KEYS.iter().map(|key| key.name).chain(COLLECT_SHARED_KEYS);
        let known = || read().chain(COLLECT_IGNORED_KEYS).chain(COLLECT_UNSUPPORTED_KEYS);
        if known().any(|name| name == key) {
            continue;
        }
        let score = |name: &&str| strsim::normalized_damerau_levenshtein(key, name);
        let nearest = known().max_by(|a, b| score(a).total_cmp(&score(b)));
        if let Some(name) = nearest.filter(|name| score(name) >= SIMILARITY_MIN) {
            warn(format!("{text}: unknown key {key} is ignored; did you mean {name}?"));
        }
    }
}

fn missing(what: &str, option: &str, key: &str) -> Failure {
    Failure::Usage(format!("missing {what}\n  fix: add {option} (or +{key}=…)"))
}

/// Lists the configuration's data sets, because the user probably wants one of them.
fn no_input(loaded: &LoadedConfig) -> Failure {
    let Failure::Usage(mut text) = missing("input file", "--input FILE", "input_jsonl_fpath") else {
        unreachable!("a missing option is a usage error")
    };
    let datasets = loaded.config.instances.iter().flat_map(|instance| &instance.datasets);
    let files: Vec<&str> = datasets.map(|dataset| dataset.jsonl_fpath.as_str()).collect();
    if !files.is_empty() {
        text.push_str(&format!("; the configuration's data sets are {}", files.join(", ")));
    }
    Failure::Usage(text)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use gym_client::config::{ConfigLoader, Overrides};

    use super::*;
    use crate::cli::args::options::{self, Cli, Command};
    use crate::cli::args::translation;

    fn settings(line: &[&str]) -> Result<(CollectOptions, Vec<String>), Failure> {
        let typed = translation::translate(line.iter().map(std::ffi::OsString::from), &options::valued_options())?;
        let cli = Cli::try_parse_from(&typed.arguments).expect("clap takes the line");
        let Command::Collect(args) = cli.command else { panic!("not a collection") };
        let folder = tempfile::tempdir().expect("a folder");
        let overrides = Overrides::parse(&typed.overrides)?;
        let config = ConfigLoader::new(folder.path()).load(&[] as &[&str], &overrides)?;
        let loaded = LoadedConfig {
            config,
            python: None,
            roots: Vec::new(),
            searched: Vec::new(),
            problems: Vec::new(),
            idle: Vec::new(),
        };
        let mut warnings = Vec::new();
        let options = read(&args, &loaded, &typed.overrides, |warning| warnings.push(warning))?;
        Ok((options, warnings))
    }

    fn refused(line: &[&str]) -> String {
        let line = [&["rgym", "collect", "-i", "i.jsonl", "-o", "o.jsonl"], line].concat();
        match settings(&line) {
            Err(Failure::Usage(text)) => text,
            other => panic!("{line:?}: {other:?}"),
        }
    }

    #[test]
    fn nemo_gyms_keys_and_our_options_ask_for_the_same_collection() {
        let (theirs, warnings) = settings(&[
            "ng_collect_rollouts",
            "+agent_name=math",
            "+input_jsonl_fpath=in.jsonl",
            "+output_jsonl_fpath=out.jsonl",
            "+num_repeats=4",
            "+num_samples_in_parallel=16",
            "+limit=10",
            "+resume_from_cache=true",
            "+num_repeats_add_seed=true",
            "+interleave_repeats=true",
            "+disable_aggregation=true",
            "+responses_create_params.temperature=0.5",
            "+responses_create_params.max_output_tokens=64",
            "+head_server.host=127.0.0.1",
            "+head_server.port=11000",
            "+retain_results_in_memory=false",
        ])
        .unwrap();
        assert_eq!(warnings, [] as [&str; 0]);
        let (ours, _) = settings(&[
            "rgym",
            "collect",
            "--agent",
            "math",
            "--input",
            "in.jsonl",
            "--output",
            "out.jsonl",
            "--num-repeats",
            "4",
            "--concurrency",
            "16",
            "--limit",
            "10",
            "--resume",
            "--add-seed",
            "--interleave-repeats",
            "--disable-aggregation",
            "--temperature",
            "0.5",
            "--max-output-tokens",
            "64",
            "--head-url",
            "http://127.0.0.1:11000",
        ])
        .unwrap();
        assert_eq!(format!("{theirs:?}"), format!("{ours:?}"));
        assert_eq!((ours.driver.concurrency, ours.materialize.limit), (16, Some(10)));
        assert_eq!(ours.materialize.agent_map["_default"], "math");
        assert_eq!(ours.materialize.repeats, Repeats::Each(4));
        assert_eq!(ours.existing, ExistingOutput::Resume);
        assert!(!ours.aggregate && ours.materialize.add_seed && ours.materialize.interleave);
    }

    #[test]
    fn only_nemo_gyms_commands_overwrite_unasked() {
        for (line, expected) in [
            (&["rgym", "collect"][..], ExistingOutput::Reject),
            (&["rgym", "collect", "--overwrite"], ExistingOutput::Overwrite),
            (&["rgym", "collect", "--resume"], ExistingOutput::Resume),
            (&["rgym", "collect", "+resume_from_cache=true"], ExistingOutput::Resume),
            (&["ng_collect_rollouts"], ExistingOutput::Overwrite),
            (&["ng_e2e_collect_rollouts"], ExistingOutput::Overwrite),
            (&["rgym", "eval", "run"], ExistingOutput::Overwrite),
            (&["rgym", "eval", "run", "--resume"], ExistingOutput::Resume),
            (&["ng_collect_rollouts", "+resume_from_cache=true"], ExistingOutput::Resume),
        ] {
            let (options, _) = settings(&[line, &["-i", "i.jsonl", "-o", "o.jsonl"]].concat()).unwrap();
            assert_eq!(options.existing, expected, "{line:?}");
        }
        assert!(refused(&["--overwrite", "+resume_from_cache=true"]).contains("remove --overwrite"));
    }

    #[test]
    fn maps_of_agents_are_read() {
        let (options, _) = settings(&[
            "rgym",
            "collect",
            "-i",
            "i",
            "-o",
            "o",
            "+num_repeats={a: 2, _default: 1}",
            "+agent_map={a: b}",
            "+fan_out={b: [c, d]}",
            "+environment_routing_mode=legacy",
            "+environment_server_name=e",
        ])
        .unwrap();
        let repeats = BTreeMap::from([("_default".to_owned(), 1), ("a".to_owned(), 2)]);
        assert_eq!(options.materialize.repeats, Repeats::PerAgent(repeats));
        assert_eq!(options.materialize.agent_map["a"], "b");
        assert_eq!(options.materialize.fan_out["b"], ["c", "d"]);
        assert_eq!(options.materialize.routing, Routing::Legacy("e".to_owned()));
    }

    #[test]
    fn a_mistake_is_reported_with_its_key_and_fix() {
        for (line, why) in [
            (&["+num_repeats=many"][..], "num_repeats: invalid type"),
            (&["+limit=-1"], "limit: invalid value"),
            (&["+num_samples_in_parallel=0"], "num_samples_in_parallel: must be at least 1"),
            (&["+skills.path=skills"], "skills is not supported yet"),
            (&["+environment_routing_mode=magic"], "use agent, legacy or taskset"),
            (&["+environment_routing_mode=legacy"], "+environment_server_name=NAME"),
            (
                &["--prompt-config", "no-such-prompt.yaml"],
                "No such file or directory (os error 2)\n  fix: name a YAML file with `user` and `system`",
            ),
            (&["--agent", "a", "+agent_map._default=b"], "conflicts with agent_map._default"),
        ] {
            let text = refused(line);
            assert!(text.contains(why), "{line:?}: {text}");
        }
        for (line, fix) in
            [(&["rgym", "collect"][..], "--input FILE"), (&["rgym", "collect", "-i", "i"], "--output FILE")]
        {
            let Err(Failure::Usage(text)) = settings(line) else { panic!("{line:?}") };
            assert!(text.contains(fix), "{text}");
        }
    }

    #[test]
    fn a_key_that_is_nearly_one_of_ours_is_warned_about() {
        let (_, warnings) =
            settings(&["rgym", "collect", "-i", "i", "-o", "o", "+num_repeat=4", "+policy_model_name=m"]).unwrap();
        assert_eq!(warnings, ["+num_repeat=4: unknown key num_repeat is ignored; did you mean num_repeats?"]);
    }
}
