//! Checks that all tests named in tests/tables/conformance.md exist.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::path::Path;

#[test]
fn every_test_that_the_table_names_is_in_the_file_that_it_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let table = std::fs::read_to_string(root.join("tests/tables/conformance.md")).unwrap();
    let mut named = 0;
    for entry in table.lines().filter(|line| line.starts_with("| C")).flat_map(|line| line.split("<br>")) {
        // `file`: `test`
        let Some((file, test)) = entry.split_once("`: `") else { continue };
        let (file, test) = (file.rsplit('`').next().unwrap(), test.split('`').next().unwrap());
        let source = std::fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(source.contains(&format!("fn {test}(")), "{file} has no {test}");
        named += 1;
    }
    assert!(named > 80, "the table names {named} tests; was its form changed?");
}
