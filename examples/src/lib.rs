//! Environments and programs built with the gym SDK as a user would build them
#![forbid(unsafe_code)]
