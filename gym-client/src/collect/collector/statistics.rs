//! The statistics at the end of a collection: requested from the environment servers, or computed here.
//!
//! A server that computes the standard statistics says so in the metadata of its reply. For many rollouts, the collector then computes
//! them from the rollouts file, because request and reply would contain every rollout: memory does not grow with the rows, and no
//! message has a limit that they reach. Only servers with statistics of their own receive all rollouts, in one request, as NeMo Gym
//! defines it.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gym_core::rollout::metrics::{AggregateOptions, MetricsError, STANDARD_STATISTICS, STATISTICS_METADATA};
use gym_core::{CallContext, Code, Error, Request, Response, Result, Rope, Route};
use tokio::sync::mpsc;

use crate::client::CallOptions;
use crate::collect::collector::{BUFFER_BYTES, RolloutCollector, blocking, open};
use crate::collect::files::OutputFiles;
use crate::collect::files::chunks::{CHUNKS_AHEAD, ChunkWriter, replace_json_file};
use crate::collect::report::{AggregateRequest, ReportEntry, ReportWriter, RolloutsIndex, ServerCoverage, label_runs};
use crate::work::WorkKind;

/// Limit for one aggregate request; a server takes seconds for the statistics of a million rollouts.
const AGGREGATE_TIMEOUT: Duration = Duration::from_secs(600);

/// Aggregate requests are sent in pieces of at least this size.
const PIECE_BYTES: usize = 256 << 10;

/// The largest request, and the largest reply: about two million rollouts with a dozen fields. Both are in memory at once. Over HTTP, a
/// server of this SDK accepts a quarter of this size unless its `request_bytes_max` is raised.
const AGGREGATE_BYTES_MAX: usize = 1 << 30;

/// Up to this number of rollouts, all are sent without asking how the server computes its statistics: the request has a few megabytes.
const SENT_ROLLOUTS_MAX: usize = 10_000;

/// The origin of the statistics of one environment server.
enum Statistics {
    /// The body of its response.
    Reply(Bytes),
    /// The standard statistics, computed from the rollouts file.
    Computed,
}

impl RolloutCollector {
    /// Writes the report with the statistics of each environment server's rollouts.
    pub(super) async fn aggregate(&self, files: &OutputFiles) -> Result<()> {
        let names = self.names.clone();
        let rollouts = files.rollouts.clone();
        let index = Arc::new(
            blocking(move || {
                let file = BufReader::with_capacity(BUFFER_BYTES, open(&rollouts)?);
                RolloutsIndex::scan(file, rollouts.display().to_string(), |agent| {
                    names.server_of_agent(agent).map(|(server, _)| server).map_err(|error| error.to_string())
                })
                .map_err(|error| Error::internal(error.to_string()))
            })
            .await?,
        );
        let mut statistics = Vec::new();
        for (at, group) in index.groups().iter().enumerate() {
            let computes = group.count() > SENT_ROLLOUTS_MAX && self.has_standard_statistics(&group.server).await;
            statistics.push(if computes {
                Statistics::Computed
            } else {
                Statistics::Reply(self.requested_statistics(&index, at, &files.rollouts).await?)
            });
        }
        let coverage = self.coverage();
        let (chunks, written) = mpsc::channel(CHUNKS_AHEAD);
        let rollouts = files.rollouts.clone();
        let writing =
            blocking(move || write_statistics(&index, &rollouts, &statistics, &coverage, ChunkWriter::new(chunks)));
        replace_json_file(&*self.world.files, &files.aggregate, written, writing).await
    }

    /// Returns the coverage of each environment server.
    fn coverage(&self) -> BTreeMap<String, ServerCoverage> {
        let incomplete = self.progress.incomplete_tasks(usize::MAX);
        let mut servers: BTreeMap<String, ServerCoverage> = BTreeMap::new();
        for (agent, summary) in self.progress.agent_summaries() {
            // A row that names no agent names its server.
            let server = self.names.server_of_agent(&agent).map_or_else(|_| agent.to_string(), |(server, _)| server);
            let incomplete = incomplete.get(&agent).map_or(&[][..], Vec::as_slice);
            let named = (*agent != *server).then(|| agent.to_string());
            let coverage = servers.entry(server).or_default();
            coverage.add(&summary, incomplete);
            coverage.agent = coverage.agent.take().or(named);
        }
        servers
    }

    /// Asks a server whether it computes the standard statistics. Servers in other languages do not say so; an error means no.
    async fn has_standard_statistics(&self, server: &str) -> bool {
        match self.request_statistics(server, Bytes::from_static(br#"{"verify_responses":[]}"#).into()).await {
            Ok(response) => response.metadata.get(STATISTICS_METADATA) == Some(STANDARD_STATISTICS),
            Err(error) => {
                tracing::debug!(server, %error, "the server does not say how it computes statistics");
                false
            }
        }
    }

    async fn requested_statistics(&self, index: &Arc<RolloutsIndex>, group: usize, rollouts: &Path) -> Result<Bytes> {
        let (index_of, rollouts) = (Arc::clone(index), rollouts.to_owned());
        let body = blocking(move || aggregate_body(&index_of, group, &rollouts, AGGREGATE_BYTES_MAX)).await?;
        let response = self.request_statistics(&index.groups()[group].server, body).await?;
        Ok(response.message.head.to_bytes())
    }

    async fn request_statistics(&self, server: &str, body: Rope) -> Result<Response> {
        let mut cx = CallContext::within(AGGREGATE_TIMEOUT);
        cx.reply_bytes_max = AGGREGATE_BYTES_MAX;
        let request = Request::post(cx, Route::from_static("/aggregate_metrics"), body);
        let is_pulled = self.pulled.as_ref().is_none_or(|pulled| pulled.contains(server));
        let response = match self.pool.as_ref().filter(|_| is_pulled) {
            Some(pool) => pool.submit(WorkKind::Repeatable, server, &request).await?,
            None => self.client.send(server, &request, CallOptions::idempotent()).await?,
        };
        response.into_result().map_err(|error| error.about(format!("POST {server}/aggregate_metrics")))
    }
}

fn write_statistics(
    index: &RolloutsIndex,
    rollouts: &Path,
    statistics: &[Statistics],
    coverage: &BTreeMap<String, ServerCoverage>,
    writer: ChunkWriter,
) -> Result<()> {
    let mut agents: BTreeMap<String, Option<String>> =
        coverage.iter().map(|(server, coverage)| (server.clone(), coverage.agent.clone())).collect();
    agents.extend(index.groups().iter().map(|group| (group.server.clone(), group.agent.clone())));
    let labels = label_runs(&agents);
    let fail = |error: MetricsError| Error::internal(error.to_string());
    let mut report = ReportWriter::new(writer).map_err(fail)?;
    for (group, statistics) in index.groups().iter().zip(statistics) {
        let label = &labels[&group.server];
        let coverage = coverage.get(&group.server);
        match statistics {
            Statistics::Reply(reply) => {
                let reply = std::str::from_utf8(reply).map_err(|error| {
                    Error::finished(Code::DataLoss, "the reply is not valid UTF-8").caused_by(error)
                })?;
                report.add_reply(&ReportEntry { label: label.clone(), server: group.server.clone(), reply }, coverage)
            }
            Statistics::Computed => {
                let mut file = BufReader::with_capacity(BUFFER_BYTES, open(rollouts)?);
                let rows = index.rows(group, &mut file);
                report.add_computed(label, &group.server, rows, AggregateOptions::default(), coverage)
            }
        }
        .map_err(fail)?;
    }
    let recorded = |server: &str| index.groups().iter().any(|group| group.server == server);
    for (server, coverage) in coverage.iter().filter(|(server, _)| !recorded(server)) {
        // Not a single rollout of this server succeeded, so it has no statistics.
        let entry = ReportEntry { label: labels[server].clone(), server: server.clone(), reply: "{}" };
        report.add_reply(&entry, Some(coverage)).map_err(fail)?;
    }
    report.end().map_err(fail)
}

/// Builds the request body from several pieces, so that it is never copied into one buffer.
fn aggregate_body(index: &RolloutsIndex, group: usize, rollouts: &Path, bytes_max: usize) -> Result<Rope> {
    let group = &index.groups()[group];
    let mut file = BufReader::new(open(rollouts)?);
    let mut request = AggregateRequest::new(index.rows(group, &mut file));
    let (mut body, mut bytes) = (Rope::new(), 0);
    let mut piece = String::new();
    loop {
        let before = piece.len();
        let more = request.next_piece(&mut piece).map_err(|error| Error::internal(error.to_string()))?;
        bytes += piece.len() - before;
        if bytes > bytes_max {
            let text = format!(
                "the aggregate request for the rollouts of {} exceeds {bytes_max} bytes; split the output and aggregate each part",
                group.server
            );
            return Err(Error::not_started(Code::ResourceExhausted, text).about(rollouts.display().to_string()));
        }
        if piece.len() >= PIECE_BYTES || !more {
            body.push(std::mem::take(&mut piece).into());
        }
        if !more {
            return Ok(body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aggregate_request_beyond_its_bound_is_an_error_that_names_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rollouts.jsonl");
        let rows = (0..3).map(|rollout| {
            format!("{{\"_ng_environment_server\":\"env\",\"_ng_rollout_index\":{rollout},\"reward\":1.0}}\n")
        });
        let text: String = rows.collect();
        std::fs::write(&path, &text).unwrap();
        let index = RolloutsIndex::scan(text.as_bytes(), "rollouts.jsonl", |agent| Err(agent.to_owned())).unwrap();
        let whole = aggregate_body(&index, 0, &path, usize::MAX).unwrap().len();
        assert_eq!(aggregate_body(&index, 0, &path, whole).unwrap().len(), whole);
        let error = aggregate_body(&index, 0, &path, whole - 1).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(
            error.to_string().contains(&format!("aggregate request for the rollouts of env exceeds {}", whole - 1))
        );
    }
}
