//! The servers of the cases: a model and an agent for each behavior of the upstream, and environments that misbehave.

use gym_core::{
    CallContext, Code, Error, ModelResponse, RawObject, ResourcesServer, Response, Result, RolloutServer, SessionId,
    Verdict,
};
use gym_server::Servers;
use serde::de::IgnoredAny;

/// The behaviors of the upstream. Each has the model `m_…` and the agent `a_…` over the math environment.
const MANNERS: [&str; 32] = [
    "call_without_name",
    "dead",
    "drip",
    "empty_object",
    "empty_output",
    "endless",
    "failed",
    "garbage",
    "good",
    "hang",
    "item_without_type",
    "list",
    "max_tokens",
    "no_output",
    "not_http",
    "redirect",
    "reset",
    "s400",
    "s401",
    "s429",
    "s429_once",
    "s500",
    "s503",
    "text_output",
    "tool_deep",
    "tool_json",
    "tool_list",
    "tool_name",
    "tool_type",
    "truncated",
    "unknown_item",
    "wait",
];

/// Resources servers that fail; each has the agent `a_…`.
const VERIFIERS: [&str; 8] = [
    "verifier_error",
    "verifier_nan",
    "verifier_two_rewards",
    "verifier_panic",
    "seed_error",
    "tool_error",
    "tool_panic",
    "tool_not_found",
];

/// Environment servers with invalid responses; each is in front of the agent `a_…`.
const ENVIRONMENTS: [&str; 5] = ["answers_list", "answers_text", "text_reward", "null_reward", "not_utf8"];

pub(crate) fn configuration(upstream: &str) -> String {
    let mut yaml = String::new();
    let agent = |name: &str, resources: &str, model: &str| {
        format!(
            "a_{name}:\n  responses_api_agents:\n    simple_agent:\n      entrypoint: app.py\n      max_seconds: {}\n      \
             resources_server: {{type: resources_servers, name: {resources}}}\n      model_server: {{type: \
             responses_api_models, name: {model}}}\n",
            if matches!(name, "hang" | "drip" | "endless") { 3 } else { 10 },
        )
    };
    for manner in MANNERS {
        // The behavior `wait` equals `hang`, for an agent without a short deadline.
        let path = if manner == "wait" { "hang" } else { manner };
        // Nothing listens on port 9, the discard service.
        let upstream = if manner == "dead" { "127.0.0.1:9" } else { upstream };
        if manner == "max_tokens" {
            yaml.push_str(&format!(
                "m_{manner}:\n  responses_api_models:\n    vllm_model:\n      entrypoint: app.py\n      base_url: \
                 http://{upstream}/{path}/v1\n      api_key: sk-secret\n      model: m\n"
            ));
            yaml.push_str(&agent(manner, "math", &format!("m_{manner}")));
            continue;
        }
        yaml.push_str(&format!(
            "m_{manner}:\n  responses_api_models:\n    openai_model:\n      entrypoint: app.py\n      openai_base_url: \
             http://{upstream}/{path}/v1\n      openai_api_key: sk-secret\n      openai_model: m\n      \
             max_http_attempts: 2\n      retry_backoff_ms: 1\n      retry_backoff_max_ms: 5\n      retry_budget_seconds: {}\n",
            if manner == "dead" { "0.05" } else { "30" },
        ));
        yaml.push_str(&agent(manner, "math", &format!("m_{manner}")));
    }
    for name in VERIFIERS {
        let model = if name.starts_with("tool_") { "m_tool_type" } else { "m_good" };
        yaml.push_str(&format!("{name}:\n  resources_servers:\n    {name}: {{entrypoint: app.py, domain: other}}\n"));
        yaml.push_str(&agent(name, name, model));
    }
    for name in ENVIRONMENTS {
        yaml.push_str(&agent(name, "math", "m_good"));
        yaml.push_str(&format!(
            "{name}:\n  environment_servers:\n    {name}:\n      entrypoint: app.py\n      agent_server: {{type: \
             responses_api_agents, name: a_{name}}}\n"
        ));
    }
    yaml
}

pub(crate) fn servers() -> Servers {
    let mut servers = gym_examples::servers::servers();
    for name in VERIFIERS {
        servers = servers.resources(name, move |_| Ok(Wrong(name)));
    }
    for name in ENVIRONMENTS {
        servers = servers.environment(name, move |_| Ok(Nonsense(name)));
    }
    servers
}

/// A resources server that fails as its name describes.
struct Wrong(&'static str);

impl ResourcesServer for Wrong {
    type Task = IgnoredAny;

    async fn seed_session(&self, _: &CallContext, _: &SessionId, _: &RawObject) -> Result<RawObject> {
        match self.0 {
            "seed_error" => Err(Error::internal("the database of episodes is gone")),
            _ => Ok(RawObject::empty()),
        }
    }

    async fn call_tool(&self, _: &CallContext, _: &SessionId, tool: &str, _: &RawObject) -> Result<Response> {
        match self.0 {
            "tool_panic" => panic!("the tool {tool} has no entry 3"),
            "tool_not_found" => Err(Error::not_started(Code::NotFound, "there is no account 7")),
            _ => Err(Error::internal(format!("the tool {tool} broke"))),
        }
    }

    async fn verify(&self, _: &CallContext, _: &SessionId, _: IgnoredAny, _: &ModelResponse) -> Result<Verdict> {
        match self.0 {
            "verifier_error" => Err(Error::internal("the judge is out of office")),
            "verifier_nan" => Ok(Verdict::reward(f64::NAN)),
            "verifier_two_rewards" => Ok(Verdict::reward(1.0).with("reward", 0.5)),
            "verifier_panic" => panic!("index out of range in the verifier"),
            _ => Ok(Verdict::correct(true)),
        }
    }
}

/// An environment server with the invalid response that its name describes.
struct Nonsense(&'static str);

impl RolloutServer for Nonsense {
    async fn run(&self, _: &CallContext, _: &RawObject) -> Result<Response> {
        Ok(match self.0 {
            "answers_list" => Response::json("[1, 2, 3]"),
            "answers_text" => Response::text("done!"),
            "text_reward" => Response::json(r#"{"reward": "high", "response": {}}"#),
            "null_reward" => Response::json(r#"{"reward": null, "response": {}}"#),
            _ => Response::json(b"{\"reward\": 1, \"note\": \"\xff\xfe\"}".to_vec()),
        })
    }

    async fn aggregate_metrics(&self, _: &CallContext, _: &RawObject) -> Result<Response> {
        Ok(Response::json("{}"))
    }
}
