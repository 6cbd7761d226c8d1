//! Runs UCX's own benchmark with two processes, as the limit of a transport.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::time::Instant;

use crate::Way;

/// The last result that it printed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Final {
    /// The median one-way latency, in microseconds.
    pub(crate) p50_us: f64,
    /// The bandwidth in bytes per second.
    pub(crate) bandwidth: f64,
}

/// Measures the one-way latency of an active message of 8 bytes.
pub(crate) fn latency(way: Way, messages: u32) -> Result<Final> {
    run(way, &["-t", "ucp_am_lat", "-s", "8", "-w", "1000", "-n", &messages.to_string()])
}

/// Measures the bandwidth of active messages of this size.
pub(crate) fn bandwidth(way: Way, bytes: usize, messages: u32) -> Result<Final> {
    run(way, &["-t", "ucp_am_bw", "-s", &bytes.to_string(), "-w", "3", "-n", &messages.to_string()])
}

fn command(way: Way, arguments: &[&str], port: u16) -> Command {
    let mut command = Command::new("ucx_perftest");
    command.args(arguments).args(["-p", &port.to_string()]).env("UCX_TLS", way.transports());
    if let Some(device) = way.device() {
        command.env("UCX_NET_DEVICES", device);
    }
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // The server ends with its client; otherwise its client has failed.
        if self.0.kill().and_then(|()| self.0.wait()).is_err() {
            eprintln!("ucx_perftest's server is still there");
        }
    }
}

fn run(way: Way, arguments: &[&str]) -> Result<Final> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let server = command(way, arguments, port).stdout(Stdio::null()).spawn();
    let _server = Server(server.context("run ucx_perftest; Debian has it in ucx-utils")?);
    let began = Instant::now();
    loop {
        let output = command(way, &[&["127.0.0.1"], arguments].concat(), port).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        if let Some(line) = text.lines().find(|line| line.starts_with("Final:")) {
            return parse(line).with_context(|| format!("ucx_perftest printed {line}"));
        }
        // The server may not be listening yet.
        if began.elapsed() > Duration::from_secs(20) {
            bail!("ucx_perftest {arguments:?} over {}: no result, {}", way.transports(), output.status);
        }
    }
}

/// Parses `Final: iterations p50 average overall MB/s MB/s messages messages`. An MB is 1,048,576 bytes.
fn parse(line: &str) -> Option<Final> {
    let numbers: Vec<f64> = line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    Some(Final { p50_us: *numbers.get(1)?, bandwidth: numbers.get(5)? * f64::from(1 << 20) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_read() {
        let found = parse("Final:  1000  0.084  282.162  282.162  3544.06  3500.00  3544  3544").unwrap();
        assert_eq!((found.p50_us, found.bandwidth), (0.084, 3500.0 * 1_048_576.0));
        assert!(parse("Final: nothing").is_none());
    }
}
