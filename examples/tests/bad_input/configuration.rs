//! The command line and its configuration files.

use super::Case;
use super::support::examples;

const CONFIG: &str = "configuration error";
const USAGE: &str = "usage error";

/// Runs `gym-examples` with these arguments, in a directory with this `main.yaml`.
fn cli(
    kind: &'static str,
    name: &'static str,
    yaml: &'static str,
    arguments: &'static [&'static str],
    outcome: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case::new(kind, name, outcome, says, move |ground| {
        Box::pin(async move {
            let folder = ground.fresh();
            std::fs::write(folder.join("main.yaml"), yaml).unwrap();
            let quickstart = examples().join("configs/quickstart.yaml").display().to_string();
            let occupied = format!("+head_server.port={}", ground.head().rsplit_once(':').unwrap().1);
            let arguments: Vec<&str> = arguments
                .iter()
                .map(|argument| match *argument {
                    "QUICKSTART" => quickstart.as_str(),
                    "OCCUPIED" => occupied.as_str(),
                    "HEAD" => ground.head(),
                    other => other,
                })
                .collect();
            ground.command_line(&folder, &arguments).await
        })
    })
}

fn config(name: &'static str, yaml: &'static str, says: &'static [&'static str]) -> Case {
    cli(CONFIG, name, yaml, &["run", "--config", "main.yaml", "+head_server.port=0"], "exit 2", says)
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        config("broken YAML", "a: 1\nb: [1, 2\nc: 3\n", &["main.yaml:", "malformed YAML at column"]),
        config("a duplicate key", "a: 1\na: 2\n", &["main.yaml:2: a: duplicate key"]),
        config(
            "a required value that is not set (???)",
            "a:\n  b: ???\n",
            &["main.yaml:2: a.b", "???", "++a.b=<value>"],
        ),
        config(
            "an undefined server",
            "math:\n  resources_servers:\n    math: {entrypoint: app.py, domain: math}\nmy_agent:\n  responses_api_agents:\n    \
             simple_agent:\n      entrypoint: app.py\n      resources_server: {type: resources_servers, name: maht}\n      \
             model_server: {type: responses_api_models, name: policy_model}\n",
            &["main.yaml:8", "my_agent", "maht", "did you mean 'math'?"],
        ),
        config(
            "an interpolation of an undefined key",
            "a: ${b}\n",
            &["main.yaml:1: a: '${b}' refers to 'b', which is not set"],
        ),
        config(
            "a number instead of a string",
            "m:\n  responses_api_models:\n    openai_model:\n      entrypoint: app.py\n      openai_base_url: 5\n      \
             openai_model: x\n",
            &["main.yaml:", "openai_base_url", "expected a string"],
        ),
        cli(
            CONFIG,
            "a base URL that has the route",
            "m:\n  responses_api_models:\n    openai_model:\n      entrypoint: app.py\n      openai_base_url: http://h:1/v1/chat/completions\n      \
             openai_model: x\n",
            &["config", "check", "main.yaml"],
            "exit 2",
            &["openai_base_url", "write http://h:1/v1"],
        ),
        config(
            "a pool without room",
            "my_pool:\n  environment_servers:\n    pool: {entrypoint: app.py, rollouts_max: 0, agent_server: {type: \
             responses_api_agents, name: my_agent}}\npolicy_model: {responses_api_models: {scripted_model: {entrypoint: \
             app.py}}}\nmy_agent:\n  responses_api_agents:\n    simple_agent:\n      entrypoint: app.py\n      \
             model_server: {type: responses_api_models, name: policy_model}\n",
            &["main.yaml:3: my_pool.environment_servers.pool.rollouts_max: ", "a whole number of at least 1, found 0"],
        ),
        config(
            "an unknown key",
            "policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}\nmy_agent:\n  responses_api_agents:\n    \
             simple_agent:\n      entrypoint: app.py\n      max_step: 4\n      model_server: {type: responses_api_models, name: \
             policy_model}\n",
            &["main.yaml:6", "unknown key 'max_step'", "did you mean 'max_steps'?"],
        ),
        config(
            "a misspelled domain",
            "e:\n  resources_servers:\n    math: {entrypoint: app.py, domain: maht}\n",
            &["main.yaml:3: e.resources_servers.math.domain", "did you mean 'math'?"],
        ),
        config(
            "an unknown rule for errors of tools",
            "a:\n  responses_api_agents:\n    simple_agent:\n      entrypoint: app.py\n      model_server: {type: responses_api_models, name: \
             m}\n      tool_errors: maybe\nm:\n  responses_api_models:\n    scripted_model: {entrypoint: app.py}\n",
            &["main.yaml:6", "tool_errors: unknown value 'maybe'", "available values: auto, fail, to_model"],
        ),
        config(
            "outputs of tools without a byte",
            "a:\n  responses_api_agents:\n    simple_agent:\n      entrypoint: app.py\n      model_server: {type: responses_api_models, name: \
             m}\n      tool_output_bytes_max: 0\nm:\n  responses_api_models:\n    scripted_model: {entrypoint: app.py}\n",
            &["main.yaml:6", "tool_output_bytes_max", "at least 1"],
        ),
        config(
            "a server without its entrypoint",
            "e:\n  resources_servers:\n    maths: {domain: math}\n",
            &["nothing to run: no server in", "main.yaml", "without `entrypoint`"],
        ),
        cli(
            CONFIG,
            "a Python server without an interpreter",
            "e:\n  resources_servers:\n    of_python: {entrypoint: app.py, domain: math}\n",
            &["run", "--config", "main.yaml", "+head_server.port=0", "--python", "/no/such/python"],
            "exit 2",
            &["/no/such/python"],
        ),
        cli(CONFIG, "a missing file", "", &["config", "check", "mian.yaml"], "exit 2", &["mian.yaml", "main.yaml"]),
        cli(
            CONFIG,
            "an override of an undefined key",
            "a: 1\n",
            &["config", "check", "main.yaml", "b.c=2"],
            "exit 2",
            &["b.c", "+b.c=2"],
        ),
        cli(
            CONFIG,
            "an override that is not YAML",
            "a: 1\n",
            &["config", "check", "main.yaml", "a=[1"],
            "exit 2",
            &["a=[1"],
        ),
        cli(
            CONFIG,
            "a port in use",
            "",
            &["run", "--config", "QUICKSTART", "OCCUPIED"],
            "exit 1",
            &["start the head server on 127.0.0.1", "is in use", "++head_server.port=PORT"],
        ),
        cli(
            USAGE,
            "a misspelled option",
            "",
            &["collect", "--concurency", "4"],
            "exit 2",
            &["--concurency", "--concurrency"],
        ),
        cli(
            USAGE,
            "a head server to pull from without a port",
            "",
            &["run", "--config", "QUICKSTART", "--pull-from", "http://h"],
            "exit 2",
            &["http://h", "the URL has no port", "--pull-from http://"],
        ),
        cli(USAGE, "a misspelled command", "", &["colect"], "exit 2", &["colect", "collect"]),
        cli(
            USAGE,
            "no input",
            "",
            &["collect", "--head-url", "HEAD", "--output", "o.jsonl"],
            "exit 2",
            &["--input FILE"],
        ),
        cli(
            USAGE,
            "no output",
            "",
            &["collect", "--head-url", "HEAD", "--input", "main.yaml"],
            "exit 2",
            &["--output FILE"],
        ),
        cli(
            USAGE,
            "a concurrency of zero",
            "",
            &["collect", "--head-url", "HEAD", "--input", "main.yaml", "--output", "o.jsonl", "--concurrency", "0"],
            "exit 2",
            &["--concurrency"],
        ),
        cli(
            USAGE,
            "an agent that the head server does not have",
            "{\"responses_create_params\": {\"input\": \"x\"}}\n",
            &["collect", "--head-url", "HEAD", "--input", "main.yaml", "--output", "o.jsonl", "--agent", "a_god"],
            "exit 2",
            &["there is no agent `a_god`", "did you mean `a_good`?"],
        ),
        cli(
            USAGE,
            "no head server at this address",
            "{\"responses_create_params\": {\"input\": \"x\"}}\n",
            &[
                "collect",
                "--head-url",
                "http://127.0.0.1:1",
                "--input",
                "main.yaml",
                "--output",
                "o.jsonl",
                "--agent",
                "a",
            ],
            "exit 1",
            &["http://127.0.0.1:1", "--head-url"],
        ),
    ]
}
