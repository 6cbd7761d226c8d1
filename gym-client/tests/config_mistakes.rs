//! Mistakes of a user, and that each message names the place and the fix.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

use std::path::Path;

use gym_client::config::{ConfigError, ConfigLoader, GymConfig, Mistake, Overrides, ServerKind};
use serde::Deserialize;

const MODEL: &str = "\
policy_model:
  responses_api_models:
    openai_model:
      entrypoint: app.py
      openai_api_key: sk-very-secret
";

const AGENT: &str = "\
my_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      model_server: {type: responses_api_models, name: policy_model}
";

struct Case {
    folder: tempfile::TempDir,
    args: Vec<String>,
}

impl Case {
    fn files(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let names: Vec<&str> = files.iter().map(|(name, _)| *name).filter(|name| *name != "env.yaml").collect();
        Self { folder, args: vec![format!("+config_paths=[{}]", names.join(","))] }
    }

    fn main(text: &str) -> Self {
        Self::files(&[("main.yaml", text)])
    }

    fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.to_owned());
        self
    }

    fn load(&self) -> Result<GymConfig, ConfigError> {
        let overrides = Overrides::parse(&self.args)?;
        let mut loader = ConfigLoader::new(self.folder.path()).environment(|_| None);
        loader.load(&[] as &[&str], &overrides)
    }

    /// The message, without the temporary folder.
    fn message(&self) -> String {
        let error = self.load().expect_err("the configuration is refused");
        let folder = format!("{}/", self.folder.path().display());
        error.to_string().replace(&folder, "")
    }

    #[track_caller]
    fn says(&self, parts: &[&str]) {
        let message = self.message();
        for part in parts {
            assert!(message.contains(part), "'{part}' is not in:\n{message}");
        }
    }
}

#[test]
fn broken_yaml_names_file_line_and_column() {
    Case::main("a: 1\nb: [1, 2\nc: 3\n").says(&["main.yaml:", "malformed YAML at column", "fix: check indentation"]);
}

#[test]
fn a_number_beyond_64_bits_names_the_highest() {
    Case::main("max_steps: 99999999999999999999\n").says(&[
        "main.yaml:1:",
        "the integer 99999999999999999999 exceeds 64 bits",
        "to 18446744073709551615",
    ]);
}

#[test]
fn a_tab_as_indentation_names_the_line() {
    Case::main("a:\n\tb: 1\n").says(&["main.yaml:2: malformed YAML"]);
}

#[test]
fn an_absent_file_suggests_its_neighbour() {
    Case::files(&[("main.yaml", "config_paths:\n- openai_modle.yaml\n"), ("openai_model.yaml", "")]).says(&[
        "main.yaml:2: config_paths: 'openai_modle.yaml' was not found; searched",
        "fix: did you mean 'openai_model.yaml'?",
    ]);
}

#[test]
fn a_file_that_cannot_be_looked_for_is_not_called_absent() {
    Case::files(&[("main.yaml", "config_paths:\n- file/openai_model.yaml\n"), ("file", "")]).says(&[
        "main.yaml:2: config_paths: cannot read 'file/openai_model.yaml': Not a directory",
        "fix: check the path",
    ]);
}

#[test]
fn several_absent_files_are_reported_together() {
    let case = Case::main("config_paths: [one.yaml, two.yaml]\n");
    assert_eq!(case.load().unwrap_err().problems().len(), 2);
}

#[test]
fn config_paths_that_is_no_list_shows_the_list() {
    Case::main("config_paths: other.yaml\n").says(&[
        "main.yaml:1: config_paths: expected a list of paths, found a string",
        "fix: write config_paths: [a.yaml, b.yaml]",
    ]);
}

#[test]
fn missing_values_are_reported_together_with_their_lines() {
    let case = Case::main("a: 1\nb: ???\nc:\n  d: ???\n");
    case.says(&["main.yaml:2: b: the value is required but not set (???)", "main.yaml:4: c.d:", "++c.d=<value>"]);
    assert!(case.load().unwrap_err().problems().iter().all(|problem| problem.mistake == Mistake::Missing));
}

#[test]
fn an_unknown_server_reference_suggests_the_nearest_name() {
    let text = format!("{MODEL}{}", AGENT.replace("name: policy_model", "name: policy_modle"));
    Case::main(&text).says(&[
        "main.yaml:10: my_agent.responses_api_agents.simple_agent.model_server: the reference names 'policy_modle' of responses_api_models",
        "fix: did you mean 'policy_model'?",
    ]);
}

#[test]
fn a_reference_of_the_wrong_kind_says_the_right_one() {
    let text = format!("{MODEL}{}", AGENT.replace("type: responses_api_models", "type: resources_servers"));
    Case::main(&text).says(&[
        "main.yaml:10",
        "fix: 'policy_model' belongs to responses_api_models; write type: responses_api_models",
    ]);
}

#[test]
fn a_reference_to_a_block_without_entrypoint_says_so() {
    let text = format!("{}{AGENT}", MODEL.replace("      entrypoint: app.py\n", ""));
    Case::main(&text).says(&["'policy_model' has no entrypoint", "add 'entrypoint: app.py'"]);
}

#[test]
fn a_misspelt_server_kind_suggests_the_kind() {
    Case::main(&MODEL.replace("responses_api_models", "response_api_models")).says(&[
        "main.yaml:",
        "policy_model.response_api_models: unknown server kind 'response_api_models'",
        "fix: did you mean 'responses_api_models'?",
    ]);
}

/// What NeMo Gym's loader accepts and cannot run: a file, the mistake, and the warning.
#[test]
fn what_the_loader_accepts_and_cannot_run_is_listed() {
    let agent = |reference: &str| {
        format!("{MODEL}{}", AGENT.replace("{type: responses_api_models, name: policy_model}", reference))
    };
    let own = format!("{MODEL}      judge: {{type: responses_api_model, name: x}}\n");
    for (text, mistake, warning) in [
        (format!("defualt_host: 0.0.0.0\n{MODEL}"), "main.yaml:1: defualt_host: unknown key\u{20}", ""),
        (
            format!("{MODEL}num_repeat: 4\n"),
            "main.yaml:6: num_repeat: unknown key 'num_repeat'\n  fix: did you mean 'num_repeats'?",
            "",
        ),
        (format!("{MODEL}limits: 4\n"), "did you mean 'limit'?", ""),
        (
            format!("{MODEL}head_servr: {{port: 0}}\n"),
            "head_servr: unknown key 'head_servr'\n  fix: did you mean 'head_server'?",
            "",
        ),
        (format!("{MODEL}num_repeat: {{a: 3}}\n"), "did you mean 'num_repeats'?", ""),
        (format!("{MODEL}colours: {{a: red}}\n"), "", ""),
        (format!("{MODEL}num_repeats: 0\n"), "main.yaml:6: num_repeats: 0 is out of range\n  fix: use 1 or more", ""),
        (format!("{MODEL}num_repeats: {{a: 0}}\n"), "main.yaml:6: num_repeats.a: 0 is out of range", ""),
        (format!("{MODEL}num_repeats: many\n"), "num_repeats: expected an integer, found a string", ""),
        (format!("{MODEL}num_samples_in_parallel: 0\n"), "num_samples_in_parallel: 0 is out of range", ""),
        (format!("{MODEL}num_repeats: 2\nlimit: 0\nnum_samples_in_parallel: null\n"), "", ""),
        (format!("{MODEL}colour: red\n"), "", "main.yaml:6: colour: no file uses the variable 'colour'"),
        (format!("{MODEL}colour: red\nsize: [1]\n"), "", "no file uses the variables 'colour', 'size'"),
        (format!("colour: red\n{MODEL}      url: 'http://${{colour}}'\n"), "", ""),
        (format!("num_repeat: 4\n{MODEL}      url: 'http://${{oc.select:num_repeat,1}}'\n"), "", ""),
        (
            format!("{MODEL}shop: {{resources_servers: {{shop: {{domain: math}}}}}}\n"),
            "",
            "main.yaml:6: shop: 'shop' has no entrypoint, so it is no server, and no file uses it",
        ),
        (
            format!(
                "base: {{responses_api_models: {{m: {{a: 1}}}}}}\n{MODEL}      x: {{_copy: base.responses_api_models.m}}\n"
            ),
            "",
            "",
        ),
        (
            agent("{name: policy_model}"),
            "main.yaml:10: my_agent.responses_api_agents.simple_agent.model_server: the reference has no type\n  fix: write \
             model_server: {type: responses_api_models, name: policy_model}",
            "",
        ),
        (
            format!("{MODEL}{AGENT}      resources_server: {{type: responses_api_models, name: policy_model}}\n"),
            "main.yaml:11: my_agent.responses_api_agents.simple_agent.resources_server: the reference is to one of the \
             responses_api_models, and resources_server names one of the resources_servers",
            "",
        ),
        (
            format!("{MODEL}{AGENT}agent_name: my_agnet\n"),
            "main.yaml:11: agent_name: there is no agent or environment server 'my_agnet'\n  fix: did you mean 'my_agent'?",
            "",
        ),
        (
            format!("{MODEL}{}agent_name: my_agent\n", AGENT.replace("      entrypoint: app.py\n", "")),
            "main.yaml:10: agent_name: 'my_agent' has no entrypoint, so it is not a server\n  fix: add 'entrypoint: app.py' to it",
            "main.yaml:7: my_agent: 'my_agent' has no entrypoint",
        ),
        (format!("{MODEL}{AGENT}agent_name: my_agent\nagent_map: {{_default: my_agent}}\n"), "", ""),
        (format!("{MODEL}agent_name: of_another_file\n"), "", ""),
        (
            format!("{MODEL}{AGENT}fan_out: {{a: [my_agent, b]}}\n"),
            "main.yaml:11: fan_out.a: there is no agent or environment server 'b'",
            "",
        ),
        (
            format!("{MODEL}responses_create_params: {{temprature: 1, top_p: 1}}\n"),
            "main.yaml:6: responses_create_params.temprature: unknown key\n  fix: did you mean `temperature`?",
            "",
        ),
        (
            format!("{MODEL}responses_create_params: {{temperature: hot, metadata: {{a: 1}}}}\n"),
            "main.yaml:6: responses_create_params.temperature: the value is a string: \"hot\"\n  fix: write a number, such as 0.7\n",
            "",
        ),
        (
            format!("{MODEL}responses_create_params: {{temperature: -5}}\n"),
            "responses_create_params.temperature: the value is a number: -5\n  fix: write 0 or more",
            "",
        ),
        (
            format!("{MODEL}responses_create_params: {{max_tokens: 5}}\n"),
            "unknown key\n  fix: write `max_output_tokens`",
            "",
        ),
        (
            format!("t: hot\n{MODEL}responses_create_params: {{temperature: '${{t}}'}}\n"),
            "temperature: the value is a string",
            "",
        ),
        (
            format!("{MODEL}default_host: [a]\n"),
            "default_host: expected a string, found a list\n  fix: write a string",
            "",
        ),
        (format!("{MODEL}use_absolute_ip: maybe\n"), "use_absolute_ip: expected true or false, found a string", ""),
        (
            format!("{MODEL}input_jsonl_fpath: 5\nskip_verification: 'true'\n"),
            "input_jsonl_fpath: expected a string, found an integer",
            "",
        ),
        (
            format!(
                "{MODEL}shop: {{resources_servers: {{shop: {{entrypoint: app.py, domain: math, allowed_agents: [other_agent]}}}}}}\n{AGENT}      \
                 resources_server: {{type: resources_servers, name: shop}}\n"
            ),
            "my_agent: resources_server: the agent is a 'simple_agent', but resources server 'shop' accepts only other_agent",
            "",
        ),
        // An entrypoint on another level than the third one.
        (
            format!("{MODEL}my_agent:\nresponses_api_agents:\n  simple_agent: {{entrypoint: app.py}}\n"),
            "main.yaml:8: responses_api_agents: 'responses_api_agents' is a kind of server, and stands at the top level\n  fix: indent it, \
             and the lines below it, under 'my_agent'",
            "",
        ),
        (
            format!("{MODEL}my_agent:\n  responses_api_agents:\n  simple_agent: {{entrypoint: app.py}}\n"),
            "main.yaml:8: my_agent.simple_agent: 'simple_agent' stands beside 'responses_api_agents', not below it\n  fix: indent it, and \
             the lines below it, under 'responses_api_agents'",
            "",
        ),
        (
            format!("{MODEL}my_agent: {{simple_agent: {{entrypoint: app.py, model_server: {{}}}}}}\n"),
            "my_agent.simple_agent: there is no kind of server above 'simple_agent'\n  fix: write my_agent: {responses_api_agents: \
             {simple_agent: {entrypoint: app.py, …}}}",
            "",
        ),
        (
            format!("{MODEL}my_agent: {{responses_api_agents: {{entrypoint: app.py}}}}\n"),
            "there is no implementation between 'responses_api_agents' and 'entrypoint'\n  fix: write responses_api_agents: \
             {IMPLEMENTATION: {entrypoint: app.py, …}}",
            "",
        ),
        (
            format!("{MODEL}shop: {{entrypoint: app.py, domain: math}}\n"),
            "shop: the entrypoint stands directly in the block, so the block is no server\n  fix: write shop: {resources_servers: \
             {IMPLEMENTATION: {entrypoint: app.py, …}}}",
            "",
        ),
        (
            format!("{MODEL}shop: {{tools: {{shop: {{entrypoint: app.py}}}}}}\n"),
            "shop.tools: 'tools' is no kind of server\n  fix: write one of responses_api_models",
            "",
        ),
        (
            format!(
                "base: {{m: {{entrypoint: app.py}}}}\n{MODEL}other: {{responses_api_models: {{m: {{_copy: base.m}}}}}}\n"
            ),
            "",
            "",
        ),
        (
            format!("{MODEL}concurrency: 4\n"),
            "main.yaml:6: concurrency: unknown key 'concurrency'\n  fix: did you mean 'num_samples_in_parallel'?",
            "",
        ),
        (format!("{MODEL}temperature: 0.5\n"), "did you mean 'responses_create_params.temperature'?", ""),
        (
            format!("{MODEL}head_server: {{prot: 18820}}\n"),
            "main.yaml:6: head_server.prot: unknown key 'prot'\n  fix: did you mean 'port'?",
            "",
        ),
        (
            format!("{MODEL}{}", AGENT.replace("{type: responses_api_models, name: policy_model}", "policy_model")),
            "main.yaml:10: my_agent.responses_api_agents.simple_agent.model_server: expected a reference, found the string \
             \"policy_model\"\n  fix: write {type: responses_api_models, name: policy_model}",
            "",
        ),
        (own, "judge: unknown server kind 'responses_api_model'\n  fix: did you mean 'responses_api_models'?", ""),
    ] {
        let case = Case::main(&text);
        let config = case.load().unwrap_or_else(|error| panic!("{text}: {error}"));
        let folder = format!("{}/", case.folder.path().display());
        let texts = |problems: &[gym_client::config::Problem]| {
            problems.iter().map(|problem| problem.to_string().replace(&folder, "")).collect::<Vec<_>>().join("\n")
        };
        let (mistakes, warnings) = (texts(&config.mistakes), texts(&config.warnings));
        for (expected, said) in [(mistake, &mistakes), (warning, &warnings)] {
            assert!(said.contains(expected.trim_end()) && said.is_empty() == expected.is_empty(), "{text}: {said}");
        }
    }
    // Overrides are for this command alone.
    for (argument, mistake, warning) in [
        ("+num_repeat=4", "command line: num_repeat: unknown key 'num_repeat'\n  fix: did you mean 'num_repeats'?", ""),
        ("+colour=red", "", "command line: colour: no file uses this variable"),
        (
            "++policy_modle.responses_api_models.openai_model.x=1",
            "",
            "command line: policy_modle: no server has the name 'policy_modle'\n  fix: did you mean 'policy_model'?",
        ),
        ("+num_repeats=4", "", ""),
    ] {
        let config = Case::main(MODEL).arg(argument).load().unwrap();
        for (expected, problems) in [(mistake, &config.mistakes), (warning, &config.warnings)] {
            let said = problems.iter().map(ToString::to_string).collect::<String>();
            assert!(said.contains(expected) && said.is_empty() == expected.is_empty(), "{argument}: {said}");
        }
    }
    // The file serves several commands, and its variables are for those that need them.
    let config = Case::files(&[("main.yaml", MODEL), ("env.yaml", "colour: red\n")]).load().unwrap();
    assert!(config.warnings.is_empty() && config.mistakes.is_empty(), "{:?}", config.warnings);
    let config = Case::files(&[("main.yaml", MODEL), ("env.yaml", "num_repeat: 4\n")]).load().unwrap();
    let said = config.warnings.iter().map(ToString::to_string).collect::<String>();
    assert!(
        said.contains("env.yaml:1: num_repeat: unknown key 'num_repeat'\n  fix: did you mean 'num_repeats'?"),
        "{said}"
    );
    assert!(config.mistakes.is_empty(), "{:?}", config.mistakes);
}

#[test]
fn a_reference_without_a_type_is_to_a_server_that_exists() {
    let text =
        format!("{MODEL}{}", AGENT.replace("type: responses_api_models, name: policy_model", "name: policy_modle"));
    Case::main(&text)
        .says(&["the reference names 'policy_modle' of responses_api_models", "did you mean 'policy_model'?"]);
}

#[test]
fn mistakes_of_all_phases_are_reported_together() {
    let text = format!(
        "{MODEL}      port: ???\n{AGENT}      url: ${{nowhere}}\nshop: {{resources_servers: {{shop: {{entrypoint: a}}}}}}\n"
    );
    let case = Case::main(&text);
    case.says(&[
        "main.yaml:6: policy_model.",
        "main.yaml:12: my_agent.",
        "'nowhere', which is not set",
        "main.yaml:13: shop.",
    ]);
    assert_eq!(case.load().unwrap_err().problems().len(), 3, "{}", case.message());
}

#[test]
fn a_type_that_reads_only_the_name_of_a_reference_accepts_its_kind() {
    #[derive(Debug, Deserialize)]
    struct Named {
        name: String,
    }
    #[derive(Debug, Deserialize)]
    struct Settings {
        judge: Named,
    }
    let judge = |reference: &str| {
        format!("{MODEL}my_env: {{resources_servers: {{mine: {{entrypoint: a, domain: math, judge: {reference}}}}}}}\n")
    };
    let config = Case::main(&judge("{type: responses_api_models, name: policy_model}")).load().unwrap();
    let settings: Settings = config.require("my_env").unwrap().settings_as().unwrap();
    assert_eq!(settings.judge.name, "policy_model");
    Case::main(&judge("{type: responses_api_models, name: policy_modle}")).says(&["did you mean 'policy_model'?"]);
    let config = Case::main(&judge("{type: loud, name: policy_model}")).load().unwrap();
    let error = config.require("my_env").unwrap().settings_as::<Settings>().unwrap_err().to_string();
    assert!(error.contains("unknown key 'type'"), "{error}");
}

#[test]
fn a_resources_server_without_domain_lists_the_domains() {
    let text = "my_env:\n  resources_servers:\n    my_impl:\n      entrypoint: app.py\n";
    Case::main(text).says(&[
        "main.yaml:4: my_env.resources_servers.my_impl.domain: the resources server has no domain",
        "math, coding",
    ]);
    Case::main(&format!("{text}      domain: codng\n")).says(&[
        "main.yaml:5:",
        "unknown domain 'codng'",
        "did you mean 'coding'?",
    ]);
}

#[test]
fn ports_and_workers_of_the_wrong_type_name_the_line() {
    Case::main(&format!("{MODEL}      port: http\n"))
        .says(&["main.yaml:6: policy_model.responses_api_models.openai_model.port: expected an integer"]);
    Case::main(&format!("{MODEL}      port: 70000\n")).says(&[
        "main.yaml:6:",
        "70000 is out of range",
        "fix: use 0 to 65535",
    ]);
    Case::main(&format!("{MODEL}      num_workers: [1]\n"))
        .says(&["main.yaml:6:", "num_workers: expected an integer, found a list"]);
    Case::main(&format!("{MODEL}head_server: {{port: x}}\n"))
        .says(&["main.yaml:6: head_server.port: 'x' is not a port"]);
}

#[test]
fn a_dataset_is_checked_key_by_key() {
    let text = format!("{AGENT}      datasets:\n      - name: d\n        type: trian\n{MODEL}");
    Case::main(&text).says(&["datasets[0].jsonl_fpath: the dataset has no such key", "did you mean 'train'?"]);
}

#[test]
fn an_interpolation_without_value_says_how_to_set_it() {
    Case::main(&format!("{MODEL}      url: ${{policy_base_url}}\n")).says(&[
        "main.yaml:6: policy_model.responses_api_models.openai_model.url:",
        "refers to 'policy_base_url', which is not set after merging",
        "++policy_base_url=<value>",
    ]);
    Case::main("a: ${oc.env:GYM_ABSENT}\n")
        .says(&["main.yaml:1: a: environment variable 'GYM_ABSENT' not found", "export GYM_ABSENT"]);
    Case::main("a: ${b}\nb: ${a}\n").says(&["the interpolation refers to itself", "fix: break the cycle"]);
    Case::main("a: ${oc.envv:X}\n").says(&["unknown resolver 'oc.envv'", "oc.env"]);
    Case::main("a: '${b'\n").says(&["main.yaml:1: a:", "has no closing '}'"]);
}

#[test]
fn an_interpolation_deep_in_a_block_fails_only_who_reads_it() {
    #[derive(Debug, Deserialize)]
    struct Settings {
        #[expect(dead_code, reason = "only its presence matters")]
        deep: serde_json::Value,
    }
    let config = Case::main(&format!("{MODEL}      deep:\n        key: ${{oc.env:GYM_ABSENT}}\n")).load().unwrap();
    let error = config.require("policy_model").unwrap().settings_as::<Settings>().unwrap_err().to_string();
    assert!(error.contains("main.yaml:7") && error.contains("GYM_ABSENT"), "{error}");
    assert!(config.to_global_yaml().contains("${oc.env:GYM_ABSENT}"));
}

#[test]
fn inheriting_from_nothing_suggests() {
    Case::main("base_model: {a: 1}\nchild:\n  _inherit_from: base_modle\n").says(&[
        "main.yaml:3: child: 'base_modle' does not exist",
        "did you mean 'base_model' instead of 'base_modle'?",
    ]);
    Case::main("base: {abc: 1}\nchild: {_inherit_from: base, _delete_key: abd}\n")
        .says(&["_delete_key names 'abd'", "did you mean 'abc'?"]);
}

#[test]
fn a_list_and_a_mapping_name_both_files() {
    Case::files(&[("one.yaml", "a:\n- 1\n"), ("two.yaml", "x: 1\na: {b: 1}\n")]).says(&[
        "two.yaml:2: a: a mapping cannot override a list from",
        "one.yaml:2",
        "fix: give both values the same type",
    ]);
}

#[test]
fn overrides_say_how_to_write_them() {
    Case::main("")
        .arg("+x=1,2")
        .says(&["command line: x: cannot parse '+x=1,2': a list without brackets", "fix: write brackets: x=[1,2]"]);
    Case::main("").arg("+u=http://h/?a=b").says(&["'=' needs quotes", "fix: quote the value"]);
    Case::main("").arg("+x=[1,2").says(&["the list has no closing ']'"]);
    Case::main("").arg("policy_model_name").says(&["is not an override: it has no '='", "policy_model_name=VALUE"]);
    Case::main("").arg("+db/mysql=x").says(&["is a Hydra config group", "a.b.c"]);
    Case::main("").arg("+a..b=x").says(&["an empty part is not a name"]);
    Case::main("").arg("+x=1").arg("+x=2").says(&["the key is set twice", "write ++"]);
    let mut case = Case::main("");
    case.args = vec!["config_paths=[x.yaml]".to_owned()];
    case.says(&["config_paths is read before this override is applied", "write +config_paths=[a.yaml,b.yaml]"]);
}

#[test]
fn a_plain_override_needs_its_key_and_changes_it() {
    Case::main("policy_name: a\n").arg("policy_nmae=b").says(&[
        "command line: policy_nmae: no file defines the key",
        "did you mean 'policy_name'?",
        "write +policy_nmae=b",
    ]);
    let config = Case::main("a: {b: 1, c: 2}\n").arg("a.b=5").arg("~a.c").load().unwrap();
    assert_eq!(config.merged["a"], serde_json::json!({"b": 5}));
}

#[test]
fn errors_about_secrets_do_not_show_them() {
    let message = Case::main("").arg("+policy_api_key=sk-very-secret=").message();
    assert!(!message.contains("very-secret"), "{message}");
}

#[test]
fn quotes_left_by_a_paste_are_taken_off() {
    let config = Case::main("").arg("\"+x=[a, b]\"").load().unwrap();
    assert_eq!(config.merged["x"], serde_json::json!(["a", "b"]));
}

#[test]
fn a_ray_cluster_is_known_with_its_place_and_the_highest_layer_wins() {
    let ray = |case: Case| case.load().unwrap().ray.map(|ray| (ray.address, ray.origin.to_string()));
    assert_eq!(ray(Case::main("ray_head_node_address: null\n")), None);
    let (address, place) = ray(Case::main("a: 1\nray_head_node_address: ray://h:1\n")).unwrap();
    assert_eq!(address, "ray://h:1");
    assert!(place.ends_with("main.yaml:2"), "{place}");
    let (address, place) =
        ray(Case::main("ray_head_node_address: ray://h:1\n").arg("+ray_head_node_address=\"ray://other:1\"")).unwrap();
    assert_eq!((address.as_str(), place.as_str()), ("ray://other:1", "command line"));
    let error = Case::main("ray_head_node_address: [a]\n").load().unwrap_err().to_string();
    assert!(error.contains("main.yaml:1: ray_head_node_address: expected an address"), "{error}");

    // Python servers get the address of the head that was started; workers on other machines get what was written.
    let mut config = Case::main("ray_head_node_address: local\n").load().unwrap();
    config.set_ray_address_of_python("127.0.0.1:6379");
    assert!(
        config.to_global_yaml().contains(r#"ray_head_node_address: "127.0.0.1:6379""#),
        "{}",
        config.to_global_yaml()
    );
    assert_eq!(config.ray.unwrap().address, "local");
}

#[test]
fn typed_settings_name_instance_line_and_key() {
    #[derive(Debug, Deserialize)]
    struct Settings {
        #[expect(dead_code, reason = "only its type matters")]
        max_steps: u32,
    }
    let config = Case::main(&format!("{MODEL}{AGENT}      max_steps: many\n")).load().unwrap();
    let error = config.require("my_agent").unwrap().settings_as::<Settings>().unwrap_err().to_string();
    assert!(error.contains("main.yaml:11: my_agent.responses_api_agents.simple_agent.max_steps:"), "{error}");
    let error = config.require("policy_model").unwrap().settings_as::<Settings>().unwrap_err().to_string();
    assert!(error.contains("fix: add 'max_steps: …'"), "{error}");
    let error = config.require("my_agnet").unwrap_err().to_string();
    assert!(error.contains("did you mean 'my_agent'?"), "{error}");
}

#[test]
fn a_host_that_no_machine_has_names_the_line() {
    for (text, what) in [
        (format!("default_host: 0.0.0.0.0\n{MODEL}"), "main.yaml:1: default_host: '0.0.0.0.0' is no IPv4 address"),
        (format!("head_server: {{host: 'http://h'}}\n{MODEL}"), "main.yaml:1: head_server.host: 'http://h' is a URL"),
        (
            format!("{MODEL}      host: 10.0.0.1:80\n"),
            "main.yaml:6: policy_model.responses_api_models.openai_model.host: '10.0.0.1:80' has a port",
        ),
        (
            format!("head_server: 18820\n{MODEL}"),
            "main.yaml:1: head_server: expected a mapping, found an integer\n  fix: write head_server: {host: 127.0.0.1, port: 18820}",
        ),
    ] {
        Case::main(&text).says(&[what]);
    }
    Case::main(&format!("head_server: null\ndefault_host: my_host\n{MODEL}")).load().unwrap();
}

#[test]
fn a_reference_to_another_kind_than_its_key_names_the_servers_of_that_kind() {
    let shop = "shop: {resources_servers: {shop: {entrypoint: app.py, domain: math}}}\n";
    Case::main(&format!("{MODEL}{shop}{}", AGENT.replace("name: policy_model", "name: shop"))).says(&[
        "the reference names 'shop' of responses_api_models",
        "fix: 'shop' is one of the resources_servers; write {type: responses_api_models, name: policy_model}",
    ]);
}

#[test]
fn a_reference_to_a_block_on_the_wrong_level_says_how_to_mend_the_block() {
    let shop = "shop:\n  resources_servers:\n  shop: {entrypoint: app.py, domain: math}\n";
    Case::main(&format!("{MODEL}{shop}{AGENT}      resources_server: {{type: resources_servers, name: shop}}\n")).says(
        &["names 'shop' of resources_servers", "fix: mend the block 'shop': 'shop' stands beside 'resources_servers'"],
    );
}

#[test]
fn two_files_that_define_a_block_are_both_named() {
    let other = MODEL.replace("openai_model", "vllm_model");
    Case::files(&[("a.yaml", MODEL), ("b.yaml", &other)]).says(&[
        "openai_model (",
        "a.yaml:4)",
        "vllm_model (",
        "b.yaml:4)",
    ]);
}

#[test]
fn one_typing_mistake_in_a_server_is_one_error() {
    let block = |kind: &str, settings: &str| {
        format!(
            "shop: {{{kind}: {{shop: {{{settings}}}}}}}\n{MODEL}{AGENT}      resources_server: {{type: resources_servers, name: shop}}\n"
        )
    };
    for (text, what) in [
        (block("resource_servers", "entrypoint: app.py, domain: math"), "did you mean 'resources_servers'?"),
        (block("resources_servers", "entrypoint: app.py, domian: math"), "write domain in the place of 'domian'"),
        (block("resources_servers", "entrypoint: app.py, domain: maths"), "did you mean 'math'?"),
        (block("resources_servers", "entrypoint: app.py, domian: math"), "the resources server has no domain"),
        (block("resources_servers", "entrypont: app.py, domain: math"), "did you mean 'entrypoint'?"),
    ] {
        let case = Case::main(&text);
        case.says(&["main.yaml:1: shop", what]);
        assert_eq!(case.load().unwrap_err().problems().len(), 1, "{}", case.message());
    }
    Case::main(&block("resources_servers", "domain: math")).says(&["'shop' has no entrypoint, so it is not a server"]);
    let variable = "base: {resources_servers: {shop: {endpoint: x}}}\n";
    assert!(Case::main(variable).load().is_ok(), "a block without entrypoint is a variable");
}

#[test]
fn a_key_that_the_type_does_not_have_is_rejected_unless_the_type_takes_any() {
    #[derive(Debug, Deserialize)]
    struct Settings {
        #[serde(rename = "openai_api_key", alias = "key")]
        _key: String,
    }
    #[derive(Debug, Deserialize)]
    struct Agent {
        #[serde(rename = "model_server")]
        _model: Option<String>,
    }
    let config = Case::main(&format!("{MODEL}      openai_api_kye: x\n      description: d\n")).load().unwrap();
    let model = config.require("policy_model").unwrap();
    let error = model.settings_as::<Settings>().unwrap_err().to_string();
    assert!(
        error.contains("main.yaml:6: policy_model.responses_api_models.openai_model.openai_api_kye: unknown key"),
        "{error}"
    );
    assert!(error.ends_with("fix: did you mean 'openai_api_key'?"), "{error}");
    // A reference whose keys are not indented.
    let flat = AGENT
        .replace("model_server: {", "model_server:\n      {")
        .replace("{type: responses_api_models, name: policy_model}", "type: responses_api_models");
    let config = Case::main(&format!("{MODEL}{flat}")).load().unwrap();
    let error = config.require("my_agent").unwrap().settings_as::<Agent>().unwrap_err().to_string();
    assert!(error.contains("unknown key 'type'\n  fix: indent it under 'model_server'"), "{error}");
    assert_eq!(model.settings_as::<serde_json::Map<_, _>>().unwrap()["openai_api_kye"], "x");
}

#[test]
fn secrets_are_masked_and_counts_are_not() {
    let text = format!(
        "{MODEL}hf_token: hf_abc\nmax_output_tokens: 256\nurl: https://u:pw@h/x\napi_keys: [a, b]\npassword: 1234\n"
    );
    let masked = Case::main(&text).load().unwrap().masked();
    assert_eq!(masked["policy_model"]["responses_api_models"]["openai_model"]["openai_api_key"], "****");
    assert_eq!((masked["hf_token"].as_str(), masked["max_output_tokens"].as_u64()), (Some("****"), Some(256)));
    assert_eq!((masked["url"].as_str(), masked["password"].as_str()), (Some("https://u:****@h/x"), Some("****")));
    assert_eq!(masked["api_keys"], serde_json::json!(["****", "****"]));
}

#[test]
fn ports_are_chosen_apart_from_fixed_ones() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("main.yaml"),
        format!("{AGENT}{MODEL}      port: 10001\nport_range_high: 10003\n"),
    )
    .unwrap();
    let overrides = Overrides::default();
    let lowest = |wish: &gym_client::config::PortRequest<'_>| {
        (wish.range.low..=wish.range.high).find(|port| !wish.disallowed.contains(port))
    };
    let mut loader = ConfigLoader::new(folder.path()).pick_port(lowest);
    let config = loader.load(&["main.yaml"], &overrides).unwrap();
    let ports: Vec<_> = config.instances.iter().map(|instance| (instance.name.as_str(), instance.port)).collect();
    assert_eq!(
        ports,
        [("my_agent", Some(10_002)), ("policy_model", Some(10_001)), ("my_environment_server", Some(10_003))]
    );
    assert_eq!(config.relays[0].name, "my_environment_server");
    assert_eq!(config.instance("my_agent").unwrap().references[0].kind, ServerKind::Model);
    let error = loader.load(&["main.yaml"], &Overrides::parse(["++port_range_high=10002"]).unwrap()).unwrap_err();
    assert!(error.to_string().contains("no free port from 10001 to 10002"), "{error}");
}

#[test]
fn search_directories_come_before_the_working_directory_and_installed_ones_last() {
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let write =
        |folder: &Path, name: &str, from: &str| std::fs::write(folder.join(name), format!("{name}: {from}\n")).unwrap();
    for (index, from) in ["search", "cwd", "installed"].iter().enumerate() {
        for name in &["a", "b", "c"][index..] {
            // `a` is nowhere but in the first, `c` in all three.
            write(folders[2 - index].path(), name, from);
        }
    }
    let mut loader =
        ConfigLoader::new(folders[1].path()).search_dirs([folders[2].path()]).installed_dirs([folders[0].path()]);
    let merged = loader.load(&["a", "b", "c"], &Overrides::default()).unwrap().merged;
    assert_eq!((&merged["a"], &merged["b"], &merged["c"]), (&"search".into(), &"search".into(), &"search".into()));
    let mut loader = ConfigLoader::new(folders[1].path()).installed_dirs([folders[0].path()]);
    let merged = loader.load(&["b", "c"], &Overrides::default()).unwrap().merged;
    assert_eq!((&merged["b"], &merged["c"]), (&"cwd".into(), &"cwd".into()));
}

#[test]
fn a_head_of_its_own_takes_a_free_port_unless_one_is_set() {
    let load = |text: &str| {
        let case = Case::main(&format!("{MODEL}      port: 10001\n{text}"));
        let overrides = Overrides::parse(&case.args).unwrap();
        let lowest = |wish: &gym_client::config::PortRequest<'_>| {
            (wish.range.low..=wish.range.high).find(|port| !wish.disallowed.contains(port))
        };
        let mut loader = ConfigLoader::new(case.folder.path()).environment(|_| None).pick_port(lowest).with_own_head();
        let config = loader.load(&[] as &[&str], &overrides).unwrap();
        assert_eq!(config.merged["head_server"]["port"], config.head.port, "the servers of Python read it");
        config.head.port
    };
    assert_eq!(load(""), 10_002);
    assert_eq!(load("head_server: {host: 127.0.0.1}\n"), 10_002);
    assert_eq!(load("head_server: {port: 7}\n"), 7);
}

#[test]
fn nan_as_an_override_is_the_text_that_was_typed_and_a_number_where_one_is_expected() {
    #[derive(Debug, Deserialize)]
    struct Settings {
        model: String,
        temperature: f64,
        bound: f64,
        #[serde(rename = "openai_api_key")]
        _key: String,
    }
    let block = "policy_model.responses_api_models.openai_model";
    let case = Case::main(MODEL)
        .arg(&format!("+{block}.model=nan"))
        .arg(&format!("+{block}.temperature=nan"))
        .arg(&format!("+{block}.bound=-inf"));
    let config = case.load().unwrap();
    assert_eq!(config.instances[0].settings_as::<serde_json::Map<_, _>>().unwrap()["model"], "nan");
    let settings: Settings = config.instances[0].settings_as().unwrap();
    assert_eq!((settings.model.as_str(), settings.bound), ("nan", f64::NEG_INFINITY));
    assert!(settings.temperature.is_nan());
    assert!(config.to_global_yaml().contains("model: .nan"), "NeMo Gym's loader reads a float, as Hydra does");
}

#[test]
fn a_server_of_another_file_is_listed_where_other_workers_serve() {
    let case = Case::main(AGENT);
    case.says(&["main.yaml:5: my_agent", "names 'policy_model' of responses_api_models, which no file defines"]);
    let load = |case: &Case| {
        let overrides = Overrides::parse(&case.args).unwrap();
        let loader = ConfigLoader::new(case.folder.path()).environment(|_| None);
        loader.with_servers_elsewhere().load(&[] as &[&str], &overrides)
    };
    let config = load(&case).unwrap();
    let [missing] = config.elsewhere.as_slice() else { panic!("{:?}", config.elsewhere) };
    assert_eq!((missing.kind, missing.name.as_str()), (ServerKind::Model, "policy_model"));
    assert_eq!(missing.nearest(&["judge"]), None);
    assert_eq!(missing.nearest(&["judge", "policy_mode"]), Some("policy_mode"));
    let text = missing.problem(&["policy_mode"]).to_string();
    assert!(text.contains("main.yaml:5") && text.contains("did you mean 'policy_mode'?"), "{text}");
    // Another kind, and a block that is no server, are mistakes of this file.
    for text in [AGENT.replace("responses_api_models,", "resources_servers,"), AGENT.replace("policy_model}", "math}")]
    {
        let math = "math: {resources_servers: {math: {domain: math}}}\n";
        let error = load(&Case::main(&format!("{MODEL}{text}{math}"))).unwrap_err().to_string();
        assert!(error.contains("main.yaml:10"), "{error}");
    }
}

#[test]
fn a_shared_configuration_names_no_machine_and_keeps_interpolations() {
    let model = MODEL
        .replace("sk-very-secret", "${oc.env:KEY_OF_THIS_TEST}")
        .replace("app.py\n", "app.py\n      host: 10.0.0.1\n      port: 7000\n");
    let case = Case::files(&[
        ("main.yaml", &format!("{model}head_server: {{host: 10.0.0.1}}\ndefault_host: 10.0.0.1\n")),
        ("env.yaml", "results_dir: out\n"),
    ]);
    let overrides = Overrides::parse(&case.args).unwrap();
    let mut loader = ConfigLoader::new(case.folder.path()).environment(|_| Some("sk-of-the-head".to_owned()));
    let given = loader.load(&[] as &[&str], &overrides).unwrap();
    let yaml = given.to_shared_yaml().unwrap();
    assert!(!["10.0.0.1", "7000", "sk-", "config_paths"].iter().any(|own| yaml.contains(own)), "{yaml}");
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("env.yaml"), "results_dir: elsewhere\n").unwrap();
    let loader = ConfigLoader::new(folder.path()).environment(|_| Some("sk-of-the-worker".to_owned()));
    let none = Overrides::parse([] as [&str; 0]).unwrap();
    let read = loader.base(&yaml, "configuration of http://h:1").load(&[] as &[&str], &none).unwrap();
    let block = &read.merged["policy_model"]["responses_api_models"]["openai_model"];
    assert_eq!((&block["openai_api_key"], &block["host"]), (&"sk-of-the-worker".into(), &"127.0.0.1".into()));
    // The files of the worker precede.
    let results = read.merged["results_dir"].as_str().unwrap();
    assert!(results.starts_with(folder.path().to_str().unwrap()) && results.ends_with("elsewhere"), "{results}");
    // A mistake in the text is located in it.
    let broken = yaml.replace("entrypoint: app.py", "entrypoint: app.py\n      num_workers: many");
    let loader = ConfigLoader::new(folder.path()).environment(|_| Some(String::new()));
    let error = loader.base(broken, "configuration of http://h:1").load(&[] as &[&str], &none).unwrap_err();
    assert!(error.to_string().contains("configuration of http://h:1:"), "{error}");
    assert_eq!(GymConfig::without_files().to_shared_yaml(), None);
}
