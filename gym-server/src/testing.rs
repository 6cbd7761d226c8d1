//! What the tests of this crate share.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use gym_core::{Code, Error, FileLock, Files, Result, World};

/// A world without files, with a fixed seed and a fixed start.
pub(crate) fn world() -> World {
    World::new(Arc::new(NoFiles), 7, Duration::from_secs(1_700_000_000))
}

#[derive(Debug)]
struct NoFiles;

fn none<T>() -> Result<T> {
    Err(Error::not_started(Code::Unimplemented, "there are no files here"))
}

#[async_trait]
impl Files for NoFiles {
    async fn length(&self, _: &Path) -> Result<Option<u64>> {
        none()
    }

    async fn read(&self, _: &Path, _: u64, _: usize) -> Result<Bytes> {
        none()
    }

    async fn append(&self, _: &Path, _: &[Bytes], _: bool) -> Result<()> {
        none()
    }

    async fn truncate(&self, _: &Path, _: u64) -> Result<()> {
        none()
    }

    async fn replace(&self, _: &Path, _: &[Bytes]) -> Result<()> {
        none()
    }

    async fn remove(&self, _: &Path) -> Result<()> {
        none()
    }

    async fn lock(&self, _: &Path) -> Result<Box<dyn FileLock>> {
        none()
    }
}
