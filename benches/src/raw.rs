//! Raw sockets: a thread that blocks in `read` and `write` on buffers that it keeps. This is the least work with which bytes can pass through a
//! socket.

use std::io::{Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use tokio::time::Instant;

use crate::measure;

const MIB: usize = 1 << 20;

/// Reads the announced number of bytes, and writes the requested number, until the caller has gone.
///
/// # Errors
/// The error of the stream, at its end too.
pub fn answer(mut stream: impl Read + Write) -> Result<()> {
    let mut buffer = Vec::new();
    let mut sizes = [0; 16];
    loop {
        stream.read_exact(&mut sizes)?;
        let [comes, goes] = [0, 8].map(|at| {
            let mut size = [0; 8];
            size.copy_from_slice(&sizes[at..at + 8]);
            u64::from_le_bytes(size) as usize
        });
        buffer.resize(buffer.len().max(comes).max(goes), 0);
        stream.read_exact(&mut buffer[..comes])?;
        stream.write_all(&buffer[..goes])?;
    }
}

/// Sends `goes` bytes of the buffer, and receives `comes`.
///
/// # Errors
/// The error of the stream.
pub fn call(stream: &mut (impl Read + Write + ?Sized), buffer: &mut [u8], goes: usize, comes: usize) -> Result<()> {
    let mut sizes = [0; 16];
    sizes[..8].copy_from_slice(&(goes as u64).to_le_bytes());
    sizes[8..].copy_from_slice(&(comes as u64).to_le_bytes());
    if goes < MIB {
        stream.write_all(&[&sizes[..], &buffer[..goes]].concat())?;
    } else {
        stream.write_all(&sizes)?;
        stream.write_all(&buffer[..goes])?;
    }
    stream.read_exact(&mut buffer[..comes])
}

/// Returns the median time of a round trip of 160 bytes, about those of a small call, between two threads over TCP on the loopback interface.
///
/// # Errors
/// The error of a socket.
pub fn round_trip() -> Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    stream.set_nodelay(true)?;
    let (peer, _) = listener.accept()?;
    peer.set_nodelay(true)?;
    let answering = std::thread::spawn(move || answer(peer));
    let (mut buffer, mut times) = ([0; 160], Vec::new());
    for _ in 0..20_000 {
        let begin = Instant::now();
        call(&mut stream, &mut buffer, 144, 160)?;
        times.push(begin.elapsed().as_secs_f64());
    }
    drop(stream);
    // It ends with the stream, which is an error of its read.
    let _ = answering.join();
    Ok(Duration::from_secs_f64(measure::median(&times)))
}
