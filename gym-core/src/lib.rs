//! Vocabulary and seams of the gym SDK: errors, context, messages, channels, roles, registry, ledger
#![forbid(unsafe_code)]
