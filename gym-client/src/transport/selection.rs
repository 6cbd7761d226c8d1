//! One attempt to connect to a peer: its transports in order of preference, until one connects.

use std::sync::Arc;

use gym_core::transport::{ConnectOptions, Connector, Transport, TransportPolicy};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Result};

use crate::transport::HTTP;
#[cfg(feature = "rdma")]
use crate::transport::RDMA;
use crate::transport::connectors::{Connectors, missing, transports_of};
use crate::transport::paths::Refusal;

pub(super) struct ConnectAttempt<'a> {
    connectors: &'a Connectors,
    policy: &'a TransportPolicy,
    endpoints: &'a [Endpoint],
    refused: Vec<Refusal>,
}

/// One endpoint and transport to try.
struct Candidate<'a> {
    endpoint: &'a Endpoint,
    connector: &'a Arc<dyn Connector>,
    transport: Option<Transport>,
    /// The transport that is requested from the connector; `None` if the connector has only one.
    requested: Option<Transport>,
}

impl<'a> ConnectAttempt<'a> {
    pub(super) fn new(connectors: &'a Connectors, policy: &'a TransportPolicy, endpoints: &'a [Endpoint]) -> Self {
        Self { connectors, policy, endpoints, refused: Vec::new() }
    }

    pub(super) fn refused(&self) -> &[Refusal] {
        &self.refused
    }

    pub(super) async fn run(&mut self, cx: &CallContext, options: &ConnectOptions, ordered: bool) -> Result<Channel> {
        let candidates = self.candidates();
        let last_candidate = candidates.len().saturating_sub(1);
        // What the policy refuses is refused again, however long a caller waits.
        let only_here =
            !self.refused.is_empty() && candidates.iter().all(|candidate| candidate.transport == Some(Transport::MEM));
        let mut last = None;
        for (at, candidate) in candidates.into_iter().enumerate() {
            // A transport that hangs leaves time for the next ones.
            let bounded = if at < last_candidate { cx.clone().at_most(cx.remaining() / 2) } else { cx.clone() };
            let options =
                candidate.requested.map_or_else(|| options.clone(), |transport| options.clone().at(transport));
            let error = match candidate.connector.connect(&bounded, candidate.endpoint, &options).await {
                Ok(channel) => match self.rejection(&candidate, &channel, ordered) {
                    None => return Ok(channel),
                    Some(error) => error,
                },
                Err(error) => error,
            };
            self.refuse(candidate.transport, error.message());
            cx.check()?;
            // An unordered endpoint is reported only if no other error occurred.
            if error.code() != Code::Unimplemented || last.is_none() {
                last = Some(error);
            }
        }
        Err(match last {
            None => self.nothing_tried(),
            Some(error) if only_here && error.code() == Code::Unavailable => {
                Error::not_started(Code::Unimplemented, error.message().to_owned()).about(error.subject().to_owned())
            }
            Some(error) => error,
        })
    }

    /// Returns the candidates to try. Records a rejection for all others.
    fn candidates(&mut self) -> Vec<Candidate<'a>> {
        let mut candidates = Vec::new();
        for endpoint in self.endpoints {
            let scheme = self.connectors.get(endpoint.scheme());
            let transports = scheme.map_or(transports_of(endpoint.scheme()), |scheme| &scheme.transports);
            for transport in transports.iter().copied() {
                match (self.policy.refusal(transport), scheme) {
                    (Some(reason), _) => self.refuse(Some(transport), &reason),
                    (None, None) => self.refuse(Some(transport), &missing(endpoint.scheme())),
                    (None, Some(scheme)) => {
                        let requested = (transports.len() > 1).then_some(transport);
                        candidates.push(Candidate {
                            endpoint,
                            connector: &scheme.connector,
                            transport: Some(transport),
                            requested,
                        });
                    }
                }
            }
        }
        candidates
    }

    fn refuse(&mut self, transport: Option<Transport>, reason: &str) {
        // If several endpoints have the same transport, the reason of the first one counts, because it is preferred.
        if let Some(transport) = transport
            && !self.refused.iter().any(|known| known.transport == transport)
        {
            self.refused.push(Refusal { transport, reason: reason.to_owned() });
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

    /// Returns the reason to reject an opened channel, if there is one.
    fn rejection(&self, candidate: &Candidate<'_>, channel: &Channel, ordered: bool) -> Option<Error> {
        let path = channel.path();
        let refused = |reason: String| Some(Error::not_started(Code::Unimplemented, reason));
        if ordered && !path.ordered {
            return refused(format!(
                "{} keeps no order; give its http+frames or unix+frames endpoint too",
                candidate.endpoint
            ));
        }
        match (candidate.requested, path.transport) {
            // A more preferred transport than requested is accepted if the policy allows it. A less preferred one is a separate
            // candidate.
            (Some(requested), Some(negotiated)) if negotiated > requested || !self.policy.allows(negotiated) => {
                refused(format!("asked for {requested}, negotiated {negotiated} ({})", path.lanes))
            }
            (Some(requested), None) => {
                refused(format!("asked for {requested}, and the transport does not say what it negotiated"))
            }
            _ => None,
        }
    }

    /// Returns a scheme with allowed transports, none of which the peer's endpoints offer.
    fn scheme_not_offered(&self) -> Option<&'static str> {
        let of = |scheme: &str| {
            self.connectors.get(scheme).map_or(transports_of(scheme), |scheme| scheme.transports.as_slice())
        };
        let offered: Vec<Transport> =
            self.endpoints.iter().flat_map(|endpoint| of(endpoint.scheme()).iter().copied()).collect();
        let missing = |scheme: &&'static str| {
            let mut wanted = of(scheme).iter().filter(|transport| self.policy.allows(**transport));
            wanted.clone().next().is_some()
                && wanted.all(|transport| *transport != Transport::MEM && !offered.contains(transport))
        };
        self.connectors.keys().copied().chain(["ucx"]).find(missing)
    }

    /// Adds the reason for each rejected transport, and the fix, to the error of a peer that was not reached. If the policy left no
    /// choice, returns the error unchanged.
    pub(super) async fn explain(&self, error: Error) -> Error {
        // A peer in another process always rejects the in-process transport, so that rejection does not count.
        let others = self.refused.iter().filter(|refusal| refusal.transport != Transport::MEM);
        let chosen = self.policy.required().is_some()
            || others.clone().any(|refusal| refusal.transport != HTTP || !self.policy.allows(refusal.transport));
        if !chosen || self.refused.is_empty() || matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled) {
            return error;
        }
        let reasons: Vec<String> = self.refused.iter().map(ToString::to_string).collect();
        let peer = self.endpoints.last().map_or("", Endpoint::as_str);
        let mut fixes = Vec::new();
        #[cfg(feature = "rdma")]
        if self.policy.allows(RDMA) && self.refused.iter().any(|refusal| refusal.transport == RDMA) {
            fixes.extend(crate::transport::ucx::rdma_fault().await);
        }
        if !self.policy.is_auto() {
            fixes.push(format!("allow more than `{}` by transport and require_transport", self.policy));
        }
        if let Some(scheme) = self.scheme_not_offered() {
            fixes.push(format!("give the peer the same transport setting: it offers no {scheme} endpoint"));
        }
        fixes.push("the command `doctor` says what each host has".to_owned());
        let message =
            format!("no transport that may be used reaches it ({}); fix: {}", reasons.join("; "), fixes.join("; "));
        Error::not_started(error.code(), message).about(format!("connect to {peer}")).caused_by(error)
    }
}
