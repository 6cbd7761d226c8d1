//! Tests the usage of the binary: exit codes, messages, and standard output.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

use std::path::Path;
use std::process::{Command, Output};

const MODEL: &str = "\
policy_model:
  responses_api_models:
    scripted_model:
      entrypoint: app.py
policy_api_key: sk-very-secret
";

fn rgym(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rgym"))
        .args(arguments)
        .current_dir(folder)
        .env_remove("HEAD_SERVER_URL")
        .env_remove("NEMO_GYM_EXTRA_ROOTS")
        .env_remove("RUST_LOG")
        .output()
        .unwrap()
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.yaml"), MODEL).unwrap();
    // The input of the collections that end before they read a row.
    std::fs::write(folder.path().join("i"), "{}\n").unwrap();
    folder
}

fn texts(output: &Output) -> (String, String) {
    (String::from_utf8(output.stdout.clone()).unwrap(), String::from_utf8(output.stderr.clone()).unwrap())
}

/// Runs the binary and returns its standard error, which must be its only output.
#[track_caller]
fn refused(arguments: &[&str], code: i32) -> String {
    let folder = folder();
    let output = rgym(folder.path(), arguments);
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert_eq!(out, "", "{arguments:?}");
    error
}

#[test]
fn every_command_has_help() {
    let folder = folder();
    for (command, option) in [
        (&[][..], "collect"),
        (&["run"], "--python"),
        (&["collect"], "--num-repeats"),
        (&["status"], "HEAD_SERVER_URL"),
        (&["config"], "check"),
        (&["config", "check"], "--strict"),
        (&["config", "show"], "--format"),
        (&["config", "schema"], "rgym config schema > gym.schema.json"),
        (&["aliases"], "Usage"),
        (&["env", "start"], "--start-timeout"),
        (&["eval", "run"], "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS"),
        (&["ng_collect_rollouts"], "--concurrency"),
        (&["ng_run"], "--serve"),
    ] {
        let arguments = [command, &["--help"]].concat();
        let output = rgym(folder.path(), &arguments);
        let (out, error) = texts(&output);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {error}");
        assert!(out.contains(option), "{arguments:?}: {out}");
    }
}

#[test]
fn wrong_usage_ends_with_2_and_a_hint() {
    for (arguments, hint) in [
        (&[][..], "Usage"),
        (&["statsu"], "'status'"),
        (&["run", "--confg", "a.yaml"], "--config"),
        (&["run"], "--config FILE"),
        (&["run", "--config"], "--config <FILE>"),
        (&["run", "--config", "model.yaml", "--head-url", "http://h:1"], "--serve NAME"),
        (&["run", "--config", "model.yaml", "--serve", "polcy_model"], "policy_model"),
        (&["collect", "--num-repeats", "x"], "--num-repeats"),
        (&["collect", "--concurrency", "0"], "--concurrency"),
        (&["collect", "--no-serve"], "--input FILE"),
        (&["collect", "-i", "i", "-o", "o", "--head-url", "coordinator"], "http://127.0.0.1:11000"),
        (&["eval", "run", "-i", "i", "-o", "o"], "--config FILE"),
        (&["collect", "--config", "model.yaml", "--head-url", "http://h:1"], "--no-serve"),
        (&["status", "--head-url", "https://h:1"], "the scheme must be http"),
        (&["config", "check"], "--config FILE"),
        (&["env", "init"], "gym env init"),
        (&["ng_prepare_data"], "gym dataset collate"),
        (&["run", "--config", "model.yaml", "+a.b=1", "+a=2", "+c"], "a"),
        (&["--threads", "0", "aliases"], "--threads"),
    ] {
        let error = refused(arguments, 2);
        assert!(error.contains(hint), "{arguments:?}: {error}");
    }
}

#[test]
fn an_empty_variable_is_unset_and_an_invalid_one_is_named() {
    let folder = folder();
    let with = |arguments: &[&str], name: &str, value: &str| {
        let mut rgym = Command::new(env!("CARGO_BIN_EXE_rgym"));
        rgym.args(arguments).current_dir(folder.path()).env(name, value).output().unwrap()
    };
    let check = ["config", "check", "--config", "model.yaml"];
    for name in [
        "HEAD_SERVER_URL",
        "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS",
        "NUM_EXPECTED_WORKERS",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "RUST_LOG",
        "TOKIO_WORKER_THREADS",
        "WORKER_HEARTBEAT_INTERVAL",
        "WORKER_TIMEOUT",
    ] {
        for arguments in [&check[..], &["run", "--help"], &["collect", "--help"]] {
            let output = with(arguments, name, "");
            assert_eq!(output.status.code(), Some(0), "{name}: {}", texts(&output).1);
        }
    }
    for (name, value) in [("NUM_EXPECTED_WORKERS", "two"), ("WORKER_TIMEOUT", "soon"), ("TOKIO_WORKER_THREADS", "0")] {
        let output = with(&["run", "--config", "model.yaml"], name, value);
        let error = texts(&output).1;
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(&format!("{name}={value}: invalid value")) && error.contains("fix: "), "{error}");
    }
    // Variables of other programs end no command.
    for (name, value) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://127.0.0.1:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "zebra"),
        ("RUST_LOG", "[{}]=x"),
    ] {
        let output = with(&check, name, value);
        let error = texts(&output).1;
        assert_eq!(output.status.code(), Some(0), "{error}");
        assert!(error.contains(&format!("warning: {name}={value}: ")), "{error}");
    }
}

#[test]
fn an_address_of_a_ray_cluster_is_checked_before_anything_starts() {
    let run = |address: &str, code| {
        refused(&["ng_run", "+config_paths=[model.yaml]", &format!("+ray_head_node_address={address}")], code)
    };
    let error = run("ftp://your-cluster:10001", 2);
    assert!(error.contains("the scheme ftp is unknown") && error.contains("from command line"), "{error}");
    // A port on which nothing listens.
    let error = run("\"http://127.0.0.1:9\"", 1);
    assert!(
        error.contains("Connecting to Ray cluster at specified address: http://127.0.0.1:9 (command line)"),
        "{error}"
    );
    assert!(error.contains("does not respond") && error.contains("--dashboard-host=0.0.0.0"), "{error}");
}

#[test]
fn mistakes_with_workers_end_with_2_and_name_the_fix() {
    for (arguments, what) in [
        (&["run", "--head-only", "--worker"][..], "--worker"),
        (&["run", "--config", "model.yaml", "--name", "w1"], "add --worker --head-url URL"),
        (&["run", "--config", "model.yaml", "--expected-workers", "banana"], "invalid value 'banana'"),
        (&["run", "--config", "model.yaml", "--worker-timeout", "soon"], "invalid value 'soon'"),
        (
            &["run", "--worker", "--config", "model.yaml", "--head-url", "http://127.0.0.1:1", "--worker-timeout", "5"],
            "less than three heartbeats",
        ),
        (&["run", "--config", "model.yaml", "--head-url", "http://127.0.0.1:1"], "add --worker"),
    ] {
        let error = refused(arguments, 2);
        assert!(error.contains(what), "{arguments:?}: {error}");
    }
}

#[test]
fn mistakes_in_the_configuration_end_with_2_and_name_the_place() {
    let folder = folder();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("broken.yaml", "a: [1\n");
    write("kind.yaml", "policy_model:\n  responses_api_model:\n    scripted_model: {entrypoint: app.py}\n");
    write(
        "missing.yaml",
        "policy_model:\n  responses_api_models:\n    scripted_model:\n      entrypoint: app.py\n      seed: ???\n",
    );
    write("value.yaml", "policy_model:\n  responses_api_models:\n    scripted_model: {entrypoint: app.py, seed: x}\n");
    for (arguments, what) in [
        (&["config", "check", "nowhere.yaml"][..], "'nowhere.yaml' was not found"),
        (
            &["config", "check", "kind.yaml", "--search-dir", "nosuch"],
            "--search-dir nosuch: there is no such directory",
        ),
        (&["config", "check", "broken.yaml"], "broken.yaml:"),
        (&["config", "check", "kind.yaml"], "kind.yaml:"),
        (&["config", "show", "missing.yaml"], "missing.yaml:5: policy_model.responses_api_models.scripted_model.seed"),
        (&["run", "--config", "missing.yaml"], "missing.yaml:5"),
        (&["config", "check", "value.yaml"], "value.yaml:3"),
        (&["run", "--config", "value.yaml", "++head_server.port=0"], "value.yaml:3"),
    ] {
        let output = rgym(folder.path(), arguments);
        let (_, error) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(what), "{arguments:?}: {error}");
    }
}

#[test]
fn an_implementation_that_nobody_has_is_told_before_anything_starts() {
    use std::os::unix::fs::PermissionsExt;

    let folder = folder();
    let python = folder.path().join("python");
    std::fs::write(&python, "#!/bin/sh\necho '{\"version\": \"3.13.1\", \"has\": true, \"roots\": [\"/nowhere\"]}'\n")
        .unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let theirs = "policy_model:\n  responses_api_models:\n    scripted_modle: {entrypoint: app.py}\n";
    std::fs::write(folder.path().join("theirs.yaml"), theirs).unwrap();
    let check = ["config", "check", "theirs.yaml", "--python", "./python"];
    for arguments in [&check[..], &["run", "--config", "theirs.yaml", "--python", "./python"]] {
        let output = rgym(folder.path(), arguments);
        let (out, error) = texts(&output);
        assert_eq!((output.status.code(), out.as_str()), (Some(2), ""), "{error}");
        assert!(error.contains("fix: did you mean `scripted_model`?"), "{error}");
    }
    let output = rgym(folder.path(), &check);
    let (_, error) = texts(&output);
    assert!(error.contains("theirs.yaml:") && error.contains("policy_model") && error.contains("app.py"), "{error}");
    assert!(error.contains("/nowhere/responses_api_models/scripted_modle"), "{error}");

    let server = folder.path().join("responses_api_models/scripted_modle");
    std::fs::create_dir_all(&server).unwrap();
    std::fs::write(server.join("app.py"), "").unwrap();
    let output = rgym(folder.path(), &check);
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert!(out.contains("python ") && out.contains("ok: 1 servers from 1 file"), "{out}");
}

const AGENT: &str = "\
policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}
shop: {responses_api_models: {scripted_model: {entrypoint: app.py}}}
my_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      model_server: {type: responses_api_models, name: policy_model}
";

#[test]
fn a_key_that_an_implementation_does_not_have_is_an_error_with_its_line_and_the_nearest_name() {
    let folder = folder();
    let vllm = "m:\n  responses_api_models:\n    vllm_model:\n      entrypoint: app.py\n      base_url: http://a/v1\n      model: m\n";
    for (yaml, what) in [
        (
            format!("{AGENT}      max_step: 4\n"),
            "main.yaml:8: my_agent.responses_api_agents.simple_agent.max_step: unknown key 'max_step'\n  fix: did you mean 'max_steps'?",
        ),
        (
            format!("{AGENT}      resource_server: {{type: responses_api_models, name: shop}}\n"),
            "main.yaml:8: my_agent.responses_api_agents.simple_agent.resource_server: unknown key 'resource_server'\n  fix: did you \
             mean 'resources_server'?",
        ),
        (
            AGENT.replace("model_server:", "model_srever:"),
            "main.yaml:7: my_agent.responses_api_agents.simple_agent.model_srever: unknown key 'model_srever'\n  fix: did you mean \
             'model_server'?\n",
        ),
        (
            format!("{AGENT}      frobnicate: 4\n"),
            "fix: remove it; simple_agent reads resources_server, model_server, max_steps",
        ),
        (
            AGENT.replace("name: policy_model", "name: policy_model, nmae: x"),
            "simple_agent.model_server.nmae: unknown key 'nmae'",
        ),
        (format!("{vllm}      uses_reasoning_parsers: false\n"), "did you mean 'uses_reasoning_parser'?"),
        (
            format!("{vllm}      use_completions_api: true\n"),
            "main.yaml:7: m.responses_api_models.vllm_model.use_completions_api",
        ),
    ] {
        std::fs::write(folder.path().join("main.yaml"), &yaml).unwrap();
        for arguments in
            [&["config", "check", "main.yaml"][..], &["run", "--config", "main.yaml", "++head_server.port=0"]]
        {
            let output = rgym(folder.path(), arguments);
            let (_, error) = texts(&output);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}, {yaml}: {error}");
            assert!(format!("{error}\n").contains(what), "{arguments:?}, {yaml}: {error}");
            assert_eq!(error.matches("fix: ").count(), 1, "{arguments:?}, {yaml}: {error}");
        }
    }
}

#[test]
fn a_key_that_only_nemo_gym_reads_is_a_warning_with_its_line() {
    let folder = folder();
    let keys =
        "      num_workers: 4\n      tool_accesses: [{kind: x}]\n      token_id_capture: false\n      description: d\n";
    std::fs::write(folder.path().join("main.yaml"), format!("{AGENT}{keys}")).unwrap();
    let output = rgym(folder.path(), &["config", "check", "main.yaml"]);
    let (_, error) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{error}");
    let warned: Vec<_> = error.lines().filter(|line| line.starts_with("warning: ")).collect();
    let key = |line: u32, key: &str| {
        format!("main.yaml:{line}: my_agent.responses_api_agents.simple_agent.{key}: '{key}' is ignored")
    };
    assert_eq!(warned.len(), 2, "{error}");
    assert!(warned[0].contains(&key(8, "num_workers")) && warned[1].contains(&key(9, "tool_accesses")), "{error}");
    let output = rgym(folder.path(), &["config", "check", "main.yaml", "--strict"]);
    assert_eq!(output.status.code(), Some(2), "{:?}", texts(&output));
    let vllm = "vllm: {responses_api_models: {vllm_model: {entrypoint: app.py, base_url: 'http://a/v1', model: m, endpoint_file: null, \
                endpoint_stale_grace_s: 300.0, use_completions_api: false}}}\n";
    let text = format!("{AGENT}      num_workers: 1\n      verified: true\n{vllm}");
    std::fs::write(folder.path().join("main.yaml"), text).unwrap();
    let output = rgym(folder.path(), &["config", "check", "main.yaml", "--strict"]);
    assert_eq!(output.status.code(), Some(0), "{:?}", texts(&output));
}

#[test]
fn an_option_for_the_model_that_no_server_reads_is_an_error() {
    let folder = folder();
    let openai = "policy_model:\n  responses_api_models:\n    openai_model: {entrypoint: app.py, openai_base_url: URL, openai_api_key: k, openai_model: m}\n";
    let literal = openai.replace("URL", "http://127.0.0.1:9/v1");
    let scripted = "policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}\n";
    let check = ["config", "check", "main.yaml", "--model-url", "http://127.0.0.1:8/v1"];
    for (yaml, arguments, parts) in [
        (
            literal.as_str(),
            &check[..],
            &[
                "--model-url has no effect: no file uses ${policy_base_url}",
                "main.yaml:3 sets openai_base_url: write openai_base_url: ${policy_base_url} there",
                "++policy_model.responses_api_models.openai_model.openai_base_url=VALUE",
            ][..],
        ),
        (scripted, &check, &["remove the option; policy_model is a scripted_model, which has no such setting"]),
        (
            scripted,
            &["collect", "--config", "main.yaml", "--model-api-key", "k", "--input", "t.jsonl", "--output", "o.jsonl"],
            &["--model-api-key has no effect"],
        ),
        (
            scripted,
            &["collect", "--no-serve", "--model", "m", "--input", "t.jsonl", "--output", "o.jsonl"],
            &["--model has no effect", "running servers keep their model"],
        ),
    ] {
        std::fs::write(folder.path().join("main.yaml"), yaml).unwrap();
        let output = rgym(folder.path(), arguments);
        let (_, error) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        for part in parts {
            assert!(error.contains(part), "{arguments:?}: '{part}' is not in:\n{error}");
        }
        assert!(!error.contains("warning: command line: policy_"), "said once: {error}");
    }
    std::fs::write(folder.path().join("main.yaml"), openai.replace("URL", "\"${policy_base_url}\"")).unwrap();
    let output = rgym(folder.path(), &check);
    assert_eq!(output.status.code(), Some(0), "{}", texts(&output).1);
}

#[test]
fn a_file_that_is_no_output_is_not_overwritten() {
    let folder = folder();
    let yaml = "policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}\n";
    std::fs::write(folder.path().join("main.yaml"), yaml).unwrap();
    std::fs::write(folder.path().join("t.jsonl"), "{\"responses_create_params\": {\"input\": \"x\"}}\n").unwrap();
    let collect = ["collect", "--config", "main.yaml", "--input", "t.jsonl", "--overwrite", "--output"];
    for (arguments, what) in [(&["main.yaml"][..], "output"), (&["o.jsonl", "--events", "main.yaml"], "events file")] {
        let output = rgym(folder.path(), &[&collect[..], arguments].concat());
        let (_, error) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{error}");
        let expected = format!("main.yaml: this file is no {what} of a collection");
        assert!(error.contains(&expected) && error.contains("fix: name"), "{error}");
        assert_eq!(std::fs::read_to_string(folder.path().join("main.yaml")).unwrap(), yaml);
    }
    let output = rgym(folder.path(), &[&collect[..], &["/dev/null"]].concat());
    let (_, error) = texts(&output);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("/dev/null: this is no regular file"), "{error}");
}

/// What cannot run: a file, and what `config check` says of it.
#[test]
fn a_check_never_says_ok_of_what_cannot_run() {
    let folder = folder();
    let model = "policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}\n";
    let of_program = "math: {resources_servers: {math: {entrypoint: app.py, domain: math}}}\n\
                      shop: {resources_servers: {shop: {entrypoint: app.py, domain: other}}}\n";
    let without_python = ["--python", "/no/python"];
    for (yaml, parts) in [
        (String::new(), &["there is nothing to check: no server in"][..]),
        ("# to be written\n".to_owned(), &["there is nothing to check"]),
        ("policy_base_url: http://a\n".to_owned(), &["there is nothing to check", "without `entrypoint`"]),
        (
            "policy_model: {responses_api_models: {scripted_model: {seed: 1}}}\n".to_owned(),
            &["'policy_model' has no entrypoint", "there is nothing to check"],
        ),
        (format!("{AGENT}num_repeat: 4\n"), &["main.yaml:8: num_repeat: unknown key", "did you mean 'num_repeats'?"]),
        (format!("{AGENT}num_repeats: 0\n"), &["main.yaml:8: num_repeats: 0 is out of range"]),
        (format!("{AGENT}agent_name: my_agnet\n"), &["main.yaml:8: agent_name: ", "did you mean 'my_agent'?"]),
        (
            AGENT.replace("type: responses_api_models, ", ""),
            &["the reference has no type", "write model_server: {type:"],
        ),
        (
            format!("{AGENT}      resources_server: {{type: responses_api_models, name: shop}}\n"),
            &["resources_server names one of the resources_servers"],
        ),
        (
            format!("{AGENT}      resources_server: {{type: resources_servers, name: warehouse}}\n"),
            &["names 'warehouse' of resources_servers, which no file defines", "with --head-url (http://127.0.0.1:"],
        ),
        // All at once: of the program's own environments, of another server, and of the top level.
        (
            format!("{of_program}{AGENT}      max_step: 1\nnum_repeat: 4\n").replacen(
                "shop: {responses",
                "shop2: {responses",
                1,
            ),
            &[
                "main.yaml:1: math.resources_servers.math: `math` is not one of this program's resources_servers",
                "main.yaml:2: shop.resources_servers.shop: ",
                "main.yaml:10: my_agent.responses_api_agents.simple_agent.max_step: unknown key",
                "main.yaml:11: num_repeat: unknown key",
            ],
        ),
        (format!("{model}{of_program}"), &["`math` is not one of this program's", "program not found"]),
    ] {
        std::fs::write(folder.path().join("main.yaml"), &yaml).unwrap();
        let head = format!("+head_server.port={}", gym_core::testing::free_port());
        let output = rgym(folder.path(), &[&["config", "check", "main.yaml", &head], &without_python[..]].concat());
        let (out, error) = texts(&output);
        assert_eq!((output.status.code(), out.as_str()), (Some(2), ""), "{yaml}: {error}");
        for part in parts {
            assert!(error.contains(part), "{yaml}: '{part}' is not in:\n{error}");
        }
    }
    // An interpreter without nemo-gym: the environments may be those of a program.
    let python = folder.path().join("python");
    std::fs::write(&python, "#!/bin/sh\necho '{\"version\": \"3.13.1\", \"has\": false, \"roots\": []}'\n").unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = rgym(folder.path(), &["config", "check", "main.yaml", "--python", "./python"]);
    let (_, error) = texts(&output);
    let fix = "fix: if `math` is in a program of your own, use the `config check`, `run` and `collect` of that program; otherwise pass --python";
    assert!(error.contains(fix) && error.contains("if `shop` is"), "{error}");
    // A warning of a run is an error of a check.
    std::fs::write(folder.path().join("main.yaml"), format!("{AGENT}colour: red\n")).unwrap();
    let output = rgym(folder.path(), &["config", "check", "main.yaml"]);
    let (out, error) = texts(&output);
    assert!(
        out.contains("ok: 4 servers from 1 file") && error.contains("no file uses the variable 'colour'"),
        "{out}{error}"
    );
}

#[cfg(feature = "groups")]
#[test]
fn a_file_of_worker_groups_is_checked_as_one() {
    let folder = folder();
    let check = |yaml: &str| {
        std::fs::write(folder.path().join("main.yaml"), yaml).unwrap();
        let output = rgym(folder.path(), &["config", "check", "main.yaml"]);
        let (out, error) = texts(&output);
        (output.status.code(), out + &error)
    };
    let (code, text) = check("cluster: {bundle_ct_per_node_list: [2]}\npolicy: {memory_limit: 1GB}\n");
    assert!(code == Some(0) && text.contains("ok: a cluster and 1 worker group from 1 file, and no servers"), "{text}");
    let (code, text) = check("cluster: {bundle_ct_per_node_list: [2]}\npolicy: {memory_limt: 1GB}\n");
    assert!(code == Some(2) && text.contains("main.yaml:2") && text.contains("memory_limit"), "{text}");
    let (code, text) = check("cluster: {bundle_ct_per_node_list: [2]}\npolicy: {transport: tpc}\n");
    let says = "main.yaml:2: policy.transport: transport `tpc` is no transport\n  fix: use auto, or one or more of";
    assert!(code == Some(2) && text.contains(says), "{text}");
}

#[test]
fn a_misspelled_implementation_without_an_interpreter_suggests_the_name_in_its_fix() {
    let folder = folder();
    let theirs = "policy_model:\n  responses_api_models:\n    scripted_modle: {entrypoint: app.py}\n";
    std::fs::write(folder.path().join("theirs.yaml"), theirs).unwrap();
    let python = folder.path().join("python");
    std::fs::write(&python, "").unwrap();
    let output = rgym(folder.path(), &["config", "check", "theirs.yaml", "--python", "./python"]);
    let (_, error) = texts(&output);
    assert!(
        error.contains("theirs.yaml:3") && error.contains("fix: did you mean `scripted_model`? Otherwise"),
        "{error}"
    );
}

#[test]
fn the_schema_is_printed_as_json_with_the_keys_of_the_implementations() {
    let output = rgym(folder().path(), &["config", "schema"]);
    let (out, error) = texts(&output);
    assert_eq!((output.status.code(), error.as_str()), (Some(0), ""));
    let schema: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    let keys = &schema["$defs"]["responses_api_models.scripted_model"]["properties"];
    assert_eq!(keys["seed"]["default"], 0);
    assert!(keys["entrypoint"].is_object(), "the keys of every block are there too");
    assert!(schema["properties"]["require_transport"].to_string().contains("\"shm\""));
}

#[test]
fn a_configuration_is_shown_merged_and_masked() {
    let folder = folder();
    let output = rgym(folder.path(), &["config", "show", "model.yaml", "--model", "small", "--format", "json"]);
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{error}");
    let shown: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(shown["policy_api_key"], "****");
    assert_eq!(shown["policy_model_name"], "small");
    assert!(shown["policy_model"]["responses_api_models"]["scripted_model"].is_object());
    let (yaml, _) = texts(&rgym(folder.path(), &["ng_dump_config", "+config_paths=[model.yaml]"]));
    assert!(yaml.contains("policy_api_key: \"****\"") && !yaml.contains("sk-very-secret"), "{yaml}");
}

#[test]
fn a_head_that_is_not_there_ends_with_1() {
    let head = format!("http://127.0.0.1:{}", gym_core::testing::free_port());
    for arguments in [&["status", "--head-url", &head][..], &["collect", "-i", "i", "-o", "o", "--head-url", &head]] {
        let error = refused(arguments, 1);
        assert!(error.contains(&head) && error.contains("--head-url"), "{arguments:?}: {error}");
    }
}

#[test]
fn the_aliases_reach_the_same_program() {
    let folder = folder();
    let (aliases, _) = texts(&rgym(folder.path(), &["aliases"]));
    assert!(aliases.lines().all(|line| line.starts_with("alias ng_")), "{aliases}");
    let script = format!(
        "shopt -s expand_aliases\n{aliases}\nng_run --head-only --worker\necho \"ended with $?\"\nng_version\n"
    );
    let output = Command::new("bash").arg("-c").arg(script).current_dir(folder.path()).output().unwrap();
    let (out, error) = texts(&output);
    assert!(out.contains("ended with 2"), "{out}{error}");
    assert!(out.contains(env!("CARGO_PKG_VERSION")), "{out}{error}");
}

#[test]
fn a_link_of_an_old_name_is_that_command() {
    let folder = folder();
    let link = folder.path().join("ng_validate");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rgym"), &link).unwrap();
    let output = Command::new(&link).arg("+config_paths=[model.yaml]").current_dir(folder.path()).output().unwrap();
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert!(out.contains("policy_model") && out.contains("native"), "{out}");
}

#[test]
fn messages_name_the_program_that_runs() {
    let folder = folder();
    let bank = folder.path().join("bank");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rgym"), &bank).unwrap();
    let said = |arguments: &[&str]| {
        let mut command = Command::new(&bank);
        command.args(arguments).current_dir(folder.path()).env_remove("HEAD_SERVER_URL");
        let (out, error) = texts(&command.output().unwrap());
        out + &error
    };
    let head = format!("http://127.0.0.1:{}", gym_core::testing::free_port());
    for arguments in [&["status", "--head-url", &head][..], &["collect", "-i", "i", "-o", "o", "--head-url", &head]] {
        let text = said(arguments);
        assert!(text.contains("start servers with `bank run`") && !text.contains("rgym"), "{text}");
    }
    let help = said(&["--help"]);
    assert!(help.contains("`bank aliases`") && help.contains("Usage: bank") && !help.contains("rgym"), "{help}");
}

#[test]
fn a_web_page_of_another_program_is_not_printed() {
    use std::io::{Read, Write};

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let head = format!("http://{}", listener.local_addr().unwrap());
    // Ends with the process: both commands send any number of requests.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let page = "<!doctype html><html><title>Not Found</title><p>some other program</p></html>";
            let head = "HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-type: text/html";
            let _ = write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{page}", page.len());
        }
    });
    for arguments in [&["status", "--head-url", &head][..], &["collect", "-i", "i", "-o", "o", "--head-url", &head]] {
        let error = refused(arguments, 1);
        assert!(
            error.contains(&head) && error.contains("an HTML page with the title `Not Found`"),
            "{arguments:?}: {error}"
        );
        assert!(error.contains("--head-url") && !error.contains("<"), "{arguments:?}: {error}");
    }
}

#[test]
fn a_port_in_use_is_named_with_the_option_that_sets_another() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let folder = folder();
    let head = format!("++head_server.port={port}");
    let model = format!("++policy_model.responses_api_models.scripted_model.port={port}");
    for (arguments, option) in [
        (&["run", "--config", "model.yaml", &head][..], "++head_server.port=PORT"),
        (
            &["run", "--config", "model.yaml", "++head_server.port=0", &model],
            "++policy_model.responses_api_models.scripted_model.port=PORT",
        ),
    ] {
        let output = rgym(folder.path(), arguments);
        let (_, error) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains(option), "{arguments:?}: {error}");
    }
}
