//! The two kinds of stream sockets, as the rest sees them.

use std::fmt;
use std::io::{self, IoSlice};

use async_trait::async_trait;
use tokio::io::AsyncRead;
use tokio::net::{TcpStream, UnixStream, tcp, unix};

/// The reading half of a socket.
pub(super) type ReadHalf = Box<dyn AsyncRead + Send + Unpin>;

/// The writing half of a socket, which several may hold and one at a time uses.
#[async_trait]
pub(super) trait WriteHalf: fmt::Debug + Send + Sync + 'static {
    /// Writes what the socket takes now.
    fn try_write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Waits until the socket may take more.
    async fn writable(&self) -> io::Result<()>;
}

#[async_trait]
impl WriteHalf for tcp::OwnedWriteHalf {
    fn try_write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.try_write_vectored(pieces)
    }

    async fn writable(&self) -> io::Result<()> {
        Self::writable(self).await
    }
}

#[async_trait]
impl WriteHalf for unix::OwnedWriteHalf {
    fn try_write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.try_write_vectored(pieces)
    }

    async fn writable(&self) -> io::Result<()> {
        Self::writable(self).await
    }
}

/// A connected socket, and what was read from it before it was ours.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    pub(super) fn split(self) -> (ReadHalf, Box<dyn WriteHalf>) {
        match self {
            Self::Tcp(stream) => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
            Self::Unix(stream) => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
        }
    }
}
