//! The entry point of the fuzzer; `GYM_FUZZ_TARGET` selects the reader.
#![no_main]

use std::sync::LazyLock;

use gym_fuzz::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static CHOSEN: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("GYM_FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        panic!("GYM_FUZZ_TARGET is `{name}`; there are {}", names.join(", "))
    })
});

fuzz_target!(|input: &[u8]| CHOSEN.check(input));
