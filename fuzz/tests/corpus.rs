//! Checks every input that the fuzzer kept, and every prefix of it.

use std::fs;
use std::path::Path;

use gym_fuzz::TARGETS;

#[test]
fn no_kept_input_makes_a_reader_panic_or_allocate_beyond_what_came() {
    // One test for all targets, because allocations are counted for the whole process.
    for target in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
        let mut inputs = 0;
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let input = fs::read(entry.expect("an entry of the folder").path()).expect("a readable input");
            for length in 0..=input.len() {
                target.check(&input[..length]);
            }
            inputs += 1;
        }
        assert!(inputs >= 5, "{} has inputs", folder.display());
    }
}
