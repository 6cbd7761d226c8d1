//! Asks members that are suspect directly: whether a process does not respond at all, or only its way to the head server is cut.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use gym_client::Transports;
use gym_core::registry::{MemberRegistry as _, MemoryRegistry, Registry as _, RosterVersion, SuspectMember};
use gym_core::transport::ConnectOptions;
use gym_core::{CallContext, Endpoint, Incarnation, Request, Route};
use tokio::time::Instant;

/// Limit of one question.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);

/// Time between two questions to a member that remains suspect.
const ASK_EVERY: Duration = Duration::from_secs(10);

/// Asks each suspect member when it becomes suspect, and from then on every ten seconds, and notes what it did.
pub(crate) async fn ask_suspects(registry: MemoryRegistry, transports: Transports) {
    let mut seen: Option<RosterVersion> = None;
    let mut asked: BTreeMap<(String, Incarnation), Instant> = BTreeMap::new();
    loop {
        // Notes are changes too, so a member that was just asked is passed over.
        let Ok(update) = registry.roster(&CallContext::within(ASK_EVERY * 2), seen, ASK_EVERY).await else { return };
        seen = Some(update.now);
        let now = Instant::now();
        asked.retain(|_, at| now.duration_since(*at) < ASK_EVERY);
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
    let asked = if answers(&cx, transports, &endpoint).await {
        format!("it answers at {endpoint}, so its way to the head server is cut")
    } else {
        format!("it does not answer at {endpoint}")
    };
    registry.note_asked(&suspect.name, suspect.incarnation, &asked);
}

/// Returns `true` if there is any response.
async fn answers(cx: &CallContext, transports: &Transports, endpoint: &Endpoint) -> bool {
    let asked = async {
        let channel = transports.connect(cx, std::slice::from_ref(endpoint), &ConnectOptions::default()).await?;
        channel.call(Request::get(cx.child(), Route::from_static("/health"))).await
    };
    asked.await.is_ok()
}
