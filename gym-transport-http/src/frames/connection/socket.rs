//! TCP and Unix sockets behind one interface.

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use async_trait::async_trait;
use rustix::net::{Shutdown, shutdown};
use tokio::io::AsyncRead;
use tokio::net::{TcpStream, UnixStream, tcp, unix};

/// The reading half of a socket.
pub(crate) type ReadHalf = Box<dyn AsyncRead + Send + Unpin>;

/// The writing half of a socket. Several tasks may hold it, and one at a time writes.
#[async_trait]
pub(crate) trait WriteHalf: fmt::Debug + Send + Sync + 'static {
    /// Writes as many bytes as the socket accepts now.
    fn try_write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Flushes the writer's buffer; returns `WouldBlock` if the flush has to wait. A socket has no buffer of its own.
    fn try_flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Waits until the socket may accept more bytes.
    async fn writable(&self) -> io::Result<()>;

    /// Closes the connection in both directions, even if other tasks still hold a half of it.
    fn shut(&self);
}

#[async_trait]
impl WriteHalf for tcp::OwnedWriteHalf {
    fn shut(&self) {
        shut(self.as_ref());
    }

    fn try_write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.try_write_vectored(pieces)
    }

    async fn writable(&self) -> io::Result<()> {
        Self::writable(self).await
    }
}

#[async_trait]
impl WriteHalf for unix::OwnedWriteHalf {
    fn shut(&self) {
        shut(self.as_ref());
    }

    fn try_write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.try_write_vectored(pieces)
    }

    async fn writable(&self) -> io::Result<()> {
        Self::writable(self).await
    }
}

fn shut(socket: impl AsFd) {
    if let Err(error) = shutdown(socket, Shutdown::Both) {
        // The peer closed the connection first.
        tracing::trace!(%error, "shutdown");
    }
}

/// A connected socket, or the halves of another byte stream.
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
    Halves(ReadHalf, Box<dyn WriteHalf>),
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(stream) => stream.fmt(f),
            Self::Unix(stream) => stream.fmt(f),
            Self::Halves(_, writer) => writer.fmt(f),
        }
    }
}

impl Socket {
    pub(crate) fn split(self) -> (ReadHalf, Box<dyn WriteHalf>) {
        match self {
            Self::Tcp(stream) => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
            Self::Unix(stream) => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
            Self::Halves(read, write) => (read, write),
        }
    }
}
