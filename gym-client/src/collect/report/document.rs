//! Writes `<output>_aggregate_metrics.json`: one entry per environment server, indented by two spaces as in NeMo Gym.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Read, Seek, Write};

use gym_core::message::json_string;
use gym_core::rollout::metrics::{AggregateOptions, Aggregation, JsonFields, MetricsError};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::collect::report::coverage::{COVERAGE_KEY, ServerCoverage};
use crate::collect::report::index::{FileRows, RolloutsIndex};

/// The statistics of one environment server, as its `/aggregate_metrics` route returned them.
#[derive(Clone, Debug)]
pub struct ReportEntry<'a> {
    /// Name of the server in the report; see [`label_runs`].
    pub label: String,
    /// Name of the environment server.
    pub server: String,
    /// Body of the response.
    pub reply: &'a str,
}

/// Returns the label of each environment server in reports. This is the name of its agent if no other server has the
/// same agent, or else the server's own name.
#[must_use]
pub fn label_runs(agent_by_server: &BTreeMap<String, Option<String>>) -> BTreeMap<String, String> {
    let mut servers_of_agent: HashMap<&str, usize> = HashMap::new();
    for agent in agent_by_server.values().flatten() {
        *servers_of_agent.entry(agent).or_default() += 1;
    }
    let mut labels: BTreeMap<String, String> = agent_by_server
        .iter()
        .map(|(server, agent)| {
            let alone = agent.as_ref().filter(|agent| servers_of_agent[agent.as_str()] == 1);
            (server.clone(), alone.unwrap_or(server).clone())
        })
        .collect();
    // If a label still equals the name of another server, the server with the label uses its own name instead.
    loop {
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for label in labels.values() {
            *counts.entry(label).or_default() += 1;
        }
        let clashing: HashSet<String> = labels
            .iter()
            .filter(|(server, label)| counts[label.as_str()] > 1 && label != server)
            .map(|(server, _)| server.clone())
            .collect();
        if clashing.is_empty() {
            return labels;
        }
        for server in clashing {
            labels.insert(server.clone(), server);
        }
    }
}

/// Writes the report of the servers' responses; numbers keep their original text.
///
/// # Errors
/// `MetricsError::Row` if a response is not a JSON object; `MetricsError::Io` if the write fails.
pub fn write_report(entries: &[ReportEntry<'_>], writer: impl Write) -> Result<(), MetricsError> {
    let mut report = ReportWriter::new(writer)?;
    for entry in entries {
        report.add_reply(entry, None)?;
    }
    report.end()
}

/// Computes the report from the rollouts file and writes it, for servers without statistics of their own.
///
/// # Errors
/// `MetricsError::Row` if a row is invalid; `MetricsError::Io` if reading or writing fails.
pub fn write_computed_report<R: Read + Seek>(
    index: &RolloutsIndex,
    reader: &mut R,
    options: AggregateOptions,
    writer: impl Write,
) -> Result<(), MetricsError> {
    let agents = index.groups().iter().map(|group| (group.server.clone(), group.agent.clone())).collect();
    let labels = label_runs(&agents);
    let mut report = ReportWriter::new(writer)?;
    for group in index.groups() {
        report.add_computed(&labels[&group.server], &group.server, index.rows(group, reader), options, None)?;
    }
    report.end()
}

/// Writes a report entry by entry, of any size.
#[derive(Debug)]
pub(in crate::collect) struct ReportWriter<W: Write> {
    report: Indenter<W>,
    entries: usize,
}

impl<W: Write> ReportWriter<W> {
    pub(in crate::collect) fn new(writer: W) -> Result<Self, MetricsError> {
        let mut report = Indenter::new(writer);
        report.text("[").map_err(unwritten)?;
        Ok(Self { report, entries: 0 })
    }

    /// Adds the statistics of a response, and the coverage, which they do not contain.
    pub(in crate::collect) fn add_reply(
        &mut self,
        entry: &ReportEntry<'_>,
        coverage: Option<&ServerCoverage>,
    ) -> Result<(), MetricsError> {
        let reply = JsonFields::parse(entry.reply).map_err(|error| MetricsError::Row {
            place: format!("the /aggregate_metrics reply of {}", entry.server),
            problem: error.to_string(),
        })?;
        let head = format!(
            r#"{{"agent_ref":{{"name":{}}},"_ng_environment_server":{}"#,
            json_string(&entry.label),
            json_string(&entry.server)
        );
        self.separate()?;
        self.report.text(&head).map_err(unwritten)?;
        for (key, absent) in [
            ("agent_metrics", Some("{}")),
            ("key_metrics", Some("{}")),
            ("group_level_metrics", Some("[]")),
            ("repeat_level_metrics", Some("[]")),
            ("perf_summary", None),
        ] {
            if let Some(value) = reply.get(key).filter(|value| *value != "null").or(absent) {
                let corrects = coverage.filter(|_| key == "group_level_metrics");
                let corrected = corrects.and_then(|coverage| coverage.corrected(value));
                self.report.text(&format!(",\"{key}\":")).map_err(unwritten)?;
                self.report.text(corrected.as_deref().unwrap_or(value)).map_err(unwritten)?;
            }
        }
        if let Some(coverage) = coverage {
            self.report.text(&format!(",\"{COVERAGE_KEY}\":")).map_err(unwritten)?;
            serde_json::to_writer(&mut self.report, coverage).map_err(|error| unwritten(error.into()))?;
        }
        self.report.text("}").map_err(unwritten)
    }

    /// Computes the standard statistics of the rows and adds them.
    pub(in crate::collect) fn add_computed<R: Read + Seek>(
        &mut self,
        label: &str,
        server: &str,
        mut rows: FileRows<'_, R>,
        options: AggregateOptions,
        coverage: Option<&ServerCoverage>,
    ) -> Result<(), MetricsError> {
        let mut aggregation = Aggregation::compute(&mut rows, options)?;
        if let Some(coverage) = coverage {
            aggregation.set_incomplete(coverage.incomplete());
        }
        let source = RefCell::new((rows, None));
        let entry = ComputedEntry { label, server, aggregation: &aggregation, source: &source, coverage };
        self.separate()?;
        let written = serde_json::to_writer(&mut self.report, &entry);
        match source.into_inner().1 {
            Some(failure) => Err(failure),
            None => written.map_err(|error| unwritten(error.into())),
        }
    }

    pub(in crate::collect) fn end(mut self) -> Result<(), MetricsError> {
        self.report.text("]").and_then(|()| self.report.flush()).map_err(unwritten)
    }

    fn separate(&mut self) -> Result<(), MetricsError> {
        self.entries += 1;
        if self.entries > 1 { self.report.text(",").map_err(unwritten) } else { Ok(()) }
    }
}

fn unwritten(source: io::Error) -> MetricsError {
    MetricsError::Io { doing: "write the aggregate metrics report".to_owned(), source }
}

/// An entry whose tasks are computed while it is written.
struct ComputedEntry<'a, 'b, R> {
    label: &'a str,
    server: &'a str,
    aggregation: &'a Aggregation,
    source: &'a RefCell<(FileRows<'b, R>, Option<MetricsError>)>,
    coverage: Option<&'a ServerCoverage>,
}

impl<R: Read + Seek> Serialize for ComputedEntry<'_, '_, R> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut source = self.source.borrow_mut();
        let (rows, failure) = &mut *source;
        let mut entry = serializer.serialize_map(None)?;
        entry.serialize_entry("agent_ref", &BTreeMap::from([("name", self.label)]))?;
        entry.serialize_entry("_ng_environment_server", self.server)?;
        self.aggregation.write_entry(rows, &mut entry, failure)?;
        if let Some(coverage) = self.coverage {
            entry.serialize_entry(COVERAGE_KEY, coverage)?;
        }
        entry.end()
    }
}

/// Indents JSON as it passes through; strings and numbers keep their original text.
#[derive(Debug)]
struct Indenter<W: Write> {
    writer: io::BufWriter<W>,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Set after an opening bracket, so that an empty list or object closes on the same line.
    opened: bool,
}

impl<W: Write> Indenter<W> {
    fn new(writer: W) -> Self {
        Self { writer: io::BufWriter::new(writer), depth: 0, in_string: false, escaped: false, opened: false }
    }

    fn line(&mut self) -> io::Result<()> {
        write!(self.writer, "\n{:1$}", "", self.depth * 2)
    }

    fn text(&mut self, json: &str) -> io::Result<()> {
        self.write_all(json.as_bytes())
    }
}

impl<W: Write> Write for Indenter<W> {
    fn write(&mut self, json: &[u8]) -> io::Result<usize> {
        for &byte in json {
            if self.in_string {
                self.in_string = self.escaped || byte != b'"';
                self.escaped = !self.escaped && byte == b'\\';
                self.writer.write_all(&[byte])?;
                continue;
            }
            if byte.is_ascii_whitespace() {
                continue;
            }
            let closes = matches!(byte, b']' | b'}');
            if closes {
                self.depth = self.depth.saturating_sub(1);
            }
            if self.opened != closes {
                self.line()?;
            }
            self.opened = matches!(byte, b'[' | b'{');
            self.writer.write_all(&[byte])?;
            match byte {
                b'[' | b'{' => self.depth += 1,
                b',' => self.line()?,
                b':' => self.writer.write_all(b" ")?,
                b'"' => self.in_string = true,
                _ => {}
            }
        }
        Ok(json.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}
