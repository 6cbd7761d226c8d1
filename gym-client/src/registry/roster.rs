//! Follows the roster of a head server.

use std::sync::Arc;
use std::time::Duration;

use gym_core::registry::{MemberRegistry, RosterUpdate, RosterVersion};
use gym_core::{CallContext, Code, Error};

/// Time after which the head server answers without a change: shorter than the idle limits of proxies.
const ROSTER_TIMEOUT: Duration = Duration::from_secs(20);

/// Time between two attempts while the head server does not respond.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The news for a follower of a roster.
pub(crate) enum RosterNews<'a> {
    /// Changes since a version; `None` for the first.
    Update(&'a RosterUpdate, Option<RosterVersion>),
    /// The head server has stopped to respond. The follower tries again, and the next news is an update.
    Away(&'a Error),
    /// The head server has no roster, because it is of another version. This is the last news.
    Unsupported(&'a Error),
}

/// Passes on what the roster says, until `hear` returns `false`.
pub(crate) async fn follow_roster(registry: Arc<dyn MemberRegistry>, mut hear: impl FnMut(RosterNews<'_>) -> bool) {
    let mut seen: Option<RosterVersion> = None;
    let mut away = false;
    loop {
        let update = registry.roster(&CallContext::within(ROSTER_TIMEOUT * 2), seen, ROSTER_TIMEOUT).await;
        match update {
            Ok(update) => {
                away = false;
                if !hear(RosterNews::Update(&update, seen)) {
                    return;
                }
                seen = Some(update.now);
            }
            Err(error) => {
                if matches!(error.code(), Code::NotFound | Code::Unimplemented) {
                    hear(RosterNews::Unsupported(&error));
                    return;
                }
                if !std::mem::replace(&mut away, true) && !hear(RosterNews::Away(&error)) {
                    return;
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}
