//! The page of a head server, and the data behind it.
//!
//! | route | returns |
//! |---|---|
//! | `GET /ui` | the page: one file that requests nothing from elsewhere |
//! | `GET /ui/state?seen=V&ended=N&roster=R` | [`ClusterView`], as soon as something differs from what the caller has seen, after 5 s at the latest |
//! | `GET /ui/waits` | what the oldest rollouts wait for: [`FollowedWaits`](crate::head::waits::FollowedWaits) |
//! | `GET /ui/rollout?collection=ID&task=T&repeat=R[&attempt=A&failed=1]` | the conversation of one rollout, which the collector reads from its file |

pub(crate) mod conversation;
mod repair;

use std::time::Duration;

use gym_client::collect::monitor::{AttemptId, WantedRow};
use gym_core::message::ContentType;
use gym_core::registry::{Instance, Member, MemberRegistry, Registry};
use gym_core::{CallContext, Code, Error, Response, Result};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::head::collections::{CollectionView, Collections, NumberedAttempt};
use crate::head::page::conversation::{Rollout, RowLabel};
use crate::head::url_of;

/// The page. `__DATA__` stands for the data of the rollouts of a file, or for `{"live":true}`.
pub(crate) const PAGE: &str = include_str!("page.html");

/// The longest wait of one request for the state: heartbeats change without notice.
const STATE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for a rollout: the collector reports once a second, and its search has a limit.
const ROLLOUT_TIMEOUT: Duration = Duration::from_secs(15);

/// The content of the page.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ClusterView {
    /// The number of reports, for the next request.
    pub(crate) seen: u64,
    /// The version of the roster, for the next request.
    pub(crate) roster: String,
    /// The time of the head server, in milliseconds since the Unix epoch.
    pub(crate) now_ms: u64,
    /// The start of the head server, likewise.
    pub(crate) started_ms: u64,
    /// Workers that the head server still waits for.
    pub(crate) expected: usize,
    pub(crate) members: Vec<Member>,
    pub(crate) servers: Vec<ServerView>,
    /// The newest first.
    pub(crate) collections: Vec<CollectionView>,
    /// Attempts that ended after the last one that the caller has seen.
    pub(crate) ended: Vec<NumberedAttempt>,
}

/// A server of the registry.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ServerView {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) implementation: String,
    pub(crate) rank: u32,
    pub(crate) url: String,
    pub(crate) member: Option<String>,
    pub(crate) paused: bool,
}

impl From<Instance> for ServerView {
    fn from(instance: Instance) -> Self {
        Self {
            url: url_of(&instance),
            kind: instance.kind.as_str().to_owned(),
            name: instance.name,
            implementation: instance.implementation,
            rank: instance.replica,
            member: instance.member,
            paused: instance.paused,
        }
    }
}

/// Returns the page that shows the cluster of this head server.
pub(crate) fn live_page() -> Response {
    let page = PAGE.replacen("__DATA__", r#"{"live":true}"#, 1);
    let mut response = Response::text(page);
    response.message.content_type = ContentType::Other("text/html; charset=utf-8".into());
    // The texts of rollouts come from models and tools. They are never markup, and nothing is loaded from elsewhere.
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'";
    response.metadata.push("content-security-policy", policy);
    response.metadata.push("x-content-type-options", "nosniff");
    response
}

/// Returns the state, once it differs from what the query says was seen.
///
/// # Errors
/// `InvalidArgument` for an invalid query.
pub(crate) async fn state<R: MemberRegistry + Registry>(
    cx: &CallContext,
    query: &str,
    registry: &R,
    collections: &Collections,
    (now_ms, started_ms, expected): (u64, u64, usize),
) -> Result<ClusterView> {
    let (seen, ended) = (number::<u64>(query, "seen")?, number(query, "ended")?.unwrap_or(0));
    let roster_seen = value(query, "roster").unwrap_or_default();
    let began = Instant::now();
    let mut version = registry.roster(cx, None, Duration::ZERO).await?.now;
    if let Some(seen) = seen
        && roster_seen == text(version)
    {
        tokio::select! {
            biased;
            () = collections.changed(seen) => {}
            roster = registry.roster(cx, Some(version), STATE_TIMEOUT) => version = roster?.now,
        }
    }
    let (reports, (views, ended)) = (collections.version(), collections.view(Instant::now(), ended));
    let waited = u64::try_from(began.elapsed().as_millis()).unwrap_or(0);
    Ok(ClusterView {
        seen: reports,
        roster: text(version),
        now_ms: now_ms + waited,
        started_ms,
        expected,
        members: registry.members(cx).await?,
        servers: registry.list(cx).await?.into_iter().map(ServerView::from).collect(),
        collections: views,
        ended,
    })
}

fn text(version: gym_core::registry::RosterVersion) -> String {
    format!("{}.{}", version.term, version.version)
}

/// Returns the conversation of a rollout.
///
/// # Errors
/// `InvalidArgument` for an invalid query; `NotFound` with the reason if the collector has no such row; those of [`Collections::row`].
pub(crate) async fn rollout(cx: &CallContext, query: &str, collections: &Collections) -> Result<Rollout> {
    let id = value(query, "collection").ok_or_else(|| Error::invalid("the query needs `collection`"))?;
    let of = |key| number(query, key)?.ok_or_else(|| Error::invalid(format!("the query needs `{key}`")));
    let attempt =
        AttemptId { task: of("task")?, repeat: of("repeat")?, attempt: number(query, "attempt")?.unwrap_or(0) };
    let wanted = WantedRow { attempt, failed: value(query, "failed").is_some_and(|failed| failed == "1") };
    let found = collections.row(&cx.child().at_most(ROLLOUT_TIMEOUT), id, wanted).await?;
    let Some(row) = found.row else {
        let problem = found.problem.unwrap_or_else(|| "the collector has no such row".to_owned());
        return Err(Error::finished(Code::NotFound, problem));
    };
    let line = row.get().as_bytes();
    RowLabel::of(line)
        .and_then(|label| Rollout::of(label, line))
        .map_err(|error| Error::finished(Code::DataLoss, "the row cannot be read").caused_by(error))
}

/// Returns the value of a key in a query string. Run ids, numbers and versions need no escapes.
fn value<'a>(query: &'a str, key: &str) -> Option<&'a str> {
    query.split('&').find_map(|pair| pair.split_once('=').filter(|(name, _)| *name == key).map(|(_, value)| value))
}

fn number<T: std::str::FromStr>(query: &str, key: &str) -> Result<Option<T>> {
    value(query, key)
        .map(|text| text.parse().map_err(|_| Error::invalid(format!("`{key}` of the query is no number: {text:?}"))))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_requests_only_its_own_server() {
        for outside in
            ["http:", "https:", "src=", "@import", "innerHTML", "insertAdjacentHTML", "document.write", "eval("]
        {
            assert!(!PAGE.contains(outside), "{outside}");
        }
        let requests: Vec<&str> = PAGE.match_indices("fetch(").map(|(at, _)| &PAGE[at..at + 12]).collect();
        assert!(
            !requests.is_empty() && requests.iter().all(|request| request.starts_with("fetch(`/ui/")),
            "{requests:?}"
        );
        assert_eq!(PAGE.matches("__DATA__").count(), 1);
    }

    /// What the script reads by these names would silently be missing.
    #[test]
    fn the_page_reads_keys_that_the_head_server_sends() {
        let mut report = gym_client::collect::monitor::CollectionReport::default();
        report.end = Some("exhausted".to_owned());
        let report = serde_json::to_value(report).unwrap();
        let keys = PAGE.match_indices(" c.").map(|(at, _)| &PAGE[at + 3..]);
        let read = keys.map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap());
        let of_view = ["silent", "silent_ms", "history"];
        // The script also has lists of columns by this name.
        let unknown: Vec<&str> =
            read.filter(|key| key.contains('_') && report.get(key).is_none() && !of_view.contains(key)).collect();
        assert_eq!(unknown, [""; 0]);
        for word in ["exhausted: \"finished\"", "failed_fast:", "error:"] {
            assert!(PAGE.contains(word), "{word}");
        }
    }

    #[test]
    fn the_live_page_has_a_policy_that_loads_nothing() {
        let page = live_page();
        assert!(
            page.metadata.get("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'"))
        );
        assert!(page.message.head.to_bytes().windows(13).any(|text| text == br#"{"live":true}"#));
    }
}
