//! The page of `GET /metrics`: OpenMetrics for scrapers that accept it, and the text format of Prometheus for all others, such as `curl`
//! and `promtool check metrics`. Also the metrics that every process has.
//!
//! The formats differ in few lines, so there is one encoder: the text of OpenMetrics is rewritten line by line.

use std::fmt;

use gym_core::base::process::{process_cpu, resident_bytes};
use gym_core::message::ContentType;
use gym_core::{CallContext, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

// Hidden, because its signature has a type of prometheus-client, whose next version may break it.
/// Returns the text of the metrics in the format of OpenMetrics.
#[doc(hidden)]
#[must_use]
pub fn open_metrics(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail. If encoding fails, an incomplete page is better than a panic.
    let _ = encode(&mut text, registry);
    text
}

/// Returns the response to `GET /metrics`, given the text of OpenMetrics. The header `accept` of the request decides on the format.
#[must_use]
pub fn metrics_response(cx: &CallContext, open_metrics: String) -> Response {
    let accepts = cx.metadata.all("accept").any(|media| media.contains("application/openmetrics-text"));
    let (text, format) = if accepts { (open_metrics, OPEN_METRICS) } else { (prometheus(&open_metrics), PROMETHEUS) };
    let mut response = Response::text(text);
    response.message.content_type = ContentType::Other(format.into());
    response
}

/// Rewrites the text of OpenMetrics in the text format of Prometheus: a counter has its suffix in the lines about it too, the types that
/// only OpenMetrics knows become those of Prometheus, and units, exemplars and the end mark are left out.
fn prometheus(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    // The type follows the description.
    let mut help = None;
    for line in open_metrics.lines() {
        let mut put = |line: &str| {
            text.push_str(line);
            text.push('\n');
        };
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "stateset" => ("", "gauge"),
                "unknown" => ("", "untyped"),
                other => ("", other),
            };
            if let Some((_, help)) = help.take() {
                put(&format!("# HELP {name}{suffix} {help}"));
            }
            put(&format!("# TYPE {name}{suffix} {kind}"));
        } else if !line.starts_with('#') {
            put(without_exemplar(line));
        }
    }
    text
}

fn without_exemplar(sample: &str) -> &str {
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in sample.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => quoted = !quoted,
            b'#' if !quoted => return sample[..at].trim_end(),
            _ => {}
        }
    }
    sample
}

// Hidden as `open_metrics` is: it implements a trait of prometheus-client.
/// CPU time and memory of this process, read at each output.
#[doc(hidden)]
#[derive(Debug)]
pub struct ProcessMetrics;

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "CPU time of the process, user and system";
        let family = encoder.encode_descriptor("process_cpu", help, Some(&Unit::Seconds), MetricType::Counter)?;
        ConstCounter::new(process_cpu().as_secs_f64()).encode(family)?;
        let help = "Resident memory of the process";
        let bytes = Some(&Unit::Bytes);
        let family = encoder.encode_descriptor("process_resident_memory", help, bytes, MetricType::Gauge)?;
        #[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
        ConstGauge::new(resident_bytes() as f64).encode(family)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scraper_of_open_metrics_gets_that_and_all_others_the_format_of_prometheus() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(ProcessMetrics));
        let text = open_metrics(&registry);
        let asked = |accept: &'static str| {
            let response = metrics_response(&CallContext::default().with_metadata("accept", accept), text.clone());
            (response.message.content_type.as_str().to_owned(), response.message.head.to_bytes())
        };
        let (format, body) = asked("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5");
        assert_eq!((format.as_str(), &body[..]), (OPEN_METRICS, text.as_bytes()));
        let (format, body) = asked("*/*");
        assert_eq!(format, PROMETHEUS);
        let body = String::from_utf8(body.to_vec()).unwrap();
        assert!(body.contains("# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total "), "{body}");
        assert!(!body.contains("EOF") && !body.contains("UNIT"), "{body}");
    }

    #[test]
    fn what_only_open_metrics_has_is_rewritten_or_left_out() {
        let text = "# HELP a b.\n# TYPE a counter\n# UNIT a seconds\na_total{x=\"# {\"} 3 # {trace=\"1\"} 3 1.5\n# TYPE b info\n\
                    b_info{v=\"\\\"#\"} 1\n# TYPE c unknown\nc 1\n# EOF\n";
        let expected = "# HELP a_total b.\n# TYPE a_total counter\na_total{x=\"# {\"} 3\n# TYPE b_info gauge\nb_info{v=\"\\\"#\"} \
                        1\n# TYPE c untyped\nc 1\n";
        assert_eq!(prometheus(text), expected);
    }
}
