//! `rgym doctor`: reports which transports this machine supports, whether the model endpoints of a configuration respond, and whether its
//! ports, descriptors, disk and clock are fit for a collection; why not, and how to fix it.
//!
//! Most findings come from files. UCX is loaded in a child process, under a deadline: loading UCX changes a process
//! permanently, and a broken UCX may crash or hang.

use std::fmt::Write;
use std::process::ExitCode;

use gym_core::World;
use gym_core::server::ServerKind;
use gym_core::transport::{Transport, TransportReport};
use serde::Serialize;

use crate::cli::args::options::{DoctorArgs, Sources};
use crate::cli::console;
use crate::cli::exit::{FAILED, FAULTY, Failure, INCOMPLETE, Outcome};
use crate::cli::inspect::finding::Finding;
use crate::cli::inspect::machine::{self, Examined};
use crate::cli::inspect::recording;
use crate::cli::inspect::self_test::{self, Tested};
use crate::cli::setup::configuration::{LoadedConfig, Need, load};
use crate::cli::setup::models;
use crate::stack::{self, Servers};

/// The report.
#[derive(Debug, Serialize)]
struct Diagnosis {
    /// A summary in one sentence.
    summary: String,
    /// The transports in order of preference.
    transports: Vec<TransportReport>,
    /// The measurements of two processes of this machine; empty without the self-test.
    self_test: Vec<Tested>,
    findings: Vec<Finding>,
    /// Ports of RDMA devices, with the GID to use.
    ports: serde_json::Value,
    /// UCX's own report; null if UCX could not be loaded.
    ucx: serde_json::Value,
}

pub(in crate::cli) async fn doctor(args: &DoctorArgs, overrides: &[String], servers: &Servers) -> Outcome {
    if let Some(file) = &args.record {
        return recording::record(file, args).await;
    }
    if !args.replay.is_empty() {
        return recording::replay(&args.replay, args.json);
    }
    let transports = servers.transports();
    let required = args.require_transport.as_deref().map(|name| Transport::named(name, &transports.known()));
    let required = required.transpose().map_err(|error| Failure::Usage(error.message().to_owned()))?;
    // First, because an error of the configuration ends the command.
    let sources = Sources { files: args.files.clone(), ..Sources::default() };
    let loaded = load(&sources, overrides, servers, Need::Values).await?;
    let (mut findings, endpoints) = model_endpoints(args, &loaded, servers).await?;
    let head = &loaded.config.head;
    let examined = Examined {
        head: (&head.host, head.port),
        concurrency: args.concurrency,
        output: args.output.as_deref(),
        endpoints: &endpoints,
    };
    findings.extend(machine::findings(examined).await);
    let mut diagnosis = checks::diagnosis(&transports, args).await;
    if !args.no_self_test {
        diagnosis.self_test = self_test::run(&diagnosis.transports).await;
        findings.extend(diagnosis.self_test.iter().filter_map(Tested::finding));
    }
    diagnosis.findings.splice(0..0, findings);
    diagnosis.findings.sort_by_key(|finding| match finding.status {
        "error" => 0,
        "warning" => 1,
        _ => 2,
    });
    let required = required.and_then(|transport| diagnosis.missing(transport));
    let text = if args.json {
        serde_json::to_string_pretty(&diagnosis).map_err(|error| Failure::Failed(error.to_string()))?
    } else {
        diagnosis.text()
    };
    console::print(&text);
    Ok(match required {
        Some(why) if args.json => {
            eprintln!("error: {why}");
            ExitCode::from(FAILED)
        }
        Some(why) => return Err(Failure::Failed(why)),
        None if diagnosis.has("error") => ExitCode::from(FAULTY),
        None if diagnosis.has("warning") => ExitCode::from(INCOMPLETE),
        None => ExitCode::SUCCESS,
    })
}

/// Calls the endpoints of the native model servers of a configuration, those that fail first. Also returns the URLs of those that respond.
async fn model_endpoints(
    args: &DoctorArgs,
    loaded: &LoadedConfig,
    servers: &Servers,
) -> Result<(Vec<Finding>, Vec<String>), Failure> {
    if args.files.is_empty() {
        return Ok((
            vec![Finding::not_needed(TOPIC, "not called, because --config names no configuration")],
            Vec::new(),
        ));
    }
    let world = World::real();
    let (mut findings, mut responding) = (Vec::new(), Vec::new());
    for instance in loaded.config.instances.iter().filter(|instance| instance.kind == ServerKind::Model) {
        let made = match stack::try_build(instance, servers, &world) {
            Ok(Some(made)) => made,
            Ok(None) => continue,
            // Such as https in a program without TLS. The other findings are as useful.
            Err(error) => {
                findings.push(Finding::warning(
                    TOPIC,
                    error.to_string(),
                    format!("correct the block{}", unused_proxy()),
                ));
                continue;
            }
        };
        for endpoint in models::probe(&instance.name, &*made.handler).await {
            let fix = endpoint.report.fix.clone();
            if fix.is_empty() {
                findings.push(Finding::ok(TOPIC, endpoint.summary()));
                responding.push(endpoint.report.url);
            } else {
                findings.push(Finding::warning(TOPIC, endpoint.summary(), fix + &unused_proxy()));
            }
        }
    }
    if findings.is_empty() {
        findings.push(Finding::not_needed(
            TOPIC,
            "no model server of the configuration calls an endpoint from this program",
        ));
    }
    Ok((findings, responding))
}

/// Returns what to know of a proxy that the environment names; empty if it names none.
fn unused_proxy() -> String {
    let set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let names = ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
    let found = names.into_iter().find(set);
    found
        .map(|name| format!("; {name} is set, and this program uses no proxy: it needs a direct route"))
        .unwrap_or_default()
}

/// The topic of findings about model endpoints.
const TOPIC: &str = "model_endpoint";

impl Diagnosis {
    fn has(&self, status: &str) -> bool {
        self.findings.iter().any(|finding| finding.status == status)
    }

    /// Returns the reason why a required transport is unavailable, with the fix, or `None` if it is available.
    fn missing(&self, transport: Transport) -> Option<String> {
        let check = self.transports.iter().find(|check| check.transport == transport)?;
        let fix = check.fix.as_deref().unwrap_or("see the findings");
        (!check.usable).then(|| format!("{transport} cannot be used here: {}; fix: {fix}", check.because))
    }

    fn text(&self) -> String {
        let rows = self.transports.iter().map(|check| {
            let usable = if check.usable { "yes" } else { "no" };
            [check.transport.to_string(), usable.to_owned(), check.because.clone()]
        });
        let mut text = console::table(["transport", "usable", "devices, or why unavailable"], rows);
        if !self.self_test.is_empty() {
            let _ = write!(text, "\n\n{}", self_test::table(&self.self_test));
        }
        text.push('\n');
        for finding in &self.findings {
            let _ =
                write!(text, "\n{:<10}  {:<14}  {}", finding.status.replace('_', " "), finding.topic, finding.found);
            if let Some(fix) = &finding.fix {
                let _ = write!(text, "\n{:<10}  {:<14}  fix: {fix}", "", "");
            }
        }
        let _ = write!(text, "\n\n{}", self.summary);
        text
    }
}

#[cfg(feature = "rdma")]
mod checks {
    use std::net::IpAddr;
    use std::path::Path;
    use std::time::Duration;

    use gym_client::transport::RDMA;
    use gym_client::transport::rdma::UcxBackend;
    use gym_client::transport::rdma::backend::{WITH_VERBS, fact_and_fix};
    use gym_client::transport::rdma::probe::machine::{Live, Machine as _};
    use gym_client::transport::rdma::probe::{Finding as Found, Probe, ProbeOptions, Status, Topic};
    use gym_client::transport::rdma::transport::UcxReport;
    use gym_client::transport::rdma::tuning;
    use gym_client::{Transports, launch};
    use gym_core::World;
    use gym_core::transport::TransportReport;
    use serde_json::to_value;

    use super::Diagnosis;
    use crate::cli::args::options::DoctorArgs;
    use crate::cli::inspect::finding::Finding;

    pub(super) async fn diagnosis(transports: &Transports, args: &DoctorArgs) -> Diagnosis {
        let within = args.ucx_timeout;
        let reports = transports.diagnose(within).await;
        let (probe, ucx) = match transports.get::<UcxBackend>() {
            Some(backend) => backend.examine(within).await,
            None => (ProbeOptions::new().without_loading().probe(), Err("the program has no UCX backend".to_owned())),
        };
        let mut diagnosis = judge(reports, &probe, &ucx);
        diagnosis.findings.extend(nccl_meeting(args.nccl_timeout).await);
        // Many small files are read.
        let tuned = World::real().blocking(|| tuning::judge(&Live::new())).await.unwrap_or_default();
        diagnosis.findings.extend(probe.beside(tuned).into_iter().map(of_tuning));
        let said = warnings(&ucx, &diagnosis.findings);
        diagnosis.findings.extend(said);
        diagnosis
    }

    /// Asks NCCL which interface it chooses, in a process of its own.
    async fn nccl_meeting(within: Duration) -> Option<Finding> {
        let library = World::real().blocking(|| Live::new().library("libnccl.so.2")).await.ok()?.ok()??;
        let topic = "nccl_interface".to_owned();
        let (status, found, fix) = match launch::nccl_meeting(Path::new(&library.path), within).await {
            Ok(meeting) => {
                let place = meeting
                    .address
                    .map_or_else(|| "an address of its choice".to_owned(), |address| interface_of(address.ip()));
                ("ok", format!("ranks of NCCL {} would meet at {place}", meeting.version), None)
            }
            Err(error) => {
                let fix =
                    "set NCCL_SOCKET_IFNAME to an interface that is up and that the other machines reach, or unset it";
                ("error", format!("ranks of NCCL would not find each other: {error}"), Some(fix.to_owned()))
            }
        };
        Some(Finding { topic, status, found, fix })
    }

    /// Returns an address with the name of its interface.
    fn interface_of(address: IpAddr) -> String {
        let addresses = Live::new().addresses().unwrap_or_default();
        let interface = addresses.into_iter().find(|own| own.address == address);
        interface.map_or_else(|| address.to_string(), |own| format!("{address} ({})", own.interface))
    }

    /// Returns what UCX itself warned of, apart from what a rule has said already.
    pub(super) fn warnings(ucx: &Result<UcxReport, String>, findings: &[Finding]) -> Vec<Finding> {
        let warnings = ucx.iter().flat_map(|report| &report.warnings);
        // A rule names the variable, or the device that UCX puts in quotes.
        let is_said = |warning: &str| {
            let fact = warning.split([';', '(']).next().unwrap_or(warning);
            let fact = fact.split(", please").next().unwrap_or(fact);
            let words = fact.split([' ', ',']).filter(|word| word.starts_with("UCX_"));
            let names: Vec<&str> = fact.split('\'').skip(1).step_by(2).chain(words).collect();
            let is_told = |name: &&str| {
                let mut faults = findings.iter().filter(|finding| matches!(finding.status, "warning" | "error"));
                faults.any(|finding| finding.topic == **name || finding.found.contains(*name))
            };
            !names.is_empty() && names.iter().all(is_told)
        };
        let told = warnings.filter(|warning| !is_said(warning)).map(|warning| {
            let fix = "correct the variable or the line of ucx.conf that it names, or remove it";
            Finding::warning("ucx", format!("UCX warns: {warning}"), fix)
        });
        told.collect()
    }

    /// How processes of one host may read each other's memory.
    const CMA: &str = "in a container: --cap-add=SYS_PTRACE, compose: cap_add: [SYS_PTRACE]; on a host: sysctl kernel.yama.ptrace_scope=0";

    fn of_tuning(finding: tuning::Finding) -> Finding {
        let found = finding.fact();
        let (status, fix) = (finding.severity.as_str(), Some(finding.fix).filter(|fix| !fix.is_empty()));
        Finding { topic: finding.about, status, found, fix }
    }

    /// Combines the findings from files with UCX's own report.
    pub(super) fn judge(transports: Vec<TransportReport>, probe: &Probe, ucx: &Result<UcxReport, String>) -> Diagnosis {
        let ports = probe.ports.iter().any(|port| port.active);
        let mut findings: Vec<Finding> = probe
            .findings
            .iter()
            .map(|finding| match (finding.topic, ucx) {
                // The report of a loaded UCX is more reliable than its files. A UCX whose files exist but which cannot be loaded is
                // broken.
                (Topic::Ucx, Ok(report)) if finding.because.is_empty() => loaded(report, ports),
                (Topic::Ucx, Err(why)) if probe.ucx_stopped().is_none() => {
                    let (fact, fix) = fact_and_fix(why);
                    let status = if finding.status == Status::Missing { "missing" } else { "warning" };
                    Finding { status, fix: Some(fix), ..written(finding, fact) }
                }
                // A rule about settings knows more than UCX says.
                _ => written(finding, tuning::with_reason(&finding.found, &finding.because)),
            })
            .collect();
        // Errors and warnings first, then missing components; otherwise in the order of their dependencies.
        findings.sort_by_key(|finding| match finding.status {
            "error" => 0,
            "warning" => 1,
            "missing" => 2,
            _ => 3,
        });
        Diagnosis {
            summary: probe.summary.clone(),
            transports,
            self_test: Vec::new(),
            findings,
            ports: to_value(&probe.ports).unwrap_or_default(),
            ucx: ucx.as_ref().ok().and_then(|report| to_value(report).ok()).unwrap_or_default(),
        }
    }

    fn written(finding: &Found, found: String) -> Finding {
        let topic = to_value(finding.topic).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default();
        let status = match finding.status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Error => "error",
            Status::Missing => "missing",
            Status::NotNeeded => "not_needed",
        };
        Finding { topic, status, found, fix: finding.fix.clone() }
    }

    fn loaded(report: &UcxReport, ports: bool) -> Finding {
        let found = format!("UCX {} ({}): {}", report.version, report.path.display(), report.resources.join(", "));
        // Docker's default profile forbids it, and so does ptrace_scope.
        let has = |prefix: &str| report.resources.iter().any(|name| name.starts_with(prefix));
        let shares = has("posix/") || has("sysv/");
        let is_free = std::env::var_os("UCX_TLS").is_none();
        let found = match is_free && shares && !has("cma/") && !has("xpmem/") && !has("knem/") {
            true => format!("{found}; without cma, bulk data is copied twice on this host ({CMA})"),
            false => found,
        };
        let (status, fix) = if ports && report.of(RDMA).is_empty() {
            ("warning", Some(WITH_VERBS.to_owned()))
        } else if report.patched.is_empty() {
            ("ok", None)
        } else {
            ("warning", Some("set UCX_MEM_MMAP_HOOK_MODE=none: this UCX patches libc's memory functions".to_owned()))
        };
        Finding { topic: "ucx".to_owned(), status, found, fix }
    }
}

#[cfg(not(feature = "rdma"))]
mod checks {
    use std::path::Path;

    use gym_client::Transports;
    use serde_json::Value;

    use super::Diagnosis;
    use crate::cli::args::options::DoctorArgs;
    use crate::cli::inspect::finding::Finding;

    pub(super) async fn diagnosis(transports: &Transports, args: &DoctorArgs) -> Diagnosis {
        let summary = "This program was built without the feature `rdma`, so UCX was not checked.";
        let fix = "build with the feature `rdma` of gym-server";
        let finding = Finding {
            topic: "ucx".to_owned(),
            status: "missing",
            found: "built without the feature `rdma`".to_owned(),
            fix: Some(fix.to_owned()),
        };
        Diagnosis {
            summary: summary.to_owned(),
            transports: transports.diagnose(args.ucx_timeout).await,
            self_test: Vec::new(),
            findings: vec![finding, gpu(Path::new("/"))],
            ports: Value::Array(Vec::new()),
            ucx: Value::Null,
        }
    }

    /// Looks for GPUs. With the feature `rdma`, the probe of UCX and NCCL does, and loads the driver's library too.
    fn gpu(root: &Path) -> Finding {
        let is_gpu = |name: &str| {
            name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let nodes = std::fs::read_dir(root.join("dev")).into_iter().flatten().flatten();
        let gpus = nodes.filter(|node| node.file_name().to_str().is_some_and(is_gpu)).count();
        let driver = root.join("proc/driver/nvidia/version").exists();
        let fix = "install the NVIDIA driver; in a container use the NVIDIA container toolkit (docker: --gpus all)";
        let (found, missing) = match (driver, gpus) {
            (true, 1..) => (format!("NVIDIA GPUs: {gpus}"), false),
            (false, 0) => ("no NVIDIA GPU (neither /proc/driver/nvidia/version nor /dev/nvidia0)".to_owned(), true),
            (false, _) => ("/dev/nvidia0 without a driver (no /proc/driver/nvidia/version)".to_owned(), true),
            (true, 0) => ("NVIDIA driver without a GPU (no /dev/nvidia0)".to_owned(), true),
        };
        Finding {
            topic: "gpu".to_owned(),
            status: if missing { "missing" } else { "ok" },
            found,
            fix: missing.then(|| fix.to_owned()),
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_gpu_needs_its_driver_and_its_node() {
            let root = tempfile::tempdir().unwrap();
            let status = || gpu(root.path()).status;
            assert!(gpu(root.path()).found.starts_with("no NVIDIA GPU"));
            let write = |path: &str| {
                let path = root.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, "").unwrap();
            };
            ["dev/nvidiactl", "dev/nvidia0", "dev/nvidia-uvm"].into_iter().for_each(write);
            assert_eq!(status(), "missing");
            write("proc/driver/nvidia/version");
            write("dev/nvidia11");
            assert_eq!((status(), gpu(root.path()).found.as_str()), ("ok", "NVIDIA GPUs: 2"));
        }
    }
}

#[cfg(all(test, feature = "rdma"))]
mod tests {
    use gym_client::transport::rdma::backend::diagnose;
    use gym_client::transport::rdma::probe::ProbeOptions;
    use gym_client::transport::rdma::transport::UcxReport;
    use gym_client::transport::{HTTP, RDMA, SHM, UCX_TCP};
    use serde_json::json;

    use super::*;

    /// Returns the report for a machine with one RoCE port, the given files and the given UCX.
    fn diagnosis(files: &[(&str, &str)], ucx: Result<&[&str], &str>) -> Diagnosis {
        let port = "sys/class/infiniband/rxe0/ports/1";
        let root = tempfile::tempdir().expect("folder");
        let of_port =
            [("state", "4: ACTIVE"), ("link_layer", "Ethernet"), ("rate", "2.5 Gb/sec"), ("gids/0", "fe80::1")];
        let of_port = of_port.map(|(name, text)| (format!("{port}/{name}"), text));
        let gid = [("types", "RoCE v2"), ("ndevs", "v0")];
        let gid = gid.map(|(name, text)| (format!("{port}/gid_attrs/{name}/0"), text));
        let rest =
            ["sys/class/net/v0/operstate", "usr/lib/libibverbs.so.1", "dev/shm/x"].map(|path| (path.to_owned(), "up"));
        let own = files.iter().map(|(path, text)| ((*path).to_owned(), *text));
        for (path, text) in of_port.into_iter().chain(gid).chain(rest).chain(own) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("has a folder")).expect("folders");
            std::fs::write(path, text).expect("writes");
        }
        let report = |resources: &[&str]| -> UcxReport {
            let report = json!({"version": "1.13.1", "path": "/opt/libucp.so.0", "resources": resources,
                "signals_restored": [], "patched": [], "warnings": []});
            serde_json::from_value(report).expect("a report")
        };
        let (probe, ucx) = (ProbeOptions::new().root(root.path()).probe(), ucx.map(report).map_err(str::to_owned));
        let own = [SHM, RDMA, UCX_TCP].map(|transport| diagnose(transport, &probe, &ucx));
        let always = |transport| TransportReport::usable(transport, "always");
        let reports = [always(Transport::MEM)].into_iter().chain(own).chain([always(HTTP)]).collect();
        checks::judge(reports, &probe, &ucx)
    }

    const COMPLETE: [(&str, &str); 4] = [
        ("dev/infiniband/uverbs0", ""),
        ("dev/infiniband/rdma_cm", ""),
        ("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes\n"),
        ("proc/self/status", "CapEff:\t0000000000000000\n"),
    ];

    fn usable(diagnosis: &Diagnosis) -> Vec<&'static str> {
        diagnosis.transports.iter().filter(|check| check.usable).map(|check| check.transport.as_str()).collect()
    }

    #[test]
    fn a_transport_is_usable_if_the_machine_meets_its_requirements_and_ucx_has_a_device_for_it() {
        let devices = ["posix/memory", "tcp/lo", "rc_verbs/rxe0:1"];
        let complete = diagnosis(&COMPLETE, Ok(&devices));
        assert_eq!(usable(&complete), ["mem", "shm", "rdma", "ucx_tcp", "http"]);
        assert_eq!(complete.missing(RDMA), None);
        // UCX lists the device, but the process could not pin its memory.
        let limit = "Max locked memory         8388608              8388608              bytes\n";
        let poor = diagnosis(&[COMPLETE[0], COMPLETE[1], ("proc/self/limits", limit), COMPLETE[3]], Ok(&devices));
        assert_eq!(usable(&poor), ["mem", "shm", "ucx_tcp", "http"]);
        let missing = poor.missing(RDMA).unwrap();
        assert!(missing.contains("may be pinned") && missing.contains("; fix: "), "{missing}");
    }

    #[test]
    fn a_ucx_that_does_not_see_the_device_is_a_warning_with_a_fix_and_comes_first() {
        let blind = diagnosis(&COMPLETE, Ok(&["tcp/lo"]));
        assert_eq!(usable(&blind), ["mem", "ucx_tcp", "http"]);
        let first = &blind.findings[0];
        assert_eq!((first.topic.as_str(), first.status), ("ucx", "warning"));
        assert!(first.fix.as_deref().unwrap().contains("with verbs"), "{first:?}");
    }

    #[test]
    fn a_ucx_that_cannot_be_loaded_is_reported_in_its_own_words() {
        let broken = diagnosis(&[("usr/lib/libucp.so.0", "")], Err("died by signal 11"));
        assert_eq!(usable(&broken), ["mem", "http"]);
        let ucx = broken.findings.iter().find(|finding| finding.topic == "ucx").unwrap();
        assert_eq!((ucx.status, ucx.found.as_str()), ("warning", "died by signal 11"));
        let absent = diagnosis(&[], Err("not there"));
        let ucx = absent.findings.iter().find(|finding| finding.topic == "ucx").unwrap();
        assert_eq!(ucx.status, "missing", "absence is no defect");
        assert!(ucx.fix.as_deref().unwrap().contains("apt-get install libucx0"));
    }

    #[test]
    fn a_setting_that_stops_ucx_is_named_with_its_source_and_no_installation_is_advised() {
        let library = ("usr/lib/libucp.so.0", "");
        let of = |variables: &str, why: &str| diagnosis(&[library, ("proc/self/environ", variables)], Err(why));
        let quoted = of("UCX_TLS=\"rc\"\0", "start UCX with: No such device (UCX status -16)");
        let unreadable = of("UCX_MAX_EAGER_LANES=abc\0", "the process that loaded UCX died by signal 11");
        for (found, name, value) in [(quoted, "UCX_TLS", "\"rc\""), (unreadable, "UCX_MAX_EAGER_LANES", "`abc`")] {
            let ucx = found.findings.iter().find(|finding| finding.topic == "ucx").unwrap();
            let fix = ucx.fix.as_deref().unwrap();
            assert!(ucx.status == "error" && ucx.found.contains(name) && ucx.found.contains(value), "{ucx:?}");
            assert!(ucx.found.contains("the environment") && !fix.contains("install"), "{ucx:?}");
            let tcp = found.missing(UCX_TCP).unwrap();
            assert!(tcp.contains(name) && !tcp.contains("install"), "{tcp}");
        }
    }

    #[test]
    fn a_ucx_that_may_not_read_other_processes_is_told_so_and_is_no_fault() {
        let ucx = |devices: &[&str]| {
            let found = diagnosis(&COMPLETE, Ok(devices)).findings.into_iter().find(|finding| finding.topic == "ucx");
            found.map(|finding| (finding.status, finding.found)).unwrap()
        };
        let (status, found) = ucx(&["posix/memory", "tcp/lo", "rc_verbs/rxe0:1"]);
        assert!(status == "ok" && found.contains("without cma") && found.contains("--cap-add=SYS_PTRACE"), "{found}");
        let (_, found) = ucx(&["posix/memory", "cma/memory", "rc_verbs/rxe0:1"]);
        assert!(!found.contains("without cma"), "{found}");
    }

    #[test]
    fn warnings_of_ucx_are_findings_unless_a_rule_has_said_it() {
        let mut report: UcxReport = serde_json::from_value(json!({"version": "1.13.1", "path": "/x", "resources": [],
            "signals_restored": [], "patched": []}))
        .unwrap();
        report.warnings = vec![
            "unused env variables: UCX_FOO,UCX_NET_DEVICES (set UCX_WARN_UNUSED_ENV_VARS=n to suppress this warning)"
                .to_owned(),
            "network device 'eth9' is not available, please use one or more of: 'eth0'(tcp)".to_owned(),
            "transport 'foo' is not available, please use one or more of: self".to_owned(),
        ];
        let rule = Finding::warning("UCX_NET_DEVICES", "eth9 is not here: UCX knows eth0", "write it");
        let said = checks::warnings(&Ok(report), &[rule]);
        let found: Vec<&str> = said.iter().map(|finding| finding.found.as_str()).collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("UCX_FOO") && found[1].contains("'foo'"), "{found:?}");
    }

    #[test]
    fn every_warning_and_everything_missing_has_a_fix() {
        for found in
            [diagnosis(&[], Err("not there")), diagnosis(&COMPLETE, Ok(&["tcp/lo"])), diagnosis(&COMPLETE, Ok(&[]))]
        {
            for check in &found.transports {
                assert_eq!(check.fix.is_none(), check.usable, "{check:?}");
            }
            for finding in &found.findings {
                let wanted = matches!(finding.status, "error" | "warning" | "missing");
                assert_eq!(finding.fix.is_some(), wanted, "{finding:?}");
            }
            assert!(found.text().contains(&found.summary));
        }
    }
}
