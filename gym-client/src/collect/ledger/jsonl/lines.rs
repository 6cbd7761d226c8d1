//! Reads a file line by line, from any offset, in bounded pieces.

use std::path::Path;

use gym_core::base::Files;
use gym_core::{Code, Error, Result};
use memchr::memchr;

/// Bytes read at a time: large enough that the call costs nothing beside the bytes.
pub(super) const READ_BYTES: usize = 1 << 20;

/// A line longer than this is no rollout: somebody has named another kind of file.
const LINE_BYTES_MAX: usize = 1 << 30;

/// A position in a file, and what has been read of it.
#[derive(Debug)]
pub(super) struct LineReader<'a> {
    files: &'a dyn Files,
    path: &'a Path,
    /// Of the file, when it was opened.
    length: u64,
    /// Where the next line starts.
    offset: u64,
    /// Its number, counted from 1.
    line: u64,
    buffer: Vec<u8>,
    /// Where the next line starts in the buffer.
    at: usize,
}

/// What comes next in the file.
#[derive(Debug)]
pub(super) enum NextLine<'a> {
    /// Up to a newline, which is not part of it.
    Line(&'a [u8]),
    /// The file ends without a newline.
    Rest(&'a [u8]),
    End,
}

impl<'a> LineReader<'a> {
    pub(super) fn new(files: &'a dyn Files, path: &'a Path, length: u64) -> Self {
        Self { files, path, length, offset: 0, line: 1, buffer: Vec::new(), at: 0 }
    }

    /// Where the next line starts.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes from here to the end.
    pub(super) fn left(&self) -> u64 {
        self.length - self.offset
    }

    /// Goes behind a line of that many bytes.
    pub(super) fn skip(&mut self, length: usize) {
        self.at += length + 1;
        self.offset += length as u64 + 1;
        self.line += 1;
    }

    /// The next so many bytes and the one after them; `None` if the file ends before. Stays before them.
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

    /// The next line; stays before it.
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
                return Err(
                    self.error(0, "more than 1 GiB without a newline: this is no file of rollouts; name another one")
                );
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<()> {
        let from = self.offset + (self.buffer.len() - self.at) as u64;
        let read = self.files.read(self.path, from, READ_BYTES).await?;
        if read.is_empty() {
            return Err(self.error(0, "the file became shorter while it was read; is another program writing it?"));
        }
        self.buffer.drain(..self.at);
        self.at = 0;
        self.buffer.extend_from_slice(&read);
        // A file that grew meanwhile is read up to where it ended.
        let wanted = usize::try_from(self.left()).unwrap_or(usize::MAX);
        self.buffer.truncate(wanted);
        Ok(())
    }

    /// An error about the next line, at that many bytes into it.
    pub(super) fn error(&self, within: usize, message: impl Into<String>) -> Error {
        let place = format!("{} line {} (byte {})", self.path.display(), self.line, self.offset + within as u64);
        Error::finished(Code::DataLoss, message.into()).about(place)
    }
}
