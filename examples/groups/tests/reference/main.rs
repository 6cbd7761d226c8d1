//! Generates the pages in `docs/reference` from the code, and checks that the pages on the disk are the generated ones.
//!
//! `GYM_REFERENCE=1 cargo test -p gym-group-examples --test reference` writes the pages and `gym-server/src/stack/settings.json`.
//! Without that variable, a page that differs is a failure.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

mod configuration;
mod environment;
mod exit_codes;
mod metrics;
mod page;
mod rows;
mod schema;
mod settings;
