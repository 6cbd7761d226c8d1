//! A `/run` whose reused connection breaks is sent again over a new one, and joins its episode.

mod function_agent;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use function_agent::Agent;
use gym_client::{CallOptions, JOINS_RUNS_LABEL, Transports};
use gym_core::registry::{Instance, MemoryRegistry, Registration, Registry};
use gym_core::server::ServerKind;
use gym_core::transport::InProcess;
use gym_core::{CancelToken, Endpoint, World};
use gym_server::environment::{Relay, RelayConfig};
use gym_server::prelude::*;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// A stack with a relay in front of an agent whose episodes wait for a permit, and return their number.
struct Bench {
    stack: Stack,
    episodes: Arc<AtomicU32>,
    permits: Arc<Semaphore>,
}

impl Bench {
    async fn start() -> Self {
        let (episodes, permits) = (Arc::<AtomicU32>::default(), Arc::new(Semaphore::new(0)));
        let (begun, waits) = (Arc::clone(&episodes), Arc::clone(&permits));
        let agent = Agent(move |_| {
            let (number, waits) = (begun.fetch_add(1, Ordering::SeqCst), Arc::clone(&waits));
            async move {
                waits.acquire().await.expect("never closed").forget();
                Ok(Response::json(format!(r#"{{"episode":{number}}}"#)))
            }
        });
        let stack = Stack::builder()
            .set("+head_server.port=0")
            .agent("agent", |_| agent)
            .environment("relay", |client| Relay::new(RelayConfig::new("agent"), client))
            .start()
            .await
            .expect("the servers start");
        Self { stack, episodes, permits }
    }

    async fn instance(&self, name: &str) -> Instance {
        let registry = self.stack.client().registry();
        registry.resolve(&CallContext::default(), name).await.expect("it is registered").remove(0)
    }

    async fn until_begun(&self) {
        while self.episodes.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until the relay serves this number of calls of `/run`.
    async fn until_relayed(&self, calls: usize) {
        let wanted = format!(" {calls}");
        loop {
            let metrics =
                self.stack.client().get(&CallContext::default(), "relay", "/metrics").await.expect("it serves");
            let metrics = metrics.message.head.to_bytes();
            let mut lines = std::str::from_utf8(&metrics).expect("text").lines();
            let is_run = |line: &&str| {
                let names = ["gym_requests_in_flight{", "server=\"relay\"", "route=\"/run\""];
                names.iter().all(|name| line.contains(name))
            };
            if lines.find(is_run).is_some_and(|line| line.ends_with(&wanted)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The ends of the first connection through a proxy. Each is open until its token is cancelled.
#[derive(Clone, Default)]
struct FirstConnection {
    caller: CancelToken,
    server: CancelToken,
}

/// Forwards connections to a server.
async fn proxy_to(server: String, first: FirstConnection) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        let accept = async || {
            let caller = listener.accept().await.expect("a connection").0;
            (caller, TcpStream::connect(&server).await.expect("the server listens"))
        };
        let (mut caller, mut served) = accept().await;
        tokio::spawn(async move {
            tokio::select! {
                _ = copy_bidirectional(&mut caller, &mut served) => {}
                () = first.caller.cancelled() => {}
                () = first.server.cancelled() => {}
            }
            let open = async |stream: TcpStream, end: &CancelToken| {
                end.cancelled().await;
                drop(stream);
            };
            tokio::join!(open(caller, &first.caller), open(served, &first.server));
        });
        loop {
            let (mut caller, mut served) = accept().await;
            tokio::spawn(async move { copy_bidirectional(&mut caller, &mut served).await });
        }
    });
    Endpoint::parse(&format!("http://{address}")).expect("an endpoint")
}

#[tokio::test]
async fn a_run_whose_connection_breaks_under_way_gets_the_response_of_its_episode() {
    // Whether the relay notices that the connection broke before the request is sent again.
    for notices in [true, false] {
        let bench = Bench::start().await;
        let relay = bench.instance("relay").await;
        assert_eq!(relay.labels.get(JOINS_RUNS_LABEL).map(String::as_str), Some("1"));
        assert_eq!(bench.instance("agent").await.labels.get(JOINS_RUNS_LABEL), None);
        let plain = relay.endpoints.iter().find(|endpoint| endpoint.scheme() == "http").expect("an address");
        let first = FirstConnection::default();
        let proxy = proxy_to(plain.address().to_owned(), first.clone()).await;
        let registry = MemoryRegistry::new();
        let mut registration = Registration::new("relay", ServerKind::Environment, vec![proxy]);
        (registration.labels, registration.incarnation) = (relay.labels, relay.incarnation);
        registry.register(&CallContext::default(), registration).await.expect("registers");
        let client = ServerClient::new(Arc::new(registry), Transports::from_features(InProcess::new()), &World::real());

        let cx = CallContext::within(Duration::from_secs(60));
        client.get(&cx, "relay", "/health").await.expect("a connection to reuse");
        let row = r#"{"_ng_task_index":1,"_ng_rollout_index":0}"#;
        let request = Request::post(cx.with_call_id(7), "/run", row);
        let run = client.send("relay", &request, CallOptions::default());
        let (answered, ()) = tokio::join!(run, async {
            bench.until_begun().await;
            if notices {
                first.server.cancel();
                bench.until_relayed(0).await;
            }
            first.caller.cancel();
            if !notices {
                // A response that was delivered into the first connection would be forgotten.
                bench.until_relayed(2).await;
            }
            bench.permits.add_permits(1);
        });
        let answered = answered.expect("the relay is well").message.head.to_bytes();
        assert_eq!((&answered[..], bench.episodes.load(Ordering::SeqCst)), (&br#"{"episode":0}"#[..], 1));
        bench.stack.stop().await;
    }
}
