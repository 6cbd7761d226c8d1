//! The Ray provisioner against a dashboard in this process, which plays Ray's REST interface word for word: no Ray, no Python, no waiting.
//!
//! The numbers in the comments are those of the cases in `tests/tables/conformance-ray.md`. A test with a paused clock takes milliseconds for the seconds that it
//! waits.

#![cfg(target_os = "linux")]

#[path = "ray_dashboard/agents.rs"]
mod agents;
#[path = "ray_dashboard/connect.rs"]
mod connect;
#[path = "ray_dashboard/fake.rs"]
mod fake;
#[path = "ray_dashboard/jobs.rs"]
mod jobs;
#[path = "ray_dashboard/process.rs"]
mod process;
#[path = "ray_dashboard/reserve.rs"]
mod reserve;
#[path = "ray_dashboard/submit.rs"]
mod submit;
