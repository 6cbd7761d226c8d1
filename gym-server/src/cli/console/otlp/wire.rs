//! Spans in the form of OTLP: the protobuf message `ExportTraceServiceRequest`, of which ten fields are needed.

use std::time::Duration;

/// A span that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SpanRecord {
    pub(super) trace_id: u128,
    pub(super) span_id: u64,
    /// 0 for the first span of a trace.
    pub(super) parent_id: u64,
    pub(super) name: String,
    /// Since the Unix epoch.
    pub(super) began: Duration,
    pub(super) ended: Duration,
    pub(super) attributes: Vec<(&'static str, String)>,
    /// A call answered with an error, or an attempt that failed.
    pub(super) failed: bool,
}

/// The first span of a trace is the collector's own work, all others are calls that a server answers.
const KIND_INTERNAL: u64 = 1;
const KIND_SERVER: u64 = 2;
const STATUS_ERROR: u64 = 2;

/// Returns the message with these spans, from a process with these attributes.
pub(super) fn request(resource: &[(&'static str, String)], spans: &[SpanRecord]) -> Vec<u8> {
    let mut of_resource = Vec::new();
    resource.iter().for_each(|(key, value)| bytes(&mut of_resource, 1, &attribute(key, value)));
    let mut scope = Vec::new();
    bytes(&mut scope, 1, b"gym");
    let mut of_scope = Vec::new();
    bytes(&mut of_scope, 1, &scope);
    spans.iter().for_each(|record| bytes(&mut of_scope, 2, &span(record)));
    let mut resource_spans = Vec::new();
    bytes(&mut resource_spans, 1, &of_resource);
    bytes(&mut resource_spans, 2, &of_scope);
    let mut request = Vec::new();
    bytes(&mut request, 1, &resource_spans);
    request
}

fn span(record: &SpanRecord) -> Vec<u8> {
    let mut out = Vec::new();
    bytes(&mut out, 1, &record.trace_id.to_be_bytes());
    bytes(&mut out, 2, &record.span_id.to_be_bytes());
    if record.parent_id != 0 {
        bytes(&mut out, 4, &record.parent_id.to_be_bytes());
    }
    bytes(&mut out, 5, record.name.as_bytes());
    number(&mut out, 6, if record.parent_id == 0 { KIND_INTERNAL } else { KIND_SERVER });
    nanoseconds(&mut out, 7, record.began);
    nanoseconds(&mut out, 8, record.ended);
    record.attributes.iter().for_each(|(key, value)| bytes(&mut out, 9, &attribute(key, value)));
    if record.failed {
        let mut status = Vec::new();
        number(&mut status, 3, STATUS_ERROR);
        bytes(&mut out, 15, &status);
    }
    out
}

fn attribute(key: &str, value: &str) -> Vec<u8> {
    let mut any = Vec::new();
    bytes(&mut any, 1, value.as_bytes());
    let mut out = Vec::new();
    bytes(&mut out, 1, key.as_bytes());
    bytes(&mut out, 2, &any);
    out
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3);
    varint(out, value);
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn nanoseconds(out: &mut Vec<u8>, field: u64, time: Duration) {
    varint(out, field << 3 | 1);
    out.extend_from_slice(&u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).to_le_bytes());
}
