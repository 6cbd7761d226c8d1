//! Spans of rollouts for OpenTelemetry, off unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set.
//!
//! ```text
//!   tracing spans with trace_id and span_id ──► layer ──► bounded queue ──► export ──► POST /v1/traces
//! ```

pub(in crate::cli) mod export;
mod layer;
mod wire;

use gym_core::World;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;

use export::{ENDPOINT_VARIABLE, ExportSetup};

/// Returns the layer that exports spans, and the export to start within a runtime; `None` without the variable.
///
/// # Errors
/// Why the address in the variable cannot be used: a warning.
pub(in crate::cli) fn layer<S>() -> Result<Option<(impl Layer<S>, ExportSetup)>, String>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let Some(url) = endpoint() else { return Ok(None) };
    let (setup, queue) = ExportSetup::new(&url)?;
    // Only the SDK's own spans, and not its events.
    let ours = ["gym_client", "gym_server"].map(|target| (target, tracing::Level::INFO));
    let filter = Targets::new().with_targets(ours);
    Ok(Some((layer::SpanLayer { queue, world: World::real() }.with_filter(filter), setup)))
}

/// Returns the address of the OpenTelemetry collector, unless the standard variables turn the export of spans off.
pub(in crate::cli) fn endpoint() -> Option<String> {
    let value = |name: &str| std::env::var(name).ok().map(|value| value.trim().to_lowercase()).unwrap_or_default();
    if value("OTEL_SDK_DISABLED") == "true" || value("OTEL_TRACES_EXPORTER") == "none" {
        return None;
    }
    std::env::var(ENDPOINT_VARIABLE).ok().filter(|url| !url.trim().is_empty())
}
