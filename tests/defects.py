#!/usr/bin/env python3
"""Puts known defects back, one at a time, and reports which test finds each of them.

    tests/defects.py                  all defects
    tests/defects.py WORD…            those whose name contains a word
    tests/defects.py --list           the names, each with what has its tests: the gate or a tier; exit status 1 if a text is no longer in its file

A defect is one replaced text in one file, or several texts, also of several files, if two places guard against it, and the tests that must then fail. For the simulation, the
report says how many cases it took, and how many faults were left after shrinking. The script works on a copy of the last commit in a separate work
tree, so it changes nothing here. Exit status 1: a defect passed its tests, or its text is no longer in the file.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Cases that each setting may take. The rarest defect of the disk needs about 250.
CASES = "--seeds 3000 --branches 1000"
TIMEOUT_SECONDS = 1800


def simulation(*settings: str) -> str:
    """Arguments that search these settings until the first case fails, and shrink it."""
    chosen = " ".join(f"--setting {setting}" for setting in settings)
    return (
        "--profile simulation -p gym-server --no-default-features --test simulation -- search"
        f" {chosen} {CASES} --failures 1 --any"
    )


SERVERS, CLUSTER, GROUPS = simulation("servers"), simulation("cluster"), simulation("groups")
DEPLOYMENTS, WHOLE, REFERENCES = simulation("servers", "cluster"), simulation("whole"), simulation("values")

COLLECT = "gym-client/src/collect"
LEDGER = f"{COLLECT}/ledger"
MEMBERS = "gym-core/src/registry/table.rs"
QUEUE = "gym-core/src/rollout/work/queue.rs"
NODES = "gym-client/group/src/provision/nodes"
VALUES = "gym-client/src/client/values"
HOST = "gym-client/group/src/collective/host"
SCHEDULES = "--profile simulation -p gym-group --features testing --test collectives_simulation -- --ignored"
# Name, file, old text, new text, arguments of `cargo test`.
DEFECTS = [
    # Rows that were acknowledged, and their inputs, survive a power failure.
    ("rows-are-synced-instead-of-written-again", f"{COLLECT}/ledger/jsonl/recovery.rs",
     "files.rewrite(path, from, &[piece]).await", "{ let _ = (from, piece); files.append(path, &[], true).await }", SERVERS),
    ("rows-are-acknowledged-before-the-sync", f"{COLLECT}/ledger/jsonl/writer.rs",
     "files.append(path, &lines.pieces, true).await", "files.append(path, &lines.pieces, false).await", SERVERS),
    ("inputs-are-not-synced", f"{COLLECT}/files/chunks.rs",
     "files.append(path, &[], true).await?;", "files.append(path, &[], false).await?;", SERVERS),
    # An engine's error is no reward.
    ("any-error-about-max-tokens-is-an-overflow", "gym-server/src/model/overflow.rs",
     "(coded || exceeds(&text) || leaves_no_room(&text, output)).then_some(text)",
     "(coded || leaves_no_room(&text, output) || text.contains(\"max_tokens\") || text.contains(\"context length\")).then_some(text)",
     "-p gym-server --lib model"),
    ("a-response-without-its-field-is-a-response", "gym-server/src/model/upstream/mod.rs",
     "if object.get(key).is_none_or(|list| list.first() != Some(&b'[')) {", "if object.get(key).is_some_and(|list| list.first() != Some(&b'[')) {",
     "-p gym-server --lib model::"),
    # A broken tool is no reward.
    ("a-broken-tool-goes-to-the-model", "gym-core/src/server/tool_errors.rs",
     "            _ => Err(error),\n        }\n    }\n}", "            _ => Ok((response, Some(ToolErrorCause::Server))),\n        }\n    }\n}",
     "-p gym-server --lib agent::"),
    # Nothing is replaced without leave.
    ("an-existing-output-is-replaced", (f"{COLLECT}/collector/check.rs", f"{COLLECT}/collector/mod.rs"),
     ("return Err(output_exists(first));", "let (collection, requested, events) = Collection::open(self, &options).await?;"),
     ("let _ = output_exists(first);",
      "let mut options = options; if options.existing == ExistingOutput::Reject { options.existing = ExistingOutput::Overwrite; } "
      "let (collection, requested, events) = Collection::open(self, &options).await?;"),
     "-p gym-server --test cli -- results_and_inputs_are_replaced_only_if_asked"),
    ("files-are-compared-by-path", f"{COLLECT}/files/mod.rs",
     "if let Ok(found) = std::fs::metadata(&path) {", "if let Ok(found) = std::fs::metadata(\"\") {", "-p gym-client --lib collect::files"),
    ("the-input-may-be-an-output", f"{COLLECT}/collector/check.rs",
     "files.check_distinct(input, self.events.as_deref())?;", "let _ = files.check_distinct(input, self.events.as_deref());",
     "-p gym-server --test cli -- results_and_inputs_are_replaced_only_if_asked"),
    # A resumed collection requests the recorded rows.
    ("resume-ignores-all-changes", (f"{COLLECT}/collector/collection.rs", f"{COLLECT}/collector/check.rs"),
     ("(!resumes || compare_rows(files, partial).await?)", "compared.map(|_| requested)?"), ("(!resumes || partial.as_os_str().is_empty())", "{ let _ = compared; requested }"), "-p gym-server --test cli -- a_resumed_collection_may_grow_but_not_change"),
    ("resume-ignores-changed-values", f"{COLLECT}/resume/mod.rs",
     "if !same_scalar(old, new) {", "if was.is_none() && !same_scalar(old, new) {", "-p gym-client --lib collect::resume"),
    ("resume-ignores-fewer-repeats", f"{COLLECT}/resume/mod.rs",
     "differences.repeats.add(row.key, was.line)", "{}", "-p gym-client --lib collect::resume"),
    ("resume-ignores-fewer-tasks", f"{COLLECT}/resume/mod.rs",
     "differences.tasks.add(row.key, was.line)", "{}", "-p gym-client --lib collect::resume"),
    # No two incarnations of a rank are alive.
    ("the-watchdog-ignores-the-lease", "gym-client/src/launch/process/watchdog.rs",
     "() = lease_ended(lease) => {}", "() = async { let _ = lease; std::future::pending::<()>().await } => {}",
     "-p gym-group --features http --test workers -- ranks_of_a_stopped_node"),
    ("ranks-move-before-the-lease-ends", "gym-client/group/src/provision/nodes/state.rs",
     "join_all(lost.iter().map(|host| hosts[*host].fenced())).await;", "let _ = (&lost, NodeLink::fenced);",
     "-p gym-group --features http --test workers -- ranks_of_a_killed_node"),
    ("a-lease-counts-from-the-arrival-of-a-confirmation", "gym-client/group/src/provision/nodes/lease.rs",
     "if let Some((_, sent)) = self.sent.iter().find(|(known, _)| *known == number) {",
     "if let Some((_, sent)) = self.sent.iter().max().filter(|_| number > 0) {",
     "-p gym-group --lib provision::nodes::lease"),
    # Each outcome counts once, and none is lost.
    ("an-outcome-of-an-older-attempt-counts", f"{LEDGER}/states.rs",
     "std::cmp::Ordering::Less => Some(LateReason::Newer(known.next() - 1)),", "std::cmp::Ordering::Less => None,", DEPLOYMENTS),
    ("an-attempt-can-have-two-outcomes", f"{LEDGER}/states.rs",
     "next_and_flags &= !RUNNING;", "next_and_flags &= !0;", "-p gym-client --lib collect::ledger"),
    ("a-completed-rollout-is-not-over", f"{LEDGER}/states.rs",
     "return Some(LateReason::Completed);", "return None;", DEPLOYMENTS),
    ("a-number-of-an-attempt-is-given-again-after-a-restart", f"{LEDGER}/states.rs",
     "if known.next() <= attempt.number {", "if known.next() > attempt.number && known.next() == 0 {", DEPLOYMENTS),
    ("a-lost-worker-uses-up-the-attempts-of-the-task", f"{LEDGER}/states.rs",
     "OutcomeClass::Lost => known.lost = known.lost.saturating_add(1),", "OutcomeClass::Lost => known.failures = known.failures.saturating_add(1),",
     "-p gym-client --lib collect::ledger"),
    ("a-torn-line-is-kept", f"{LEDGER}/jsonl/recovery.rs",
     "files.truncate(path, length).await?;", "let _ = (path, length);", DEPLOYMENTS),
    ("the-index-is-believed-without-its-checksum", f"{LEDGER}/jsonl/recovery.rs",
     "let same = crc32c::crc32c(line) == record.crc;", "let same = true;", "-p gym-client --lib collect::ledger"),
    # Leases of servers.
    ("a-lease-never-expires", "gym-core/src/registry/state.rs",
     ("let lives = entry.expires > now;", ".is_none_or(|entry| entry.expires > now)"), ("let lives = entry.ttl > Duration::ZERO || entry.expires > now;", ".is_none_or(|_| true)"), SERVERS),
    ("a-replaced-lease-is-renewed", "gym-core/src/registry/state.rs",
     "held.filter(|there| there.incarnation == lease.incarnation)?;", "held?;", SERVERS),
    # Agents: a run that failed has run, and a request that is sent again joins the first one.
    ("a-run-whose-call-did-not-start-did-not-start", "gym-server/src/role/agent.rs",
     "responding.await.map_err(Error::of_served_request)?", "responding.await?", WHOLE),
    ("a-repeated-run-is-a-second-episode", "gym-server/src/environment/deduplication.rs",
     "joins(episode) && episode.body == *body", "joins(episode) && episode.body.len() == body.len() + 1",
     "-p gym-server --lib environment::deduplication"),
    ("two-clients-with-the-same-rows-share-their-rollouts", "gym-server/src/environment/deduplication.rs",
     "first(&InFlightRun::is_abandoned)", "first(&|_| true)", "-p gym-server --lib environment::relay"),
    ("a-call-id-is-not-looked-at", "gym-server/src/environment/deduplication.rs",
     "episode.call.as_deref() == Some(call)", "episode.call.as_deref() == Some(call) && episode.is_abandoned()", "-p gym-server --lib environment::relay"),
    ("a-run-is-sent-again-to-a-server-that-does-not-join-it", "gym-client/src/client/replicas/mod.rs",
     "self.joins_runs && request", "request", "-p gym-client --test kept_connections"),
    ("a-session-whose-connection-broke-is-lost", "gym-client/src/client/session.rs",
     "if error.class() == Some(FailureClass::TransportPeerDrop)", "if error.class() == Some(FailureClass::Cancelled)", "-p gym-client --test kept_connections"),
    ("a-refused-repetition-says-that-nothing-ran", "gym-transport-http/src/http1/connector.rs",
     "answered = after(broke, answered);", "drop(broke);", "-p gym-transport-http --test connector"),
    ("a-new-attempt-joins-the-older-one", "gym-server/src/environment/deduplication.rs",
     ("texts.extend_from_slice(&body.get(\"_ng_attempt_index\").unwrap_or_default());", "joins(episode) && episode.body == *body"),
     ("", "joins(episode)"), SERVERS),
    # Members.
    ("a-silent-member-is-never-gone", MEMBERS, "let silent = self.heard + self.spec.timing.timeout;", "let silent = self.heard + self.spec.timing.timeout * 1000;", CLUSTER),
    ("a-member-that-returns-serves-without-a-probe", MEMBERS,
     "(false, MemberState::Suspect) => MemberState::Joining,", "(false, MemberState::Suspect) => MemberState::Serving,", "-p gym-core --lib registry"),
    ("the-late-end-of-an-older-connection-counts", MEMBERS, "if entry.seq == seq {", "if entry.seq >= seq {", CLUSTER),
    ("a-heartbeat-does-not-end-a-broken-connection", MEMBERS,
     "(entry.seq, entry.heard, entry.broken) = (heartbeat.seq, now, None);", "(entry.seq, entry.heard) = (heartbeat.seq, now);", CLUSTER),
    ("a-member-is-gone-when-it-is-late", MEMBERS, "if entry.gone_at() <= now {", "if entry.suspect_at() <= now {", CLUSTER),
    ("the-servers-of-a-member-that-is-gone-stay", MEMBERS,
     "self.take(&(server.name.clone(), *replica), why.as_deref());", "let _ = (server, rank, &why);", CLUSTER),
    ("a-suspect-member-is-not-paused", MEMBERS, "let paused = to != MemberState::Serving;", "let paused = to == MemberState::Joining;", CLUSTER),
    ("the-end-of-the-recovery-is-not-told", MEMBERS,
     "self.version += 1;\n            self.changes.clear();", "", CLUSTER),
    # The queue.
    ("a-lost-rollout-is-handed-out-again", QUEUE, "if self.classes.get(item.class).repeatable {", "if self.classes.get(item.class).waiting.len() < usize::MAX {", CLUSTER),
    ("the-answer-to-a-repeated-poll-is-empty", QUEUE,
     "items.retain(|id| worker.holds.contains(id) && !worker.cancelled.contains(id));", "items.clear();", "-p gym-core --lib rollout::work"),
    ("a-repeated-poll-gets-what-it-has-finished", QUEUE,
     "items.retain(|id| worker.holds.contains(id) && !worker.cancelled.contains(id));", "", "-p gym-core --lib rollout::work"),
    ("an-older-process-takes-work", QUEUE, "if known.id.incarnation > who.incarnation {", "if known.id.incarnation > who.incarnation && poll.number == 0 {", "-p gym-core --lib rollout::work"),
    ("a-silent-worker-keeps-its-work", QUEUE, "filter(|worker| worker.due <= now)", "filter(|worker| worker.due <= now && worker.holds.is_empty())", CLUSTER),
    ("a-call-of-a-lost-worker-waits-on", "gym-client/src/work/pool/state.rs", "for id in lost.ended {", "for id in lost.ended.into_iter().skip(1) {", "-p gym-client --test work"),
    ("a-paused-worker-gets-work", "gym-client/src/work/pool/state.rs", "!listed.serves(name, member.incarnation)", "{ let _ = (listed, member); false }", CLUSTER),
    ("the-pool-does-not-hear-of-lost-members", "gym-client/src/work/members.rs", "let reason = gone.lost.clone()?;", "let reason = gone.lost.clone().filter(|_| false)?;", CLUSTER),
    ("a-recovering-head-removes-members", "gym-client/src/work/members.rs",
     "if update.complete && !update.recovering {", "if update.complete {", "-p gym-client --lib work::members"),
    ("a-worker-that-a-young-head-does-not-list-is-lost", "gym-client/src/work/members.rs",
     "let lost: Vec<LostMember> = changed.collect();",
     """let mut lost: Vec<LostMember> = changed.collect();
        if update.complete && !update.recovering {
            let listed = |name: &str| update.changes.iter().any(|change| matches!(change, ServerChange::Present(server) if server.member.as_deref() == Some(name)));
            lost.extend(self.members.iter().filter(|(name, _)| !listed(name)).map(|(name, member)| LostMember { name: name.clone(), incarnation: member.incarnation, reason: String::new() }));
        }""", CLUSTER),
    ("a-silent-member-is-lost-before-its-timeout", "gym-core/src/rollout/work/queue.rs", "worker.due = due.max(worker.heard + worker.response_timeout);", "worker.due = due;", "-p gym-client --test work"),
    ("a-suspect-worker-has-no-reason", "gym-client/src/work/pool/mod.rs", "suspect: state.suspect(now, &who.name),", "suspect: None,", "-p gym-client --test work"),
    ("a-member-tells-an-old-time", "gym-client/src/registry/member.rs", "self.spec.tell_time(&self.world);", "let _ = &self.world;", "-p gym-client --test members"),
    ("no-call-waits-for-a-server-that-is-away", "gym-client/src/client/server_client/away.rs", "request.verb != Verb::Get", "request.verb == Verb::Get", "-p gym-client --test outage"),
    ("each-call-asks-a-server-that-is-away", "gym-client/src/client/server_client/away.rs", "let mut asked = outage.asking.lock().await;", "let mut asked = *outage.asking.lock().await; let asked = &mut asked;", "-p gym-client --test outage"),
    ("a-worker-runs-on-for-a-pool-that-is-gone", "gym-client/src/work/puller.rs", "if since.elapsed() >= CALL_WAIT_TIMEOUT {", "if since.elapsed() >= CALL_WAIT_TIMEOUT * 1_000 {", "-p gym-client --test work"),
    ("an-episode-outlives-its-caller-for-the-whole-grace", "gym-server/src/environment/deduplication.rs", "wait.map_or(self.shared.grace, |wait| wait.min(self.shared.grace))", "wait.map_or(self.shared.grace, |_| self.shared.grace)", "-p gym-server --lib environment"),
    # Doors, and rows that do not fit.
    ("a-stranger-takes-work-of-a-pool-that-others-reach", "gym-client/src/work/pool/mod.rs",
     "state.admits(&who.name, member)?;", "let _ = state.admits(&who.name, member);", "-p gym-client --test work a_pool_that_other_machines_reach"),
    ("a-web-page-changes-the-cluster", "gym-core/src/message/request.rs",
     'if self.context.metadata.get("origin").is_some() {', "if false {", "-p gym-server --lib web_pages_change_nothing"),
    ("a-row-that-does-not-fit-has-no-class-of-its-own", "gym-core/src/server/validation.rs",
     "Err(Error::invalid(text).with_class(FailureClass::RowInvalid))", "Err(Error::invalid(text))", "-p gym-server --lib a_row_that_does_not_fit"),
    ("finished-items-are-forgotten-at-each-poll", "gym-client/src/work/pool/mod.rs", "if joins {\n                    tracing::info!(", "if true {\n                    tracing::info!(", "-p gym-client --test work"),
    # Groups: each rank lives once, and a call says what it did.
    ("bundles-move-before-the-node-is-fenced", f"{NODES}/state.rs",
     "join_all(lost.iter().map(|host| hosts[*host].fenced())).await;", "let _ = (&lost, NodeLink::fenced);", GROUPS),
    ("a-lease-counts-from-the-confirmation", f"{NODES}/lease.rs",
     "if let Some((_, sent)) = self.sent.iter().find(|(known, _)| *known == number) {", "if let Some((_, sent)) = self.sent.iter().max().filter(|_| number > 0) {", GROUPS),
    ("an-agent-starts-ranks-after-its-lease", f"{NODES}/agent/session.rs", "if self.lease.lock().until() <= self.here.now() {", "if self.lease.lock().until() < Duration::ZERO {",
     "-p gym-group --lib provision::nodes::agent"),
    ("ranks-outlive-the-lease", f"{NODES}/agent/session.rs", "join_all(launches.iter().map(|launch| launch.ranks.lease(until))).await;", "let _ = (launches, until);", GROUPS),
    ("a-session-outlives-its-lease", f"{NODES}/agent/session.rs", "if left.is_zero() {", "if left.is_zero() && *self.ending.borrow() {", GROUPS),
    ("a-repeated-launch-prepares-the-ranks-again", f"{NODES}/agent/session.rs",
     ("if self.launches.lock().contains_key(&number) {", "launches.entry(number).or_insert(NodeLaunch { ranks, _events: Arc::new(AbortOnDropHandle::new(events)) });"),
     ("if false {", "launches.insert(number, NodeLaunch { ranks, _events: Arc::new(AbortOnDropHandle::new(events)) });"), "-p gym-group --lib provision::nodes::agent"),
    ("an-event-of-a-node-is-skipped", f"{NODES}/link.rs", "self.seen += reply.events.len();", "self.seen += reply.events.len() + usize::from(reply.events.len() > 2);", GROUPS),
    ("the-exit-of-an-older-incarnation-counts", "gym-client/group/src/supervise/record.rs",
     ".filter(|record| record.incarnation.0 == exit.incarnation)?", "?", "-p gym-group --lib supervise"),
    ("a-lost-rank-keeps-its-seat", "gym-client/group/src/supervise/seating.rs", "        if gone.is_empty() {\n", "        if gone.len() < 9 {\n", "-p gym-group --lib supervise::seating"),
    ("a-rank-waits-for-one-that-was-lost", "gym-core/src/group/collective/peers/mod.rs",
     "newer.as_ref().and_then(|newer| newer.changes(&known.of(&ranks)))", "newer.as_ref().and_then(|newer| newer.changes(&[]))", "-p gym-core --lib collective::peers"),
    ("a-failed-meeting-is-used-again", "gym-core/src/group/collective/peers/mod.rs",
     "slot.communicator.closed().now_or_never().is_some())", "slot.communicator.closed().now_or_never().is_some() && epoch > 9)", "-p gym-core --lib collective::peers"),
    ("a-sum-begins-at-its-owner", "gym-core/src/group/collective/reduction/mod.rs",
     "(1..=world_size).map(move |step|", "(0..world_size).map(move |step|", "-p gym-core --test collectives"),
    ("the-second-cause-of-a-failure-wins", "gym-core/src/group/collective/cause.rs",
     "let first = cause.is_none();", "let first = true;", "-p gym-core --test collectives"),
    ("a-rank-keeps-its-own-cause-of-a-failure", f"{HOST}/participant/failure.rs",
     "return self.adopt(first);", "drop(first);\n                return self.adopt(why);", SCHEDULES),
    ("the-cause-is-not-agreed-on-while-the-first-rank-stands-still", f"{HOST}/participant/failure.rs",
     "for asks_all in [true, false] {", "for asks_all in [false] {", SCHEDULES),
    ("a-rank-that-stood-still-is-not-told-of-a-failure", f"{HOST}/participant/mod.rs",
     "Err(error) if error.code() == Code::DeadlineExceeded => {}", "Err(error) if error.code() == Code::DeadlineExceeded => break,", "-p gym-group --lib collective::host"),
    ("a-refused-message-is-noticed-at-the-deadline", f"{HOST}/ring.rs",
     "let mut heard = answers.during(participant, round.heard(call)).await?;", "let mut heard = round.heard(call).await?;", "-p gym-group --lib collective::host"),
    ("a-queued-operation-has-no-deadline", f"{HOST}/lane.rs",
     "let watch = behind_others.then(|| {", "let watch = (behind_others && operation.memory.len() == usize::MAX).then(|| {", SCHEDULES),
    ("calls-that-differ-in-length-are-added", f"{HOST}/ring.rs",
     "Some(call) if !call.agrees_with(&own) =>", "Some(call) if call.operation != own.operation =>", "-p gym-group --test collectives in_one_thread"),
    ("the-ring-skips-a-chunk-between-groups", f"{HOST}/ring.rs",
     "(0..longest).step_by(GROUP).map(|first|", "(0..longest).step_by(GROUP + 1).map(|first|", "-p gym-group --test collectives in_one_thread"),
    ("a-chunk-that-the-transport-received-elsewhere-is-lost", f"{HOST}/pieces.rs",
     "if self.0.places[at].address != chunk.as_ptr().addr() {", "if self.0.places[at].length != chunk.len() {", "-p gym-group --test collectives in_one_thread"),
    ("a-chunk-is-received-in-the-memory-of-another-operation", f"{HOST}/participant/mod.rs",
     "(expected.number == packet.number).then(|| expected.pieces.lend(piece))?", "expected.pieces.lend(piece)", "-p gym-group --lib collective::host"),
    ("a-buffer-waits-for-a-connection-that-holds-a-part-of-it", f"{HOST}/pieces.rs",
     "drop(timeout(BACK_TIMEOUT, self.join()).await);", "self.join().await;", "-p gym-group --lib collective::host"),
    ("a-rank-that-gave-up-its-join-has-left", f"{HOST}/participant/mod.rs",
     "(Some(id), None) => seat.gave_up = seat.gave_up.max(Some(id)),", "(Some(_), None) if false => {}", "-p gym-group --test collectives in_one_thread"),
    ("a-sent-call-did-not-start", "gym-client/group/src/call/gather/mod.rs",
     "if self.sent[index].load(Ordering::Acquire) { Execution::Unknown } else { Execution::NotStarted }", "Execution::NotStarted", GROUPS),
    # References: a value that is held can be fetched, and one that is gone leaves nothing.
    ("a-value-ends-with-its-handle", f"{VALUES}/held.rs",
     "entry.until = Some(Instant::now() + self.values.lease);", "entry.until = Some(Instant::now());", REFERENCES),
    ("a-copy-in-use-is-removed", f"{VALUES}/copy.rs",
     "match open_locked(path, FlockOperation::NonBlockingLockExclusive)? {", "match open_locked(path, FlockOperation::NonBlockingLockShared)? {", REFERENCES),
    ("two-processes-of-a-node-fetch-one-value", f"{VALUES}/copy.rs",
     "if !locked(&file, FlockOperation::NonBlockingLockExclusive)? || !is_at(&file, &part)? {", "if !is_at(&file, &part)? {", REFERENCES),
    ("copies-exceed-their-limit", f"{VALUES}/copy.rs",
     "let mut used: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();", "let mut used: u64 = files.iter().map(|(_, bytes, _)| bytes / 2).sum();", REFERENCES),
    ("a-copy-outlives-its-lease-on-a-clock-that-was-set-back", f"{VALUES}/copy.rs",
     "Ok(if now < begin { Duration::ZERO } else { left.min(whole) })", "Ok(if now < begin { left } else { left.min(whole) })", REFERENCES),
    ("what-a-dead-process-fetched-stays", f"{VALUES}/copy.rs",
     "let left = if complete { lease_left(&found, &self.world)? } else { Duration::ZERO };", "let left = if complete { lease_left(&found, &self.world)? } else { Duration::MAX };", REFERENCES),
    ("a-value-that-is-gone-takes-memory", f"{VALUES}/held.rs", "            self.memory -= entry.bytes;\n", "            let _ = entry.bytes;\n", REFERENCES),
]


def found_by(output: str) -> str:
    """Says which test failed, or which case of the simulation and what was left of it."""
    case = re.search(r"^(\S+), the (\d+)\. case, fails: (.*)", output, re.MULTILINE)
    if case:
        shrunk = re.search(r"shrunk in (\d+) runs to (\d+) faults; play it with: replay (\S+)", output)
        to = f", shrunk in {shrunk[1]} runs to {shrunk[2]} faults ({shrunk[3]})" if shrunk else ""
        return f"the simulation's {case[2]}. case{to}: {case[3]}"
    endless = re.search(r"^\S+ does not end: .*", output, re.MULTILINE)
    if endless:
        return f"the simulation: {endless[0]}"
    names = [line.split()[1] for line in output.splitlines() if line.startswith("test ") and line.endswith("FAILED")]
    return ", ".join(names) or "\n".join(output.splitlines()[-5:])


def replacements(defect: tuple) -> list[tuple[str, str, str]]:
    """The file, the old and the new text of each place of a defect."""
    _, files, old, new, _ = defect
    if isinstance(old, str):
        return [(files, old, new)]
    return list(zip([files] * len(old) if isinstance(files, str) else files, old, new))


def stale_in(tree: Path, defect: tuple) -> str | None:
    """Says that the text of a defect is no longer in its file, or more than once."""
    for file, was, _ in replacements(defect):
        places = (tree / file).read_text().count(was) if (tree / file).exists() else 0
        if places != 1:
            return f"{defect[0]}: STALE: {file} has {places} places with the text of this defect; update the defect"
    return None


def check(tree: Path, defect: tuple, environment: dict[str, str]) -> bool:
    name, arguments = defect[0], defect[-1]
    if stale := stale_in(tree, defect):
        print(stale, flush=True)
        return False
    texts = {tree / file: (tree / file).read_text() for file, _, _ in replacements(defect)}
    for file, was, becomes in replacements(defect):
        (tree / file).write_text((tree / file).read_text().replace(was, becomes))
    begun = time.monotonic()
    ran = subprocess.Popen(["cargo", "test", *arguments.split()], cwd=tree, env=environment, text=True, start_new_session=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = ran.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(ran.pid, signal.SIGKILL)
        ran.communicate()
        print(f"{name}: NO RESULT within {TIMEOUT_SECONDS} s of `cargo test {arguments}`", flush=True)
        return False
    finally:
        for path, text in texts.items():
            path.write_text(text)
    took = f"{time.monotonic() - begun:.0f} s"
    if ran.returncode == 0:
        print(f"{name}: NOT FOUND by `cargo test {arguments}` ({took})", flush=True)
        return False
    if "error: could not compile" in output:
        print(f"{name}: DOES NOT COMPILE\n{output[-2000:]}", flush=True)
        return False
    print(f"{name}: found in {took} by {found_by(output)}", flush=True)
    return True


def main() -> int:
    words = sys.argv[1:]
    if words == ["--list"]:
        stale = [place for place in (stale_in(ROOT, defect) for defect in DEFECTS) if place]
        for defect in DEFECTS:
            print(f"{'tier simulation' if '--profile simulation' in defect[-1] else 'gate':16} {defect[0]}")
        print("\n".join(stale), end="\n" if stale else "")
        return 1 if stale else 0
    if any(word.startswith("-") for word in words):
        print(__doc__)
        return 2
    defects = [defect for defect in DEFECTS if not words or any(word in defect[0] for word in words)]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target" / "defects"))
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target), "CARGO_INCREMENTAL": "0"}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), "HEAD"], cwd=ROOT, check=True)
        try:
            found = [check(tree, defect, environment) for defect in defects]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print(f"{sum(found)} of {len(found)} defects found")
    return 0 if found and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
