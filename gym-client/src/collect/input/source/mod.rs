//! Where the tasks come from: a file of JSON lines, or Parquet files, whose rows become JSON lines.

#[cfg(feature = "parquet")]
mod parquet;
mod table;

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use crate::collect::files::fix_of_unopened;
use crate::collect::input::error::InputError;
use crate::collect::input::places::RowPlaces;

/// The first bytes of a Parquet file.
const MAGIC: &[u8] = b"PAR1";

/// The byte order mark, with which a file of UTF-8 may begin.
const BYTE_ORDER_MARK: &[u8] = "\u{FEFF}".as_bytes();

/// The first bytes of compressed files, the name of the coding, and the command that unpacks a file.
const PACKED: [(&[u8], &str, &str); 4] = [
    (&[0x1f, 0x8b], "gzip", "gunzip -k"),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", "unzstd"),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz", "unxz -k"),
    (b"PK\x03\x04", "zip", "unzip"),
];

/// The files of the tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::collect) enum InputSource {
    /// One file of JSON lines. It may not exist.
    Lines(PathBuf),
    /// Parquet files, in the order of their rows.
    Parquet(Vec<PathBuf>),
}

impl InputSource {
    /// Returns the files that a path names: a file, a directory with Parquet files, or a pattern such as `data/train-*.parquet`. Shards
    /// are in the order of their names.
    ///
    /// # Errors
    /// [`InputError::File`] if a directory or a pattern has no Parquet file, or if this program cannot read Parquet.
    pub(in crate::collect) fn find(path: &Path) -> Result<Self, InputError> {
        let source = match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => Self::Parquet(shards(path, "*.parquet", path)?),
            Ok(found) if found.is_file() && (has_extension(path) || has_magic(path)) => {
                Self::Parquet(vec![path.to_owned()])
            }
            Ok(_) => return Ok(Self::Lines(path.to_owned())),
            Err(_) => match path.file_name().and_then(|name| name.to_str()) {
                Some(pattern) if pattern.contains('*') => {
                    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                    Self::Parquet(shards(folder.unwrap_or(Path::new(".")), pattern, path)?)
                }
                _ => return Ok(Self::Lines(path.to_owned())),
            },
        };
        if cfg!(feature = "parquet") {
            return Ok(source);
        }
        Err(InputError::file(
            path,
            "it is Parquet, and this program was built without the feature `parquet`; build with the feature `parquet` of gym-server (or \
             of gym-client), or convert it to JSON lines",
        ))
    }

    pub(in crate::collect) fn files(&self) -> &[PathBuf] {
        match self {
            Self::Lines(file) => std::slice::from_ref(file),
            Self::Parquet(files) => files,
        }
    }

    /// Checks that the tasks can be opened, and that each Parquet file is complete. Nothing is converted.
    ///
    /// # Errors
    /// As [`InputSource::open`].
    pub(in crate::collect) fn check(&self) -> Result<(), InputError> {
        match self {
            Self::Lines(_) => self.open(Path::new(""), None).map(drop),
            Self::Parquet(files) => files.iter().try_for_each(|file| check_complete(file)),
        }
    }

    /// Opens the tasks as JSON lines. Rows of Parquet files are written to an unnamed file in `folder` first, at most `limit` of them;
    /// their places are returned.
    ///
    /// # Errors
    /// The errors of reading and writing, with the file and the row.
    pub(in crate::collect) fn open(
        &self,
        folder: &Path,
        limit: Option<u64>,
    ) -> Result<(BufReader<File>, Option<RowPlaces>), InputError> {
        match self {
            Self::Lines(file) => {
                let unreadable = |error: io::Error| {
                    let otherwise = "name a file of JSON lines with --input: a JSON object for each task";
                    let fix = fix_of_unopened(file, &error, otherwise);
                    InputError::file(file, format!("cannot read the input: {error}\n  fix: {fix}"))
                };
                let mut opened = BufReader::new(File::open(file).map_err(unreadable)?);
                let begins = opened.fill_buf().map_err(unreadable)?;
                if begins.is_empty() {
                    return Err(InputError::file(file, "the file is empty; it needs a JSON object on each line"));
                }
                for (magic, coding, command) in PACKED {
                    if begins.starts_with(magic) {
                        let name = file.display();
                        let problem = format!("the file is compressed ({coding}); unpack it: {command} {name}");
                        return Err(InputError::file(file, problem));
                    }
                }
                if let Some(problem) = table::problem(file, begins) {
                    return Err(InputError::file(file, problem));
                }
                // Editors of Windows write it; it is no part of the first row.
                if begins.starts_with(BYTE_ORDER_MARK) {
                    opened.consume(BYTE_ORDER_MARK.len());
                    if opened.fill_buf().map_err(unreadable)?.is_empty() {
                        return Err(InputError::file(file, "the file is empty; it needs a JSON object on each line"));
                    }
                }
                Ok((opened, None))
            }
            Self::Parquet(files) => {
                let spool = spool(folder).map_err(|error| {
                    InputError::io(format!("write the rows of the input to {}", folder.display()), error)
                })?;
                let (spool, places) = rows(files, limit.filter(|limit| *limit > 0), spool)?;
                if spool.metadata().is_ok_and(|spooled| spooled.len() == 0) {
                    return Err(InputError::file(&files[0], "the input has no rows; name files that have some"));
                }
                Ok((BufReader::new(spool), Some(places)))
            }
        }
    }
}

#[cfg(feature = "parquet")]
fn rows(files: &[PathBuf], limit: Option<u64>, spool: File) -> Result<(File, RowPlaces), InputError> {
    use std::io::{Seek as _, Write as _};

    let mut left = limit.unwrap_or(u64::MAX);
    let mut writer = io::BufWriter::new(spool);
    let mut places = Vec::new();
    for file in files.iter() {
        if left == 0 {
            break;
        }
        let rows = parquet::write_lines(file, left, &mut writer)?;
        left -= rows;
        places.push((file.clone(), rows));
    }
    let rewound = writer.flush().and_then(|()| writer.into_inner().map_err(io::IntoInnerError::into_error));
    let spool = rewound.and_then(|mut spool| spool.rewind().map(|()| spool));
    let spool = spool.map_err(|error| InputError::io("write the rows of the input", error))?;
    Ok((spool, RowPlaces::new(places)))
}

#[cfg(feature = "parquet")]
fn check_complete(file: &Path) -> Result<(), InputError> {
    parquet::check(file)
}

#[cfg(not(feature = "parquet"))]
fn check_complete(_: &Path) -> Result<(), InputError> {
    unreachable!("`find` rejects Parquet without the feature")
}

#[cfg(not(feature = "parquet"))]
fn rows(_: &[PathBuf], _: Option<u64>, _: File) -> Result<(File, RowPlaces), InputError> {
    unreachable!("`find` rejects Parquet without the feature")
}

/// Creates an unnamed file: it is gone when it is closed, also after a kill.
fn spool(folder: &Path) -> io::Result<File> {
    std::fs::create_dir_all(folder)?;
    let path = folder.join(format!(".gym-input.{}.{:x}", std::process::id(), fastrand::u64(..)));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}

/// Returns the files of a directory whose names fit the pattern, by name.
fn shards(folder: &Path, pattern: &str, input: &Path) -> Result<Vec<PathBuf>, InputError> {
    let list = || {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if fits(name, pattern) && path.is_file() {
                found.push(path);
            }
        }
        found.sort();
        Ok(found)
    };
    let found =
        list().map_err(|error: io::Error| InputError::file(input, format!("cannot read the directory: {error}")))?;
    if found.is_empty() {
        let problem = format!(
            "no file fits {pattern} in the directory {}; name a JSONL file, or Parquet files",
            folder.display()
        );
        return Err(InputError::file(input, problem));
    }
    if let Some(other) = found.iter().find(|path| !has_extension(path) && !has_magic(path)) {
        return Err(InputError::file(other, "it is no Parquet file; a pattern names Parquet files only"));
    }
    Ok(found)
}

/// Returns `true` if the name fits the pattern, in which `*` stands for any text.
fn fits(name: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => name == pattern,
        Some((head, rest)) => name
            .strip_prefix(head)
            .is_some_and(|tail| (0..=tail.len()).any(|at| tail.is_char_boundary(at) && fits(&tail[at..], rest))),
    }
}

fn has_extension(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("parquet"))
}

fn has_magic(path: &Path) -> bool {
    let mut begins = [0; MAGIC.len()];
    File::open(path).and_then(|mut file| file.read_exact(&mut begins)).is_ok() && begins == MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_plain_text_is_read_or_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let open = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let opened = InputSource::Lines(path.clone()).open(folder.path(), None).map_err(|error| error.to_string());
            opened.map(|(mut lines, _)| {
                let mut text = String::new();
                lines.read_to_string(&mut text).unwrap();
                text
            })
        };
        assert_eq!(open("\u{FEFF}{}\n".as_bytes()).unwrap(), "{}\n");
        assert_eq!(open(b"{}\n").unwrap(), "{}\n");
        // Not a table: the row's own error names the line.
        for text in ["nonsense\n", "[1, 2]\n", "\n{}\n", "\"a, b\"\n", "one, two\nthree\n"] {
            assert_eq!(open(text.as_bytes()).unwrap(), text);
        }
        for (bytes, says) in [
            (&[0x1f, 0x8b, 8, 0][..], "compressed (gzip); unpack it: gunzip -k"),
            (&[0x28, 0xb5, 0x2f, 0xfd, 4], "compressed (zstd); unpack it: unzstd"),
            (b"", "the file is empty"),
            (b"question,answer\n\"1, 2\",3\n", "the input is a table of comma-separated values (question, answer)"),
            (
                "\u{FEFF}question\tanswer\n1\t2\n".as_bytes(),
                "the input is a table of tab-separated values (question, answer)",
            ),
            (b"a,b\n", "values (a, b); it must be JSON lines"),
        ] {
            let refused = open(bytes).unwrap_err();
            assert!(refused.contains(says) && refused.contains("rows.jsonl"), "{refused}");
        }
    }

    #[test]
    fn a_star_stands_for_any_text() {
        for (name, pattern, expected) in [
            ("train-00000-of-00003.parquet", "train-*.parquet", true),
            ("train-00000-of-00003.parquet", "*.parquet", true),
            ("train-00000-of-00003.parquet", "*-of-*", true),
            ("test-00000.parquet", "train-*.parquet", false),
            ("a.jsonl", "*.parquet", false),
            ("ä*", "ä*", true),
            ("ab", "a*b*b", false),
        ] {
            assert_eq!(fits(name, pattern), expected, "{name} {pattern}");
        }
    }

    #[test]
    fn parquet_is_recognized_by_its_name_or_its_first_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("rows.jsonl"), "{}\n").unwrap();
        assert_eq!(InputSource::find(&at("rows.jsonl")).unwrap(), InputSource::Lines(at("rows.jsonl")));
        assert_eq!(InputSource::find(&at("absent")).unwrap(), InputSource::Lines(at("absent")));
        let refused = InputSource::find(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("no file fits *.parquet"), "{refused}");
        std::fs::write(at("b.parquet"), "").unwrap();
        std::fs::write(at("a.parquet"), "PAR1").unwrap();
        std::fs::write(at("blob"), "PAR1").unwrap();
        for (path, files) in [
            (at("b.parquet"), vec![at("b.parquet")]),
            (at("blob"), vec![at("blob")]),
            (folder.path().to_owned(), vec![at("a.parquet"), at("b.parquet")]),
            (at("*.parquet"), vec![at("a.parquet"), at("b.parquet")]),
        ] {
            match InputSource::find(&path) {
                Ok(source) => assert_eq!(source, InputSource::Parquet(files)),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!cfg!(feature = "parquet") && text.contains("the feature `parquet`"), "{text}");
                }
            }
        }
        let refused = InputSource::find(&at("*")).unwrap_err().to_string();
        assert!(refused.contains("rows.jsonl") && refused.contains("no Parquet file"), "{refused}");
    }
}
