//! The calling side of the gym SDK: names, configuration, collector, launcher
#![forbid(unsafe_code)]
