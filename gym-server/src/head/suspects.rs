//! Asks members that are suspect directly: whether a process does not respond at all, or only its way to the head server is cut.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use gym_client::Transports;
use gym_core::registry::{MemberRegistry as _, MemoryRegistry, Registry as _, RosterVersion, SuspectMember};
use gym_core::{CallContext, Incarnation, Route};
use tokio::time::Instant;

/// Limit of one question.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);

/// Time between two questions to a member that remains suspect.
const ASK_INTERVAL: Duration = Duration::from_secs(10);

/// Asks each suspect member when it becomes suspect, and from then on every ten seconds, and notes what it did.
pub(crate) async fn ask_suspects(registry: MemoryRegistry, transports: Transports) {
    let mut seen: Option<RosterVersion> = None;
    let mut asked: BTreeMap<(String, Incarnation), Instant> = BTreeMap::new();
    loop {
        // Notes are changes too, so a member that was just asked is passed over.
        let Ok(update) = registry.roster(&CallContext::within(ASK_INTERVAL * 2), seen, ASK_INTERVAL).await else {
            return;
        };
        seen = Some(update.now);
        let now = Instant::now();
        asked.retain(|_, at| now.duration_since(*at) < ASK_INTERVAL);
        let due: Vec<&SuspectMember> =
            update.suspects.iter().filter(|suspect| !asked.contains_key(&key(suspect))).collect();
        join_all(due.iter().map(|suspect| ask(&registry, &transports, suspect))).await;
        asked.extend(due.into_iter().map(|suspect| (key(suspect), now)));
    }
}

fn key(suspect: &SuspectMember) -> (String, Incarnation) {
    (suspect.name.clone(), suspect.incarnation)
}

async fn ask(registry: &MemoryRegistry, transports: &Transports, suspect: &SuspectMember) {
    let cx = CallContext::within(ASK_TIMEOUT);
    let Ok(servers) = registry.list(&cx).await else { return };
    let of_member = servers.into_iter().find(|server| server.member.as_ref() == Some(&suspect.name));
    let Some(endpoint) =
        of_member.and_then(|server| server.endpoints.into_iter().find(|endpoint| endpoint.scheme() != "mem"))
    else {
        return;
    };
    // Any response is an answer.
    let asked = if transports.ask(&cx, &endpoint, Route::from_static("/health")).await.is_ok() {
        format!("it answers at {endpoint}, so its way to the head server is cut")
    } else {
        format!("it does not answer at {endpoint}")
    };
    registry.note_asked(&suspect.name, suspect.incarnation, &asked);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gym_core::registry::{MemberLimits, MemberServer, MemberSpec, MemberTiming};
    use gym_core::server::ServerKind;
    use gym_core::testing::{Faults, SimNet};
    use gym_core::transport::{handler_fn, serve};
    use gym_core::{CancelToken, Endpoint, Request, Response};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_suspect_member_is_asked_and_the_list_says_whether_it_answers() {
        let net = SimNet::new(1, Faults::calm());
        let registry = MemoryRegistry::with_limits(1, MemberLimits::default());
        let living = net.host("living");
        let handler = handler_fn(|_: Request| async { Ok(Response::json("{}")) });
        let serving =
            serve(Box::new(living.listen("agent").unwrap()), Arc::new(handler), CancelToken::new(), ASK_INTERVAL);
        living.spawn(async move {
            let _ = serving.await;
        });
        let (_stopped, _held) = (net.host("stopped"), net.host("stopped").listen("agent").unwrap());
        for name in ["living", "stopped"] {
            let mut spec = MemberSpec::new(name, Incarnation(1));
            let heartbeat = Duration::from_secs(30);
            spec.timing = MemberTiming { heartbeat, timeout: heartbeat * 10, ..MemberTiming::default() };
            let endpoint = Endpoint::parse(&format!("sim://{name}/agent")).unwrap();
            spec.servers = vec![MemberServer::new("agent", ServerKind::Agent, [endpoint])];
            registry.join(&CallContext::default(), spec).await.unwrap();
        }
        let transports = Transports::new().with_connector(Arc::new(net.host("head")));
        let asking = tokio::spawn(ask_suspects(registry.clone(), transports));
        tokio::time::sleep(Duration::from_secs(59)).await;
        let why = async || {
            let members = registry.members(&CallContext::default()).await.unwrap();
            members.into_iter().map(|member| member.reason).collect::<Vec<_>>()
        };
        assert_eq!(why().await, ["", ""]);
        tokio::time::sleep(Duration::from_secs(4)).await;
        let expected = [
            "no heartbeat for 60.0 s; it answers at sim://living/agent, so its way to the head server is cut",
            "no heartbeat for 60.0 s; it does not answer at sim://stopped/agent",
        ];
        assert_eq!(why().await, expected);
        // It is asked again: its process has ended meanwhile.
        net.crash("living");
        tokio::time::sleep(ASK_INTERVAL + ASK_TIMEOUT).await;
        assert!(why().await[0].ends_with("it does not answer at sim://living/agent"), "{:?}", why().await);
        // The same reason reaches collectors.
        let roster = registry.roster(&CallContext::default(), None, Duration::ZERO).await.unwrap();
        assert!(roster.suspects[0].why().contains("it does not answer at sim://living/agent; gone in 2"), "{roster:?}");
        asking.abort();
    }
}
