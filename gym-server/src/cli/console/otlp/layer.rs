//! Turns the spans of the log into spans of OpenTelemetry: those that have a trace and a span id.

use std::fmt;
use std::fmt::Write as _;

use gym_core::World;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::cli::console::otlp::export::SpanQueue;
use crate::cli::console::otlp::wire::SpanRecord;

/// Passes ended spans to the export.
pub(super) struct SpanLayer {
    pub(super) queue: SpanQueue,
    pub(super) world: World,
}

/// The fields of a span that has not ended, in its extensions.
struct OpenSpan(SpanRecord);

impl Visit for OpenSpan {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = write!(text, "{value:?}");
        self.record_str(field, &text);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let Self(span) = self;
        match field.name() {
            "trace_id" => span.trace_id = u128::from_str_radix(value, 16).unwrap_or(0),
            "span_id" => span.span_id = u64::from_str_radix(value, 16).unwrap_or(0),
            "parent_id" => span.parent_id = u64::from_str_radix(value, 16).unwrap_or(0),
            name => {
                if name == "route" {
                    value.clone_into(&mut span.name);
                }
                span.failed |= match name {
                    "outcome" => value != "completed",
                    "status" => value.parse::<u16>().is_ok_and(|status| status >= 400),
                    _ => false,
                };
                span.attributes.push((name, value.to_owned()));
            }
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, cx: Context<'_, S>) {
        let Some(span) = cx.span(id) else { return };
        let began = self.world.now();
        let mut open = OpenSpan(SpanRecord { name: name(attributes.metadata()), began, ..SpanRecord::default() });
        attributes.record(&mut open);
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, cx: Context<'_, S>) {
        let Some(span) = cx.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<OpenSpan>() {
            values.record(open);
        }
    }

    fn on_close(&self, id: Id, cx: Context<'_, S>) {
        let Some(span) = cx.span(&id) else { return };
        if let Some(OpenSpan(record)) = span.extensions_mut().remove::<OpenSpan>()
            && record.trace_id != 0
            && record.span_id != 0
        {
            self.queue.push(SpanRecord { ended: self.world.now(), ..record });
        }
    }
}

fn name(metadata: &Metadata<'_>) -> String {
    metadata.name().to_owned()
}
