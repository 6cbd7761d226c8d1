//! Splits a child's output into lines of bounded length; bytes that are not UTF-8 are replaced.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes kept of one line, so that a JSON body printed by mistake does not fill memory.
const LINE_BYTES_MAX: usize = 16 * 1024;
/// Lines kept, for the exit report: enough for a Python traceback and the lines before it.
const TAIL_LINES: usize = 60;
/// Bytes read at once.
const READ_BYTES: usize = 8 * 1024;

/// The output stream of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Receives the output lines of a child: the child's name, the stream, and the line without its end.
///
/// Called on runtime threads, in the order of the lines of one stream. Must not block for long.
pub type LineSink = Arc<dyn Fn(&str, Stream, &str) + Send + Sync>;

/// Returns a sink that writes `[name] line` to `writer`, each line in one write.
///
/// ```
/// let sink = gym_client::launch::prefixed(std::io::stderr());
/// sink("math", gym_client::launch::Stream::Stdout, "ready");
/// ```
pub fn prefixed(writer: impl Write + Send + 'static) -> LineSink {
    let writer = Mutex::new(writer);
    Arc::new(move |name, _stream, line| {
        let text = format!("[{name}] {line}\n");
        let mut writer = writer.lock();
        // A failed write of the log must not stop the server that produced the line.
        let _ = writer.write_all(text.as_bytes()).and_then(|()| writer.flush());
    })
}

/// The last lines of an output. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct OutputTail(Arc<Mutex<VecDeque<String>>>);

impl OutputTail {
    /// Adds a line.
    pub fn push(&self, line: &str) {
        let mut lines = self.0.lock();
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }

    /// Returns them, oldest first.
    #[must_use]
    pub fn lines(&self) -> Arc<[String]> {
        self.0.lock().iter().cloned().collect()
    }
}

/// Reads `input` until it ends.
pub(super) async fn forward(
    mut input: Box<dyn AsyncRead + Send + Unpin>,
    name: Arc<str>,
    stream: Stream,
    sink: LineSink,
    tail: OutputTail,
) {
    let mut splitter = LineSplitter::default();
    let mut bytes = vec![0_u8; READ_BYTES];
    let emit = |line: &str| {
        if stream == Stream::Stderr {
            tail.push(line);
        }
        sink(&name, stream, line);
    };
    loop {
        match input.read(&mut bytes).await {
            Ok(0) | Err(_) => break,
            Ok(read) => splitter.push(&bytes[..read], emit),
        }
    }
    splitter.finish(emit);
}

/// Splits bytes into lines. A carriage return also ends a line, because progress bars may write nothing else for
/// minutes.
#[derive(Debug, Default)]
struct LineSplitter {
    line: Vec<u8>,
    cut: usize,
    after_return: bool,
}

impl LineSplitter {
    fn push(&mut self, mut bytes: &[u8], mut emit: impl FnMut(&str)) {
        while let Some(end) = memchr::memchr2(b'\n', b'\r', bytes) {
            self.keep(&bytes[..end]);
            let second_of_pair = self.after_return && end == 0 && bytes[end] == b'\n';
            if !second_of_pair {
                self.emit(&mut emit);
            }
            self.after_return = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
        }
        if !bytes.is_empty() {
            self.after_return = false;
            self.keep(bytes);
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        let room = LINE_BYTES_MAX - self.line.len();
        let kept = room.min(bytes.len());
        self.line.extend_from_slice(&bytes[..kept]);
        self.cut += bytes.len() - kept;
    }

    fn emit(&mut self, emit: &mut impl FnMut(&str)) {
        let text = String::from_utf8_lossy(&self.line);
        if self.cut > 0 {
            emit(&format!("{text} … ({} bytes cut)", self.cut));
        } else {
            emit(&text);
        }
        self.line.clear();
        self.cut = 0;
    }

    /// Emits the text after the last line end.
    fn finish(&mut self, mut emit: impl FnMut(&str)) {
        if !self.line.is_empty() {
            self.emit(&mut emit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(pieces: &[&[u8]]) -> Vec<String> {
        let mut lines = Vec::new();
        let mut splitter = LineSplitter::default();
        for piece in pieces {
            splitter.push(piece, |line| lines.push(line.to_owned()));
        }
        splitter.finish(|line| lines.push(line.to_owned()));
        lines
    }

    #[test]
    fn all_line_ends_count_and_a_pair_is_one() {
        assert_eq!(split(&[b"a\nb\r\nc\rd"]), ["a", "b", "c", "d"]);
        assert_eq!(split(&[b"a\r", b"\nb"]), ["a", "b"], "a pair over two reads");
        assert_eq!(split(&[b"a\n\nb\n"]), ["a", "", "b"], "empty lines stay");
        assert_eq!(split(&[b"a\r", b"b\nc"]), ["a", "b", "c"]);
        assert_eq!(split(&[]), Vec::<String>::new());
    }

    #[test]
    fn a_long_line_is_cut_and_says_so() {
        let long = vec![b'x'; LINE_BYTES_MAX + 5];
        let lines = split(&[&long[..100], &long[100..], b"\nnext"]);
        assert!(lines[0].ends_with("x … (5 bytes cut)"), "{}", &lines[0][LINE_BYTES_MAX - 10..]);
        assert_eq!(lines[1], "next");
    }

    #[test]
    fn rubbish_becomes_replacement_characters() {
        assert_eq!(split(&[b"a\xff\xfeb\n"]), ["a\u{fffd}\u{fffd}b"]);
    }

    #[test]
    fn the_tail_keeps_the_last_lines() {
        let tail = OutputTail::default();
        for number in 0..TAIL_LINES + 3 {
            tail.push(&number.to_string());
        }
        let lines = tail.lines();
        assert_eq!((lines.len(), lines[0].as_str()), (TAIL_LINES, "3"));
    }

    proptest! {
        /// The boundaries of reads do not affect the lines.
        #[test]
        fn lines_do_not_depend_on_reads(bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), any::<u8>()], 0..200), at in 0_usize..200, step in 1_usize..7) {
            let at = at.min(bytes.len());
            let whole = split(&[&bytes]);
            prop_assert_eq!(&whole, &split(&[&bytes[..at], &bytes[at..]]));
            let pieces: Vec<&[u8]> = bytes.chunks(step).collect();
            prop_assert_eq!(&whole, &split(&pieces));
        }
    }
}
