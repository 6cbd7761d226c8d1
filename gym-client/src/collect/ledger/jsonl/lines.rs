//! Reads a file line by line, from any offset, in bounded chunks.

use std::path::Path;

use gym_core::base::Files;
use gym_core::{Code, Error, Result};
use memchr::memchr;

/// Size of one read: large enough that the cost of the call is negligible.
pub(super) const READ_BYTES: usize = 1 << 20;

/// Maximum length of a line; a longer one means that the file does not contain rollouts.
const LINE_BYTES_MAX: usize = 1 << 30;

/// Reads the lines of a file and keeps its position.
#[derive(Debug)]
pub(super) struct LineReader<'a> {
    files: &'a dyn Files,
    path: &'a Path,
    /// Length of the file when it was opened.
    length: u64,
    /// Offset of the next line in the file.
    offset: u64,
    /// Number of the next line, counted from 1.
    line: u64,
    buffer: Vec<u8>,
    /// Offset of the next line in the buffer.
    at: usize,
}

/// The next part of the file.
#[derive(Debug)]
pub(super) enum NextLine<'a> {
    /// A line that ends with a newline, without the newline.
    Line(&'a [u8]),
    /// The last bytes of a file that does not end with a newline.
    Rest(&'a [u8]),
    End,
}

impl<'a> LineReader<'a> {
    pub(super) fn new(files: &'a dyn Files, path: &'a Path, length: u64) -> Self {
        Self { files, path, length, offset: 0, line: 1, buffer: Vec::new(), at: 0 }
    }

    /// Returns the offset of the next line.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the number of bytes from the next line to the end.
    pub(super) fn left(&self) -> u64 {
        self.length - self.offset
    }

    /// Skips a line of `length` bytes and its newline.
    pub(super) fn skip(&mut self, length: usize) {
        self.at += length + 1;
        self.offset += length as u64 + 1;
        self.line += 1;
    }

    /// Returns the next `length` bytes and the byte that follows them, or `None` if the file ends earlier. Does not
    /// advance.
    pub(super) async fn peek_bytes(&mut self, length: u64) -> Result<Option<(&[u8], u8)>> {
        if length >= self.left() {
            return Ok(None);
        }
        let Ok(length) = usize::try_from(length) else { return Ok(None) };
        while self.buffer.len() - self.at <= length {
            self.fill().await?;
        }
        let end = self.at + length;
        Ok(Some((&self.buffer[self.at..end], self.buffer[end])))
    }

    /// Returns the next line. Does not advance.
    pub(super) async fn peek(&mut self) -> Result<NextLine<'_>> {
        let mut searched = 0;
        loop {
            if let Some(found) = memchr(b'\n', &self.buffer[self.at + searched..]) {
                let end = self.at + searched + found;
                return Ok(NextLine::Line(&self.buffer[self.at..end]));
            }
            searched = self.buffer.len() - self.at;
            if searched as u64 >= self.left() {
                return Ok(if searched == 0 { NextLine::End } else { NextLine::Rest(&self.buffer[self.at..]) });
            }
            if searched > LINE_BYTES_MAX {
                return Err(self.error(
                    0,
                    "more than 1 GiB without a newline, so this is not a file of rollouts; choose another output file",
                ));
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<()> {
        let from = self.offset + (self.buffer.len() - self.at) as u64;
        let read = self.files.read(self.path, from, READ_BYTES).await?;
        if read.is_empty() {
            return Err(self.error(0, "the file became shorter while it was read; stop the program that writes to it"));
        }
        self.buffer.drain(..self.at);
        self.at = 0;
        self.buffer.extend_from_slice(&read);
        // If the file has grown, only the original length is read.
        let wanted = usize::try_from(self.left()).unwrap_or(usize::MAX);
        self.buffer.truncate(wanted);
        Ok(())
    }

    /// Returns an error at byte `within` of the next line.
    pub(super) fn error(&self, within: usize, message: impl Into<String>) -> Error {
        let place = format!("{} line {} (byte {})", self.path.display(), self.line, self.offset + within as u64);
        Error::finished(Code::DataLoss, message.into()).about(place)
    }
}
