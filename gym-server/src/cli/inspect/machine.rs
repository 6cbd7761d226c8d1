//! The findings of `rgym doctor` about this machine: the port of the head server, file descriptors, the disk, and the clock.
//!
//! Facts are gathered first, and a pure function judges them.

use std::io;
use std::net::{TcpListener, ToSocketAddrs as _};
use std::path::Path;
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::World;
use gym_core::base::process::listener;
use gym_core::transport::{bare_host, host_port};
use rustix::fs::{Access, StatVfsMountFlags, access, statfs, statvfs};
use rustix::process::{Resource, getrlimit};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::cli::inspect::finding::Finding;

/// Limit for a request; who listens on this machine responds from memory.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Limit for a response: the list of thousands of servers.
const RESPONSE_BYTES_MAX: u64 = 4 << 20;
/// Descriptors of one rollout at most: a connection to its agent, one to the model endpoint, and both ends of one to an environment.
const DESCRIPTORS_PER_ROLLOUT: u64 = 4;
/// Descriptors for files, listeners, the runtime and a few dozen servers.
const DESCRIPTORS_RESERVED: u64 = 256;
/// Free space below which a collection may fail: 100,000 rollouts of 10 kB.
const FREE_BYTES_MIN: u64 = 1 << 30;
/// Free inodes below which a collection may fail; each has a handful of files.
const FREE_INODES_MIN: u64 = 1_000;
/// Difference of clocks that is not explained by the whole seconds of a `date` header and the way of the response.
const CLOCK_DIFFERENCE_MAX_S: u64 = 5;

const PORT: &str = "head_port";
const DESCRIPTORS: &str = "descriptors";
const DISK: &str = "disk";
const CLOCK: &str = "clock";

/// The subjects of the checks.
#[derive(Debug)]
pub(super) struct Examined<'a> {
    pub(super) head: (&'a str, u16),
    pub(super) concurrency: u32,
    /// The file that a collection is to write; its directory is examined. `None` is the working directory.
    pub(super) output: Option<&'a Path>,
    /// URLs of model endpoints that respond.
    pub(super) endpoints: &'a [String],
}

/// Examines this machine.
pub(super) async fn findings(examined: Examined<'_>) -> Vec<Finding> {
    let (host, port) = examined.head;
    let (state, head) = port_state(host, port).await;
    let urls = examined.endpoints.iter().map(|url| format!("{}/models", url.trim_end_matches('/')));
    let responses = join_all(urls.map(|url| async move { (get(&url).await.ok(), url) })).await;
    let peers = responses.iter().filter_map(|(response, url)| Some((url.as_str(), response.as_ref()?)));
    let head_url = format!("http://{}", host_port(host, port));
    let peers = peers.chain(head.as_ref().map(|head| (head_url.as_str(), head)));
    let now = World::real().now();
    let differences: Vec<ClockDifference> =
        peers.filter_map(|(url, response)| difference(url, response, now)).collect();
    let synchronized = Path::new("/run/systemd/timesync/synchronized").exists();
    let limit = getrlimit(Resource::Nofile);
    vec![
        judge_port(host, port, &state),
        judge_descriptors(limit.current, limit.maximum, examined.concurrency),
        judge_disk(&disk(examined.output)),
        judge_clock(&differences, synchronized),
    ]
}

/// Who has the port of the head server.
#[derive(Debug, PartialEq, Eq)]
enum PortState {
    /// The operating system chooses a port.
    Any,
    Free,
    /// A head server, of this SDK or of NeMo Gym.
    Head {
        ours: bool,
        servers: usize,
    },
    /// Another program: what it answered, and its process if that is visible.
    Other {
        answer: String,
        process: Option<String>,
    },
    /// Nobody listens, but this machine cannot listen there either.
    Unusable(String),
}

/// Returns who has the port, and the response of a head server.
async fn port_state(host: &str, port: u16) -> (PortState, Option<PlainResponse>) {
    if port == 0 {
        return (PortState::Any, None);
    }
    let addresses = (bare_host(host), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
    let bound = addresses.and_then(|addresses| TcpListener::bind(&*addresses));
    let base = format!("http://{}", host_port(host, port));
    let other = |answer: String| PortState::Other { answer, process: listener(port) };
    let elsewhere = match bound {
        Ok(_) => return (PortState::Free, None),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
        // The head server may be on another machine.
        Err(error) => Some(error),
    };
    let response = match (get(&format!("{base}/server_instances")).await, elsewhere) {
        (Ok(response), _) => response,
        (Err(_), Some(error)) => return (PortState::Unusable(error.to_string()), None),
        (Err(error), None) => return (other(format!("no HTTP response ({error})")), None),
    };
    let list = serde_json::from_slice::<Vec<Value>>(&response.body);
    match list {
        Ok(servers) if response.status == 200 => {
            let ours = get(&format!("{base}/registry/instances")).await.is_ok_and(|found| found.status == 200);
            (PortState::Head { ours, servers: servers.len() }, Some(response))
        }
        _ => {
            let server = response.server.map(|name| format!(" from {name}")).unwrap_or_default();
            (other(format!("HTTP status {}{server}", response.status)), None)
        }
    }
}

fn judge_port(host: &str, port: u16, state: &PortState) -> Finding {
    let place = host_port(host, port);
    let fix = "set another port with +head_server.port=PORT (0 takes a free port)";
    match state {
        PortState::Any => Finding::not_needed(PORT, "head_server.port is 0: a head server takes a free port"),
        PortState::Free => Finding::ok(PORT, format!("{place} is free for a head server")),
        PortState::Head { ours, servers } => {
            let whose = if *ours { "a head server of this SDK" } else { "NeMo Gym's head server" };
            let found = format!("{whose} listens on {place} (servers: {servers}); another one needs another port");
            Finding::ok(PORT, found)
        }
        PortState::Other { answer, process } => {
            let process = process.as_deref().unwrap_or("another program");
            let found = format!("{process}, which is no head server, listens on {place}: {answer}");
            Finding::warning(PORT, found, format!("stop that program, or {fix}"))
        }
        PortState::Unusable(error) => {
            let found = format!("{place} has no head server, and this machine cannot listen there: {error}");
            Finding::warning(PORT, found, format!("correct head_server.host, or {fix}"))
        }
    }
}

/// Judges the limits on file descriptors; `None` is no limit. The commands raise the soft limit to the hard limit.
fn judge_descriptors(soft: Option<u64>, hard: Option<u64>, concurrency: u32) -> Finding {
    let needed = u64::from(concurrency) * DESCRIPTORS_PER_ROLLOUT + DESCRIPTORS_RESERVED;
    let named = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let limits = format!("limit {} (hard limit {})", named(soft), named(hard));
    match soft.filter(|limit| *limit < needed) {
        None => Finding::ok(DESCRIPTORS, format!("{limits}; --concurrency {concurrency} may need {needed}")),
        Some(limit) => {
            let enough = limit.saturating_sub(DESCRIPTORS_RESERVED) / DESCRIPTORS_PER_ROLLOUT;
            let fix = format!(
                "raise it (`ulimit -n {needed}`, LimitNOFILE= of a systemd unit, --ulimit nofile={needed} of a container), or collect with \
                 --concurrency {}",
                enough.max(1)
            );
            Finding::warning(DESCRIPTORS, format!("{limits}, but --concurrency {concurrency} may need {needed}"), fix)
        }
    }
}

/// The directory of the results.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DiskFacts {
    directory: String,
    /// The file system, if it is a special one.
    kind: Option<DiskKind>,
    /// The error of the operating system, or the free bytes and inodes; no inodes if the file system has no limit on them.
    space: std::result::Result<(u64, Option<u64>), String>,
    writable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskKind {
    Memory(&'static str),
    Network(&'static str),
}

fn disk(output: Option<&Path>) -> DiskFacts {
    let parent = output.and_then(Path::parent).unwrap_or(Path::new(""));
    // The nearest directory that exists: a collection creates the others.
    let existing = parent.ancestors().find(|folder| folder.is_dir()).filter(|folder| !folder.as_os_str().is_empty());
    let directory = existing.unwrap_or(Path::new("."));
    let shown = std::fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned()).display().to_string();
    let found = statvfs(directory);
    let writable = access(directory, Access::WRITE_OK | Access::EXEC_OK).is_ok()
        && found.as_ref().is_ok_and(|found| !found.f_flag.contains(StatVfsMountFlags::RDONLY));
    DiskFacts {
        directory: shown,
        kind: statfs(directory).ok().and_then(|found| disk_kind(found.f_type as u64)),
        space: found
            .map(|found| (found.f_bavail * found.f_frsize, (found.f_files > 0).then_some(found.f_favail)))
            .map_err(|error| error.to_string()),
        writable,
    }
}

/// Returns the kind of a file system, by the numbers of `statfs(2)`.
fn disk_kind(magic: u64) -> Option<DiskKind> {
    Some(match magic & 0xffff_ffff {
        0x0102_1994 => DiskKind::Memory("tmpfs"),
        0x8584_58f6 => DiskKind::Memory("ramfs"),
        0x6969 => DiskKind::Network("NFS"),
        0x0bd0_0bd0 => DiskKind::Network("Lustre"),
        0x00c3_6400 => DiskKind::Network("Ceph"),
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => DiskKind::Network("SMB"),
        0x4750_4653 => DiskKind::Network("GPFS"),
        0x6573_5546 => DiskKind::Network("FUSE"),
        _ => return None,
    })
}

fn judge_disk(facts: &DiskFacts) -> Finding {
    let directory = &facts.directory;
    let elsewhere = "collect into another directory with --output";
    let (bytes, inodes) = match &facts.space {
        Ok(space) => *space,
        Err(error) => return Finding::warning(DISK, format!("{directory} cannot be examined: {error}"), elsewhere),
    };
    if !facts.writable {
        return Finding::warning(
            DISK,
            format!("{directory} cannot be written"),
            format!("change its permissions, or {elsewhere}"),
        );
    }
    let free = format!("{directory} has {:.1} GiB free", bytes as f64 / f64::from(1 << 30));
    if bytes < FREE_BYTES_MIN {
        return Finding::warning(DISK, free, format!("free some space, or {elsewhere}"));
    }
    if let Some(inodes) = inodes.filter(|inodes| *inodes < FREE_INODES_MIN) {
        return Finding::warning(
            DISK,
            format!("{free}, but only {inodes} inodes"),
            format!("remove some files, or {elsewhere}"),
        );
    }
    match facts.kind {
        Some(DiskKind::Memory(name)) => {
            let fix = format!("{elsewhere}, on a disk");
            Finding::warning(
                DISK,
                format!("{free} in memory ({name}): a restart of the machine loses the results"),
                fix,
            )
        }
        Some(DiskKind::Network(name)) => {
            Finding::ok(DISK, format!("{free} ({name}: each recorded rollout waits for its server)"))
        }
        None => Finding::ok(DISK, free),
    }
}

/// The time of another machine, compared with that of this one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClockDifference {
    url: String,
    /// Seconds by which this machine is ahead; negative if it is behind.
    ahead_s: i64,
}

/// Compares the `date` header of a response. A program on this machine has the same clock, so its header shows nothing.
fn difference(url: &str, response: &PlainResponse, now: Duration) -> Option<ClockDifference> {
    let host = url.strip_prefix("http://")?;
    if ["127.", "localhost", "[::1]", "0.0.0.0"].iter().any(|local| host.starts_with(local)) {
        return None;
    }
    let date = httpdate::parse_http_date(response.date.as_deref()?).ok()?;
    let theirs = date.duration_since(std::time::UNIX_EPOCH).ok()?;
    let ahead_s = now.as_secs().cast_signed() - theirs.as_secs().cast_signed();
    Some(ClockDifference { url: url.to_owned(), ahead_s })
}

fn judge_clock(differences: &[ClockDifference], synchronized: bool) -> Finding {
    let worst = differences.iter().max_by_key(|difference| difference.ahead_s.unsigned_abs());
    match worst {
        Some(ClockDifference { url, ahead_s }) if ahead_s.unsigned_abs() > CLOCK_DIFFERENCE_MAX_S => {
            let (seconds, side) = (ahead_s.unsigned_abs(), if *ahead_s > 0 { "ahead of" } else { "behind" });
            let found = format!("this machine's clock is {seconds} s {side} that of {url}");
            let fix = "synchronize the clocks, such as with `timedatectl set-ntp true`; wrong clocks break TLS and mix up logs and events";
            Finding::warning(CLOCK, found, fix)
        }
        Some(ClockDifference { url, .. }) => {
            Finding::ok(CLOCK, format!("agrees with that of {url} within {CLOCK_DIFFERENCE_MAX_S} s"))
        }
        None if synchronized => Finding::ok(CLOCK, "synchronized by systemd-timesyncd"),
        None => Finding::not_needed(
            CLOCK,
            "not checked: no head server or model endpoint of another machine responded, and systemd-timesyncd does not run",
        ),
    }
}

/// A response with the headers that the transports of the SDK do not pass on.
#[derive(Debug, Default)]
struct PlainResponse {
    status: u16,
    server: Option<String>,
    date: Option<String>,
    body: Vec<u8>,
}

/// Sends one `GET` to a URL with `http`.
async fn get(url: &str) -> io::Result<PlainResponse> {
    let call = async {
        let unusable = || io::Error::new(io::ErrorKind::InvalidInput, "no URL with http");
        let rest = url.strip_prefix("http://").ok_or_else(unusable)?;
        let (address, path) = rest.split_once('/').unwrap_or((rest, ""));
        // A URL without a port has the default one.
        let port =
            if address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) { "" } else { ":80" };
        let mut stream = TcpStream::connect(format!("{address}{port}")).await?;
        // With HTTP/1.0, the end of the response is that of the connection.
        let request = format!("GET /{path} HTTP/1.0\r\nhost: {address}\r\naccept: application/json\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut bytes = Vec::new();
        stream.take(RESPONSE_BYTES_MAX).read_to_end(&mut bytes).await?;
        parse(&bytes)
    };
    tokio::time::timeout(TIMEOUT, call).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn parse(bytes: &[u8]) -> io::Result<PlainResponse> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Response::new(&mut headers);
    let not_http = || io::Error::new(io::ErrorKind::InvalidData, "the answer is not HTTP");
    let httparse::Status::Complete(length) = head.parse(bytes).map_err(|_| not_http())? else { return Err(not_http()) };
    let header = |name: &str| {
        let header = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        Some(String::from_utf8_lossy(header.value).into_owned())
    };
    let (server, date) = (header("server"), header("date"));
    Ok(PlainResponse { status: head.code.unwrap_or_default(), server, date, body: bytes[length..].to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(finding: &Finding) -> (&str, &str, bool) {
        assert_eq!(finding.fix.is_some(), finding.status == "warning", "{finding:?}");
        (finding.topic.as_str(), finding.status, finding.fix.is_some())
    }

    #[test]
    fn the_port_is_free_or_has_a_head_server_or_another_program() {
        let other =
            PortState::Other { answer: "HTTP status 404 from nginx".into(), process: Some("nginx (process 7)".into()) };
        for (state, status, says) in [
            (PortState::Any, "not_needed", "free port"),
            (PortState::Free, "ok", "h:11000 is free"),
            (
                PortState::Head { ours: true, servers: 3 },
                "ok",
                "a head server of this SDK listens on h:11000 (servers: 3)",
            ),
            (
                PortState::Head { ours: false, servers: 2 },
                "ok",
                "NeMo Gym's head server listens on h:11000 (servers: 2)",
            ),
            (other, "warning", "nginx (process 7), which is no head server, listens on h:11000: HTTP status 404"),
            (PortState::Other { answer: "x".into(), process: None }, "warning", "another program, which is no head"),
            (PortState::Unusable("denied".into()), "warning", "cannot listen there: denied"),
        ] {
            let finding = judge_port("h", 11_000, &state);
            assert_eq!(judged(&finding).1, status, "{finding:?}");
            assert!(finding.found.contains(says), "{finding:?}");
            assert!(finding.fix.is_none_or(|fix| fix.contains("+head_server.port=PORT")), "{state:?}");
        }
    }

    #[test]
    fn descriptors_are_compared_with_what_the_concurrency_needs() {
        for (soft, hard, concurrency, status) in [
            (None, None, 1_024, "ok"),
            (Some(4_352), Some(4_352), 1_024, "ok"),
            (Some(4_351), Some(1 << 20), 1_024, "warning"),
            (Some(1_024), Some(1_024), 192, "ok"),
            (Some(64), Some(64), 1, "warning"),
        ] {
            let finding = judge_descriptors(soft, hard, concurrency);
            assert_eq!(judged(&finding).1, status, "{finding:?}");
        }
        let fix = judge_descriptors(Some(1_024), Some(4_096), 1_024).fix.unwrap();
        assert!(fix.contains("ulimit -n 4352") && fix.ends_with("--concurrency 192"), "{fix}");
    }

    #[test]
    fn a_disk_that_is_full_or_forgets_is_a_warning() {
        let fine =
            DiskFacts { directory: "/d".into(), kind: None, space: Ok((5 << 30, Some(1 << 20))), writable: true };
        for (facts, status, says) in [
            (fine.clone(), "ok", "/d has 5.0 GiB free"),
            (DiskFacts { space: Ok((5 << 30, None)), ..fine.clone() }, "ok", "5.0 GiB"),
            (DiskFacts { kind: Some(DiskKind::Network("NFS")), ..fine.clone() }, "ok", "NFS"),
            (DiskFacts { kind: Some(DiskKind::Memory("tmpfs")), ..fine.clone() }, "warning", "loses the results"),
            (DiskFacts { space: Ok((1 << 29, None)), ..fine.clone() }, "warning", "0.5 GiB free"),
            (DiskFacts { space: Ok((5 << 30, Some(9))), ..fine.clone() }, "warning", "only 9 inodes"),
            (DiskFacts { space: Err("stale handle".into()), ..fine.clone() }, "warning", "stale handle"),
            (DiskFacts { writable: false, ..fine }, "warning", "cannot be written"),
        ] {
            let finding = judge_disk(&facts);
            assert_eq!(judged(&finding).1, status, "{finding:?}");
            assert!(finding.found.contains(says), "{finding:?}");
            assert!(finding.fix.is_none_or(|fix| fix.contains("--output")), "{facts:?}");
        }
    }

    #[test]
    fn the_directory_of_an_output_is_the_nearest_one_that_exists() {
        let folder = tempfile::tempdir().unwrap();
        let facts = disk(Some(&folder.path().join("new/er/rollouts.jsonl")));
        assert_eq!(facts.directory, std::fs::canonicalize(folder.path()).unwrap().display().to_string());
        assert!(facts.writable && facts.space.unwrap().0 > 0);
        assert_eq!(disk(None).directory, disk(Some(Path::new("rollouts.jsonl"))).directory);
        assert_eq!(disk_kind(statfs("/dev/shm").unwrap().f_type as u64), Some(DiskKind::Memory("tmpfs")));
    }

    #[test]
    fn the_clock_is_compared_with_another_machine_or_the_operating_system_is_asked() {
        let of = |ahead_s| ClockDifference { url: "http://m:8000/v1/models".into(), ahead_s };
        for (differences, synchronized, status, says) in [
            (vec![of(1), of(-312)], true, "warning", "312 s behind that of http://m:8000"),
            (vec![of(6)], true, "warning", "6 s ahead of"),
            (vec![of(5)], false, "ok", "within 5 s"),
            (vec![], true, "ok", "systemd-timesyncd"),
            (vec![], false, "not_needed", "not checked"),
        ] {
            let finding = judge_clock(&differences, synchronized);
            assert_eq!(judged(&finding).1, status, "{finding:?}");
            assert!(finding.found.contains(says), "{finding:?}");
        }
        let response =
            || PlainResponse { date: Some("Sun, 06 Nov 1994 08:49:37 GMT".into()), ..PlainResponse::default() };
        let now = Duration::from_secs(784_111_777 + 60);
        assert_eq!(difference("http://m:8000/v1/models", &response(), now), Some(of(60)));
        assert_eq!(difference("http://127.0.0.1:8000/v1/models", &response(), now), None, "the same clock");
    }

    #[tokio::test]
    async fn who_has_a_port_is_found_by_asking() {
        let listening = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listening.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listening.incoming() {
                use std::io::{Read as _, Write as _};
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 1_024]);
                let _ = stream
                    .write_all(b"HTTP/1.1 404 x\r\nserver: nginx\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            }
        });
        let (state, _) = port_state("127.0.0.1", port).await;
        let PortState::Other { answer, process } = &state else { panic!("{state:?}") };
        assert_eq!(answer, "HTTP status 404 from nginx");
        assert!(process.as_deref().unwrap().ends_with(&format!("(process {})", std::process::id())), "{process:?}");
        let (unusable, _) = port_state("192.0.2.1", port).await;
        assert!(matches!(unusable, PortState::Unusable(_)), "{unusable:?}");
        assert_eq!(port_state("127.0.0.1", 0).await.0, PortState::Any);
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        assert_eq!(port_state("127.0.0.1", free).await.0, PortState::Free);
    }
}
