//! Writes a new file through [`Files`] in chunks that a blocking thread produces.

use std::io::{self, ErrorKind, Write};
use std::path::Path;

use bytes::Bytes;
use gym_core::Result;
use gym_core::base::Files;
use tokio::sync::mpsc;

const CHUNK_BYTES: usize = 128 << 10;

/// Chunks that wait to be written: enough that neither side waits for the other's wake-up, few enough for memory.
pub(in crate::collect) const CHUNKS_AHEAD: usize = 4;

/// The producer's end: a writer for a blocking thread. `flush` sends what is left.
#[derive(Debug)]
pub(in crate::collect) struct ChunkWriter {
    chunks: mpsc::Sender<Bytes>,
    chunk: Vec<u8>,
}

impl ChunkWriter {
    pub(in crate::collect) fn new(chunks: mpsc::Sender<Bytes>) -> Self {
        Self { chunks, chunk: Vec::with_capacity(CHUNK_BYTES) }
    }
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.chunk.extend_from_slice(bytes);
        if self.chunk.len() >= CHUNK_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let chunk = std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK_BYTES));
        self.chunks.blocking_send(chunk.into()).map_err(|_| ErrorKind::BrokenPipe.into())
    }
}

/// Replaces a JSON file by the chunks that `producing` sends, durably and at once. The name of the file that is written until then contains the process
/// ID, because no lock may keep a second collector away.
///
/// # Errors
/// As [`write_new_file`].
pub(in crate::collect) async fn replace_json_file<T>(
    files: &dyn Files,
    path: &Path,
    chunks: mpsc::Receiver<Bytes>,
    producing: impl Future<Output = Result<T>>,
) -> Result<T> {
    let partial = path.with_extension(format!("json.{}.partial", std::process::id()));
    let produced = write_new_file(files, &partial, chunks, producing).await?;
    files.rename(&partial, path).await?;
    Ok(produced)
}

/// Writes the chunks that `producing` sends to a new file, durably. The file is removed if either side fails. A file that
/// an earlier process left at the path is replaced.
///
/// # Errors
/// The errors of the disk, and of `producing`.
pub async fn write_new_file<T>(
    files: &dyn Files,
    path: &Path,
    chunks: mpsc::Receiver<Bytes>,
    producing: impl Future<Output = Result<T>>,
) -> Result<T> {
    let writing = async move {
        // Dropped after an error, so that the producer does not wait for it.
        let mut chunks = chunks;
        let mut begun = false;
        while let Some(chunk) = chunks.recv().await {
            if !std::mem::replace(&mut begun, true) {
                remove_old(files, path).await?;
            }
            files.append(path, &[chunk], false).await?;
        }
        Ok(begun)
    };
    let (written, produced): (Result<bool>, _) = futures_util::future::join(writing, producing).await;
    let finished = async {
        let (begun, produced) = (written?, produced?);
        if !begun {
            remove_old(files, path).await?;
        }
        // One sync for all chunks. It also creates a file without contents.
        files.append(path, &[], true).await?;
        Ok(produced)
    };
    let finished = finished.await;
    if finished.is_err() {
        // Best effort: only the first error is reported.
        let _ = remove_old(files, path).await;
    }
    finished
}

async fn remove_old(files: &dyn Files, path: &Path) -> Result<()> {
    if files.length(path).await?.is_some() { files.remove(path).await } else { Ok(()) }
}
