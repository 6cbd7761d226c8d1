//! One attempt at one peer: its rungs, best first, until one holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use gym_core::{CallContext, Channel, Code, ConnectOptions, Connector, Endpoint, Error, Ladder, Level, Result};

use super::paths::Refusal;

type Connectors = BTreeMap<&'static str, Arc<dyn Connector>>;

/// The rungs of a scheme, best first; none for a transport that is not on the ladder.
pub(super) fn levels_of(scheme: &str) -> &'static [Level] {
    match scheme {
        "mem" => &[Level::InProcess],
        "ucx" => &[Level::SharedMemory, Level::Rdma, Level::UcxTcp],
        "http" | "http+frames" | "unix+frames" => &[Level::Http],
        _ => &[],
    }
}

pub(super) struct Climb<'a> {
    connectors: &'a Connectors,
    ladder: &'a Ladder,
    endpoints: &'a [Endpoint],
    refused: Vec<Refusal>,
}

/// One thing to try.
struct Step<'a> {
    endpoint: &'a Endpoint,
    connector: &'a Arc<dyn Connector>,
    level: Option<Level>,
    /// What the connector is asked for: nothing, if it has one way only.
    asked: Option<Level>,
}

impl<'a> Climb<'a> {
    pub(super) fn new(connectors: &'a Connectors, ladder: &'a Ladder, endpoints: &'a [Endpoint]) -> Self {
        Self { connectors, ladder, endpoints, refused: Vec::new() }
    }

    pub(super) fn refused(&self) -> &[Refusal] {
        &self.refused
    }

    pub(super) async fn run(&mut self, cx: &CallContext, options: &ConnectOptions, ordered: bool) -> Result<Channel> {
        let steps = self.steps();
        let last_step = steps.len().saturating_sub(1);
        let mut last = None;
        for (at, step) in steps.into_iter().enumerate() {
            // A rung that hangs leaves time for those below it.
            let bounded = if at < last_step { cx.clone().at_most(cx.remaining() / 2) } else { cx.clone() };
            let options = step.asked.map_or_else(|| options.clone(), |level| options.clone().at(level));
            let error = match step.connector.connect(&bounded, step.endpoint, &options).await {
                Ok(channel) => match self.unfit(&step, &channel, ordered) {
                    None => return Ok(channel),
                    Some(error) => error,
                },
                Err(error) => error,
            };
            self.refuse(step.level, error.message());
            cx.check()?;
            // That an endpoint keeps no order is said only when nothing worse is to be said.
            if error.code() != Code::Unimplemented || last.is_none() {
                last = Some(error);
            }
        }
        Err(last.unwrap_or_else(|| self.nothing_tried()))
    }

    /// What is to be tried. What is not is refused right away.
    fn steps(&mut self) -> Vec<Step<'a>> {
        let mut steps = Vec::new();
        for endpoint in self.endpoints {
            let levels = levels_of(endpoint.scheme());
            let connector = self.connectors.get(endpoint.scheme());
            if levels.is_empty() {
                steps.extend(connector.map(|connector| Step { endpoint, connector, level: None, asked: None }));
            }
            for level in levels.iter().copied() {
                match (self.ladder.refusal(level), connector) {
                    (Some(why), _) => self.refuse(Some(level), &why),
                    (None, None) => self.refuse(Some(level), &absent(endpoint.scheme())),
                    (None, Some(connector)) => {
                        let asked = (levels.len() > 1).then_some(level);
                        steps.push(Step { endpoint, connector, level: Some(level), asked });
                    }
                }
            }
        }
        steps
    }

    fn refuse(&mut self, level: Option<Level>, why: &str) {
        // A peer with several endpoints of one rung has several reasons; the first was the better endpoint.
        if let Some(level) = level
            && !self.refused.iter().any(|known| known.level == level)
        {
            self.refused.push(Refusal { level, why: why.to_owned() });
        }
    }

    fn nothing_tried(&self) -> Error {
        let wanted: Vec<_> = self.endpoints.iter().map(Endpoint::as_str).collect();
        let here: Vec<_> = self.connectors.keys().copied().collect();
        Error::not_started(
            Code::Unimplemented,
            format!("no transport here for {}; this program has {}", wanted.join(", "), here.join(", ")),
        )
    }

    /// Why a channel that was opened will not do.
    fn unfit(&self, step: &Step<'_>, channel: &Channel, ordered: bool) -> Option<Error> {
        let path = channel.path();
        let refused = |why: String| Some(Error::not_started(Code::Unimplemented, why));
        if ordered && !path.ordered {
            return refused(format!(
                "{} keeps no order; give its http+frames or unix+frames endpoint too",
                step.endpoint
            ));
        }
        match (step.asked, path.level) {
            // Better than asked for is as good, where it is allowed; worse has a turn of its own.
            (Some(asked), Some(negotiated)) if negotiated > asked || !self.ladder.allows(negotiated) => {
                refused(format!("asked for {asked}, negotiated {negotiated} ({})", path.lanes))
            }
            (Some(asked), None) => {
                refused(format!("asked for {asked}, and the transport does not say what it negotiated"))
            }
            _ => None,
        }
    }

    /// The error of a peer that was not reached, with what was found on each rung and what to do about it. Where there was
    /// nothing to choose it stays as it is.
    pub(super) async fn explain(&self, error: Error) -> Error {
        let chosen = self.ladder.required().is_some()
            || self.refused.iter().any(|refusal| refusal.level.is_ucx() || !self.ladder.allows(refusal.level));
        if !chosen || self.refused.is_empty() || matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled) {
            return error;
        }
        let reasons: Vec<String> = self.refused.iter().map(ToString::to_string).collect();
        let peer = self.endpoints.last().map_or("", Endpoint::as_str);
        let missed = |level| self.ladder.allows(level) && self.refused.iter().any(|refusal| refusal.level == level);
        let mut fixes = Vec::new();
        if missed(Level::Rdma) {
            fixes.extend(rdma_here().await);
        }
        if self.ladder.levels().len() < Level::ALL.len() || self.ladder.required().is_some() {
            fixes.push(format!("allow more than `{}` by transport and require_transport", self.ladder));
        }
        if !self.endpoints.iter().any(|endpoint| endpoint.scheme() == "ucx") && self.ladder.uses_ucx() {
            fixes.push("give the peer the same transport setting: it offers no ucx endpoint".to_owned());
        }
        fixes.push("`rgym doctor` says what each host has".to_owned());
        let message =
            format!("no transport that may be used reaches it ({}); fix: {}", reasons.join("; "), fixes.join("; "));
        Error::not_started(error.code(), message).about(format!("connect to {peer}")).caused_by(error)
    }
}

fn absent(scheme: &str) -> String {
    let fix = match scheme {
        "ucx" if !cfg!(feature = "rdma") => ", which comes with the feature `rdma`",
        _ if scheme != "ucx" && !cfg!(feature = "http") => ", which comes with the feature `http`",
        _ => "",
    };
    format!("this program has no {scheme} transport{fix}")
}

/// What keeps this host from RDMA, if looking at its files can tell.
#[cfg(feature = "rdma")]
async fn rdma_here() -> Option<String> {
    let look = || gym_transport_rdma::ProbeOptions::new().without_loading().probe();
    let probe = tokio::task::spawn_blocking(look).await.ok()?;
    probe.rdma_fault().map(|fault| match &fault.fix {
        Some(fix) => format!("for rdma, here: {}: {fix}", fault.found),
        None => format!("for rdma, here: {}", fault.found),
    })
}

#[cfg(not(feature = "rdma"))]
#[expect(clippy::unused_async, reason = "the same as with the feature")]
async fn rdma_here() -> Option<String> {
    None
}
