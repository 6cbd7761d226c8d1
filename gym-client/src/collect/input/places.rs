//! Where a row comes from, if the rows of several files follow each other.

use std::path::PathBuf;

/// The files of the rows, and the number of rows of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::collect) struct RowPlaces(Vec<(PathBuf, u64)>);

impl RowPlaces {
    #[cfg_attr(not(feature = "parquet"), expect(dead_code, reason = "only Parquet files have rows"))]
    pub(in crate::collect) fn new(files: Vec<(PathBuf, u64)>) -> Self {
        Self(files)
    }

    /// Names the place of a line of this input.
    pub(in crate::collect) fn name(places: Option<&Self>, input: &str, line: u64) -> String {
        match places.map(|places| places.of(line)) {
            Some((file, row)) => format!("{file}, row {row}"),
            None => format!("{input}, line {line}"),
        }
    }

    /// Returns the file of the row at a line, and its number in that file, both counted from 1.
    pub(in crate::collect) fn of(&self, line: u64) -> (String, u64) {
        let mut row = line;
        for (file, rows) in &self.0 {
            if row <= *rows {
                return (file.display().to_string(), row);
            }
            row -= rows;
        }
        (self.0.last().map(|(file, _)| file.display().to_string()).unwrap_or_default(), row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::input::error::InputError;

    #[test]
    fn a_row_has_its_place_in_its_shard() {
        let places = RowPlaces(vec![("a".into(), 3), ("b".into(), 0), ("c".into(), 2)]);
        let expected = [("a", 1), ("a", 3), ("c", 1), ("c", 2)].map(|(file, row)| (file.to_owned(), row));
        assert_eq!([1, 3, 4, 5].map(|line| places.of(line)), expected);
        let none = InputError::NoAgent { file: "d: e".into(), lines: vec![4, 5], count: 2 };
        let text = none.with_places(Some(&places)).to_string();
        assert!(text.starts_with("c, row 1: no agent for 2 row(s); name one with"), "{text}");
        let text = InputError::line("d", 3, "task_source: no").with_places(Some(&places)).to_string();
        assert_eq!(text, "a, row 3: task_source: no");
    }
}
