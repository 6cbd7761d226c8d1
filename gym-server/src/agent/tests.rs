//! Tests tools that a server declares, and the end of sessions, with the stock agents.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use gym_client::ServerClient;
use gym_core::prelude::*;
use gym_core::rollout::{EPISODE_METADATA, FailureClass};
use gym_core::server::{GymnasiumServer, SessionCounts, Step};
use gym_core::transport::handler_fn;
use gym_core::{Handler, Status};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::agent::{Episode, GymnasiumAgent, GymnasiumAgentConfig, SimpleAgent, SimpleAgentConfig};
use crate::metrics::Metrics;
use crate::role::{RoleServer, ServerContext};
use crate::testing::{TestNetwork, world};

/// A model that follows the last message of the request, and records the requests.
#[derive(Clone, Default)]
struct ObedientModel(Arc<Mutex<Vec<Value>>>);

impl ModelServer for ObedientModel {
    async fn responses(&self, _: &CallContext, _: &SessionId, body: &RawObject) -> Result<ModelResponse> {
        let body: Value = serde_json::from_slice(body.text()).unwrap();
        let last = body["input"].as_array().unwrap().last().unwrap().clone();
        self.0.lock().push(body);
        let order = last["content"].as_str().unwrap_or("say done");
        match order.split_once(' ') {
            Some(("wait", seconds)) => tokio::time::sleep(Duration::from_secs(seconds.parse().unwrap())).await,
            Some(("fail", _)) => return Err(Error::internal("the engine failed")),
            _ => {}
        }
        let item = match order.split_once(' ') {
            Some(("call", tool)) => json!({"type": "function_call", "call_id": "c", "name": tool, "arguments": "{}"}),
            _ => json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": order}]}),
        };
        let response = json!({"id": "r", "object": "response", "status": "completed", "output": [item], "usage": null});
        Ok(ModelResponse(RawObject::parse(response.to_string())?))
    }

    async fn chat_completions(&self, _: &CallContext, _: &SessionId, _: &RawObject) -> Result<RawObject> {
        Err(Error::internal("nothing calls this"))
    }
}

/// Counts the calls of a session. The verifier fails if the row requests it.
#[derive(Clone, Default)]
struct Counter(Arc<Sessions<u64>>);

#[derive(serde::Deserialize)]
struct CounterTask {
    #[serde(default)]
    verifier_fails: bool,
}

impl ResourcesServer for Counter {
    type Task = CounterTask;

    async fn seed_session(&self, _: &CallContext, session: &SessionId, _: &RawObject) -> Result<RawObject> {
        self.0.begin(session, || 0)?;
        tokio::time::sleep(Duration::from_millis(5)).await;
        Ok(RawObject::empty())
    }

    tools! { |self, _cx, session|
        /// Counts.
        count() => self.0.with(session, |count| {
            *count += 1;
            json!({"count": *count})
        }),
    }

    async fn verify(
        &self,
        _: &CallContext,
        session: &SessionId,
        task: CounterTask,
        _: &ModelResponse,
    ) -> Result<Verdict> {
        if task.verifier_fails {
            return Err(Error::internal("the verifier failed"));
        }
        self.0.score(session, |count| Verdict::reward(*count as f64))
    }

    fn sessions(&self) -> Option<&dyn SessionTable> {
        Some(&*self.0)
    }
}

struct TestServers {
    model: ObedientModel,
    metrics: Metrics,
    client: ServerClient,
    net: TestNetwork,
}

fn servers(env: impl Handler) -> TestServers {
    let (model, metrics, mut net) = (ObedientModel::default(), Metrics::new(), TestNetwork::new());
    let client = net.client(&["model", "env", "agent", "unverified", "player", "own", "bare"]);
    let context = |name: &str| ServerContext::new(name, "Test", &world());
    let simple = SimpleAgent::new(SimpleAgentConfig::new("model", "env"), client.clone());
    let player = GymnasiumAgentConfig { max_steps: 3.try_into().unwrap(), ..GymnasiumAgentConfig::new("model", "env") };
    let player = GymnasiumAgent::new(player, client.clone(), &world());
    let unverified = SimpleAgentConfig { skip_verification: true, ..SimpleAgentConfig::new("model", "env") };
    let unverified = SimpleAgent::new(unverified, client.clone());
    net.serve("model", RoleServer::model(model.clone(), &context("model")));
    net.serve("env", env);
    net.serve("unverified", RoleServer::agent(unverified, &context("unverified")));
    net.serve("agent", RoleServer::agent(simple, &context("agent")));
    net.serve("player", RoleServer::agent(player, &context("player")));
    net.serve("own", RoleServer::agent(OneTurn(client.clone()), &context("own")));
    TestServers { model, metrics, client, net }
}

/// Creates the servers, with an environment that counts in the metrics of the result.
fn with_counter(counter: &Counter) -> TestServers {
    let context = ServerContext::new("env", "Test", &world());
    let mut servers = servers(RoleServer::resources(counter.clone(), &context));
    servers.metrics = context.metrics;
    servers
}

struct OneTurn(ServerClient);

impl AgentServer for OneTurn {
    async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        let mut episode = Episode::seed(cx, &self.0, "env", row).await?;
        let params = row.get_object("responses_create_params")?.unwrap_or_default();
        let answer = episode.ask("model", params).await?;
        episode.verify(answer).await
    }
}

impl TestServers {
    async fn run(&self, cx: CallContext, agent: &str, row: &Value) -> Result<(Status, Value)> {
        let request = Request::post(cx, "/run", row.to_string());
        let response = self.client.send(agent, &request, gym_client::CallOptions::default()).await?;
        Ok((response.status, serde_json::from_slice(&response.message.head.to_bytes()).unwrap()))
    }

    fn asked(&self) -> Vec<Value> {
        self.model.0.lock().clone()
    }
}

fn row(order: &str) -> Value {
    json!({"responses_create_params": {"input": [{"role": "user", "content": order}]}})
}

fn counts(counter: &Counter) -> SessionCounts {
    SessionTable::counts(&*counter.0)
}

#[tokio::test(start_paused = true)]
async fn a_row_that_does_not_fit_the_task_is_rejected_before_the_model_is_called() {
    let servers = with_counter(&Counter::default());
    for agent in ["agent", "own"] {
        let mut wrong = row("say hello");
        wrong["verifier_fails"] = json!(3);
        let request = Request::post(CallContext::default(), "/run", wrong.to_string());
        let response = servers.client.send(agent, &request, gym_client::CallOptions::default()).await.unwrap();
        let error = response.into_result().unwrap_err();
        assert_eq!(error.failure_class(), FailureClass::RowInvalid, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("POST env/seed_session") && text.contains("`verifier_fails`: invalid type: integer `3`"),
            "{text}"
        );
    }
    assert!(servers.asked().is_empty());
    // An agent in another language that seeds without the row.
    let request = Request::post(CallContext::default(), "/seed_session", r#"{"verifier_fails":3}"#);
    let response = servers.client.send("env", &request, gym_client::CallOptions::default()).await.unwrap();
    assert_eq!(response.status, Status(200));
}

#[tokio::test(start_paused = true)]
async fn a_servers_tools_are_offered_to_the_model_unless_the_row_has_tools() {
    let counter = Counter::default();
    let servers = with_counter(&counter);
    for agent in ["agent", "own"] {
        let (status, scored) = servers.run(CallContext::default(), agent, &row("call count")).await.unwrap();
        assert_eq!(status, Status(200), "{scored}");
        assert_eq!(servers.asked()[0]["tools"], json!(counter.tools()));

        let mut own = row("say done");
        own["responses_create_params"]["tools"] = json!([{
            "type": "function", "name": "count", "description": "Mine.", "parameters": {}, "strict": true,
        }]);
        assert_eq!(servers.run(CallContext::default(), agent, &own).await.unwrap().0, Status(200));
        assert_eq!(servers.asked().last().unwrap()["tools"][0]["description"], "Mine.");

        own["responses_create_params"]["tools"][0]["name"] = "cuont".into();
        let (status, body) = servers.run(CallContext::default(), agent, &own).await.unwrap();
        let text =
            "the row has tool `cuont`, which server `env` does not have; remove it from the row, or use one of count";
        assert!(status == Status(422) && body.to_string().contains(text), "{status:?} {body}");
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(counts(&counter), SessionCounts::new(0, 6, 0));
}

/// The prompt of a row can be rendered again only if the row has the tools that the model was offered.
#[tokio::test(start_paused = true)]
async fn a_scored_row_has_the_tools_that_the_model_received() {
    let counter = Counter::default();
    let mine = json!([{"type": "function", "name": "count", "description": "Mine.", "parameters": {}, "strict": true}]);
    let (declared, absent) = (Some(json!(counter.tools())), None);
    // Each with the tools of the row, and those of the scored row. Only a resources server declares tools.
    for (own, expected) in [
        (absent.clone(), declared.clone()),
        (Some(Value::Null), declared.clone()),
        (Some(json!([])), Some(json!([]))),
        (Some(mine.clone()), Some(mine)),
    ] {
        for agent in ["agent", "unverified", "own", "player"] {
            let plays = agent == "player";
            let servers = if plays { servers(endless()) } else { with_counter(&counter) };
            let mut row = row("call count");
            row["expected"] = json!(7);
            row["responses_create_params"]["temperature"] = json!(0.5);
            if let Some(tools) = &own {
                row["responses_create_params"]["tools"] = tools.clone();
            }
            let (status, scored) = servers.run(CallContext::default(), agent, &row).await.unwrap();
            assert_eq!(status, Status(200), "{scored}");
            let kept = &scored["responses_create_params"];
            let expected = if plays { &own } else { &expected };
            assert_eq!(kept.get("tools"), expected.as_ref(), "{agent} {own:?}");
            // The request as the model received it, and nothing else of the row changes.
            assert_eq!(kept, &servers.asked()[0], "{agent} {own:?}");
            if !plays {
                row["responses_create_params"]["tools"] = kept["tools"].clone();
                assert_eq!((&row["responses_create_params"], &scored["expected"]), (kept, &json!(7)));
            }
        }
    }
}

/// An environment that is played in steps and never ends an episode.
fn endless() -> impl Handler {
    handler_fn(|request: Request| {
        let reply = if request.route.path() == "/step" { r#"{"observation":"say more"}"# } else { "{}" };
        async move { Ok(Response::json(reply)) }
    })
}

/// The tools of an agent are its own: the row of a task does not get them.
#[tokio::test(start_paused = true)]
async fn a_row_has_no_tools_that_no_model_was_offered() {
    struct WithoutTools(ServerClient);

    impl AgentServer for WithoutTools {
        async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
            let mut episode = Episode::seed(cx, &self.0, "env", row).await?;
            let params = row.get_object("responses_create_params")?.unwrap_or_default();
            let answer = episode.ask("model", params.edit().set("tools", "[]").to_rope()).await?;
            episode.verify(answer).await
        }
    }

    let mut servers = with_counter(&Counter::default());
    let agent = WithoutTools(servers.client.clone());
    servers.net.serve("bare", RoleServer::agent(agent, &ServerContext::new("bare", "Test", &world())));
    let (status, scored) = servers.run(CallContext::default(), "bare", &row("say done")).await.unwrap();
    assert_eq!((status, scored["responses_create_params"].get("tools")), (Status(200), None), "{scored}");
}

#[tokio::test(start_paused = true)]
async fn no_session_is_left_after_rollouts_that_end_in_any_way() {
    const ROLLOUTS: usize = 20_000;
    let counter = Counter::default();
    let servers = &with_counter(&counter);
    let ended: Vec<&str> = stream::iter(0..ROLLOUTS)
        .map(|number| async move {
            let agent = if number % 2 == 0 { "agent" } else { "own" };
            // From the arrival at the environment to the middle of the model's response.
            let early = Duration::from_millis(number as u64 / 12 % 40);
            let cx = CallContext::default();
            let run = |row: Value| servers.run(cx.clone(), agent, Box::leak(Box::new(row)));
            match number / 2 % 6 {
                0 => run(row("call count")).await.unwrap(),
                1 => run(row("fail now")).await.unwrap(),
                2 => {
                    let mut row = row("say done");
                    row["verifier_fails"] = true.into();
                    run(row).await.unwrap()
                }
                3 => {
                    let left = tokio::time::timeout(early, run(row("wait 1"))).await;
                    assert!(left.is_err());
                    return "disconnected";
                }
                4 => {
                    let cancelled = async {
                        tokio::time::sleep(early).await;
                        cx.cancel.cancel();
                    };
                    let (answer, ()) = tokio::join!(run(row("wait 1")), cancelled);
                    return if answer.is_err() { "cancelled" } else { "cancelled at the agent" };
                }
                _ => {
                    let cx = CallContext::within(early + Duration::from_millis(1));
                    let answer = servers.run(cx, agent, &row("wait 1")).await;
                    assert!(answer.is_err() || answer.unwrap().0 != Status(200));
                    return "deadline";
                }
            };
            "answered"
        })
        .buffer_unordered(100)
        .collect()
        .await;
    assert_eq!(ended.len(), ROLLOUTS);
    for kind in ["answered", "disconnected", "deadline"] {
        assert!(ended.iter().filter(|ending| **ending == kind).count() > ROLLOUTS / 10, "{kind}");
    }
    assert!(ended.iter().filter(|ending| ending.starts_with("cancelled")).count() > ROLLOUTS / 10);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let counts = counts(&counter);
    assert_eq!((counts.open, counts.expired), (0, 0), "{counts:?}");
    assert!(counts.closed > ROLLOUTS as u64 * 9 / 10, "{counts:?}");
    let text = servers.metrics.text();
    assert!(text.contains("gym_sessions_open{server=\"env\"} 0\n"), "{text}");
    assert!(text.contains(&format!("gym_sessions_closed_total{{server=\"env\"}} {}\n", counts.closed)), "{text}");
}

/// Python servers receive exactly the requests that NeMo Gym's agents send.
#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_ask_for_it_is_sent_no_close() {
    let routes: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&routes);
    let python = handler_fn(move |request: Request| {
        seen.lock().push(request.route.path().to_owned());
        async { Ok(Response::json(r#"{"reward": 1.0, "info": {}, "terminated": true}"#)) }
    });
    let servers = servers(python);
    for agent in ["agent", "own", "player"] {
        assert_eq!(servers.run(CallContext::default(), agent, &row("say done")).await.unwrap().0, Status(200));
        let _ =
            tokio::time::timeout(Duration::from_millis(5), servers.run(CallContext::default(), agent, &row("wait 1")))
                .await;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let classic = ["/seed_session", "/verify", "/seed_session"];
    assert_eq!(*routes.lock(), [&classic[..], &classic, &["/reset", "/step", "/reset"]].concat());
}

#[tokio::test(start_paused = true)]
async fn an_episode_in_turns_reports_its_course() {
    let ends = |turn: u32, how: &'static str| {
        let turns = Arc::new(Mutex::new(0));
        handler_fn(move |request: Request| {
            let reply = if request.route.path() == "/step" {
                let mut turns = turns.lock();
                *turns += 1;
                if *turns == turn { how } else { r#"{"observation":"say more"}"# }
            } else {
                "{}"
            };
            async move { Ok(Response::json(reply)) }
        })
    };
    for (turn, how, expected) in [
        (2, r#"{"terminated":true}"#, "turns=2, tool_calls=1"),
        (1, r#"{"truncated":true}"#, r#"turns=1, tool_calls=1, truncated="environment""#),
        (9, "{}", r#"turns=3, tool_calls=1, truncated="max_steps""#),
    ] {
        let servers = servers(ends(turn, how));
        let request = Request::post(CallContext::default(), "/run", row("call search").to_string());
        let response = servers.client.send("player", &request, gym_client::CallOptions::default()).await.unwrap();
        let course = response.metadata.get(EPISODE_METADATA).unwrap();
        let (counts, phases) = course.split_once(", phases=\"").unwrap();
        assert_eq!(counts, expected, "{how}");
        let phases: Vec<&str> = phases.split(", ").map(|span| span.split(' ').next().unwrap()).collect();
        let turns = turn.min(3) as usize;
        assert_eq!(phases, [&["seed"][..], &["model", "tool"].repeat(turns)].concat(), "{how}");
    }
}

struct Stateless(Arc<Mutex<u32>>);

impl ResourcesServer for Stateless {
    type Task = serde::de::IgnoredAny;
    async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
        *self.0.lock() += 1;
        Ok(Verdict::correct(true))
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_without_sessions_is_asked_to_close_one_only_once() {
    let context = ServerContext::new("env", "Test", &world());
    let verified: Arc<Mutex<u32>> = Arc::default();
    let servers = servers(RoleServer::resources(Stateless(Arc::clone(&verified)), &context));
    for _ in 0..5 {
        servers.run(CallContext::default(), "agent", &row("say done")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(*verified.lock(), 5);
    let text = context.metrics.text();
    let closed = r#"gym_requests_total{server="env",route="/close_session",status="2xx"} 1"#;
    assert!(text.contains(closed) && !text.contains("gym_sessions_open{"), "{text}");
}

/// Replies twice as a user, with a reward each time, and then ends the episode.
#[derive(Clone, Default)]
struct Conversations(Arc<Sessions<u32>>);

impl GymnasiumServer for Conversations {
    type Task = Value;

    async fn reset(&self, _: &CallContext, session: &SessionId, task: Value) -> Result<Option<String>> {
        self.0.begin(session, || 0)?;
        Ok(Some(task["first"].as_str().unwrap_or("say first").into()))
    }

    async fn step(
        &self,
        _: &CallContext,
        session: &SessionId,
        _: Self::Task,
        response: &ModelResponse,
    ) -> Result<Step> {
        let turn = self.0.with(session, |turn| {
            *turn += 1;
            *turn
        })?;
        let text = response.last_text()?;
        Ok(match (turn, text.as_str()) {
            (_, "say end") => Step::done(1.0).with_info("turn", turn),
            (1, _) => Step::reply("say second").with_reward(0.5).with_tool_output("c", "out"),
            _ => Step::reply("say more"),
        })
    }

    fn sessions(&self) -> Option<&dyn SessionTable> {
        Some(&*self.0)
    }
}

#[tokio::test(start_paused = true)]
async fn an_environment_replies_as_a_user_up_to_the_limit() {
    let (env, context) = (Conversations::default(), ServerContext::new("env", "Test", &world()));
    let servers = servers(RoleServer::gymnasium(env.clone(), &context));
    let task = json!({"responses_create_params": {"input": "start"}, "follow_ups": []});
    let (status, result) = servers.run(CallContext::default(), "player", &task).await.unwrap();
    let message = |text: &str| json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]});
    let user = |text: &str| json!({"content": text, "role": "user", "type": "message"});
    let expected = json!({
        "responses_create_params": {"input": [user("start"), user("say first")]},
        "response": {"id": "r", "object": "response", "status": "completed", "output": [
            message("say first"),
            {"type": "function_call_output", "call_id": "c", "output": "out"},
            user("say second"),
            message("say second"),
            user("say more"),
            message("say more"),
            user("say more"),
        ], "usage": null},
        "reward": 0.5,
        "terminated": false,
        "truncated": true,
        "info": {},
    });
    assert_eq!((status, &result), (Status(200), &expected), "{result}");
    assert_eq!(SessionTable::counts(&*env.0), SessionCounts::new(0, 1, 0));

    // A cancelled episode is also closed.
    let slow = json!({"responses_create_params": {"input": "start"}, "first": "wait 1"});
    let left = tokio::time::timeout(Duration::from_millis(500), servers.run(CallContext::default(), "player", &slow));
    assert!(left.await.is_err());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(SessionTable::counts(&*env.0), SessionCounts::new(0, 2, 0));
}
