//! UCX as a backend of a program.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use gym_core::Handler;
use gym_core::transport::{
    Backend, BoundListener, Connector, ListenOptions, Listener, Transport, TransportPolicy, TransportReport,
};
use tokio::sync::OnceCell;

use crate::fabric::{FabricOptions, LIBRARY_VARIABLE};
use crate::probe::{Finding, Probe, ProbeOptions, Status, Topic};
use crate::transport::config::{Ucx, UcxConfig};
use crate::transport::connector::UcxConnector;
use crate::transport::listener::UcxListener;
use crate::transport::report::UcxReport;
use crate::transport::{RDMA, SHM, UCX_TCP};

/// Environment variables that UCX reads when it is loaded. Without them, UCX takes over the handlers of SIGSEGV and similar signals
/// (Rust's report of a stack overflow is lost), patches libc's `mmap`, and logs to standard output, into the results of a command.
pub const UCX_VARIABLES: [(&str, &str); 3] =
    [("UCX_HANDLE_ERRORS", "none"), ("UCX_MEM_MMAP_HOOK_MODE", "none"), ("UCX_LOG_FILE", "stderr")];

/// Takes UCX's report on itself, in at most this time. The error is the reason why UCX cannot be used.
pub type Reporter = fn(Duration) -> BoxFuture<'static, Result<UcxReport, String>>;

/// Backend that connects and listens over UCX, with one fabric that is opened on first use.
///
/// `bootstrap` carries the requests by which peers exchange their UCX addresses.
///
/// ```
/// use std::sync::Arc;
///
/// use gym_client::Transports;
/// use gym_client::transport::http::http1::HttpConnector;
/// use gym_core::transport::TransportPolicy;
/// use gym_transport_rdma::{RDMA, Ucx, UcxBackend, UcxConfig};
///
/// let ucx = UcxBackend::new(Arc::new(HttpConnector::default()), Ucx::new(UcxConfig::default()));
/// let transports = Transports::standard().with(ucx).with_policy(TransportPolicy::auto());
/// assert!(transports.get::<UcxBackend>().is_some());
/// ```
#[derive(Clone, Debug)]
pub struct UcxBackend {
    bootstrap: Arc<dyn Connector>,
    ucx: Ucx,
    reporter: Option<Reporter>,
    examined: Arc<OnceCell<(Probe, Result<UcxReport, String>)>>,
}

impl UcxBackend {
    /// Creates a backend whose peers exchange their addresses over `bootstrap`. Loads nothing.
    #[must_use]
    pub fn new(bootstrap: Arc<dyn Connector>, ucx: Ucx) -> Self {
        Self { bootstrap, ucx, reporter: None, examined: Arc::default() }
    }

    /// Sets how UCX's report on itself is taken. Loading UCX changes a process permanently, so a program takes the report in a child
    /// process. Without a reporter, the diagnosis says that UCX was not loaded.
    #[must_use]
    pub fn reported_by(mut self, reporter: Reporter) -> Self {
        self.reporter = Some(reporter);
        self
    }

    /// Returns the findings from files, and UCX's report on itself or the reason why there is none. They are taken once.
    pub async fn examine(&self, within: Duration) -> (Probe, Result<UcxReport, String>) {
        let examine = || async {
            // The probe reads files, and loads NVIDIA's libraries: not for a thread that others wait for.
            let probing = tokio::task::spawn_blocking(crate::probe::probe);
            let reporting = async {
                match self.reporter {
                    Some(reporter) => reporter(within).await,
                    None => Err("UCX was not loaded: the program has set no reporter".to_owned()),
                }
            };
            let (probe, report) = tokio::join!(probing, reporting);
            (probe.unwrap_or_else(|_| ProbeOptions::new().without_loading().probe()), report)
        };
        self.examined.get_or_init(examine).await.clone()
    }

    /// The UCX state that connectors and listeners share, for its statistics.
    #[must_use]
    pub fn ucx(&self) -> &Ucx {
        &self.ucx
    }
}

#[async_trait]
impl Backend for UcxBackend {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        vec![Arc::new(UcxConnector::new(Arc::clone(&self.bootstrap), self.ucx.clone()))]
    }

    async fn listen(
        &self,
        options: &ListenOptions,
        handler: Arc<dyn Handler>,
    ) -> gym_core::Result<Option<BoundListener>> {
        let scheme = self.bootstrap.scheme();
        let met: Vec<_> = options.bound.iter().filter(|endpoint| endpoint.scheme() == scheme).cloned().collect();
        if met.is_empty() {
            return Ok(None);
        }
        let listener = UcxListener::open(self.ucx.clone(), &met).await?;
        let handler = Arc::new(listener.bootstrap(handler));
        Ok(Some(BoundListener { listener: Box::new(listener) as Box<dyn Listener>, handler }))
    }

    fn meets_over(&self) -> Vec<Transport> {
        self.bootstrap.transports()
    }

    fn variables(&self) -> Vec<(&'static str, &'static str)> {
        UCX_VARIABLES.to_vec()
    }

    async fn diagnose(&self, within: Duration) -> Vec<TransportReport> {
        let (probe, ucx) = self.examine(within).await;
        [SHM, RDMA, UCX_TCP].map(|transport| diagnose(transport, &probe, &ucx)).to_vec()
    }

    fn scoped(&self, policy: &TransportPolicy, host: Option<IpAddr>) -> Option<Arc<dyn Backend>> {
        let names = [(SHM, "shm"), (UCX_TCP, "tcp")];
        let allowed = names.into_iter().filter(|(transport, _)| policy.allows(*transport)).map(|(_, name)| name);
        let transports = (!policy.allows(RDMA)).then(|| allowed.chain(["self"]).collect::<Vec<_>>().join(","));
        let listen = host.map(|host| SocketAddr::new(host, 0));
        let fabric = FabricOptions { listen, transports, ..self.ucx.config().fabric.clone() };
        let ucx = Ucx::new(UcxConfig { fabric, ..self.ucx.config().clone() });
        Some(Arc::new(Self { ucx, ..self.clone() }))
    }
}

/// The fix where UCX sees no RDMA device.
pub const WITH_VERBS: &str = "install a UCX with verbs (Debian's libucx0, dnf's ucx-ib; the wheel libucx-cu12 has none), and look at \
                              the findings on device nodes and pinned memory: UCX hides a device that it cannot open";
const KEPT_FROM: &str = "look at UCX_TLS and UCX_NET_DEVICES: they keep UCX from what it has";
const NO_TRANSPORT: &str = "UCX has no transport for it here";

/// Returns the fact and the fix where UCX cannot be used for this reason.
#[must_use]
pub fn fact_and_fix(why: &str) -> (String, String) {
    if let Some((fact, fix)) = why.split_once("; fix: ") {
        return (fact.to_owned(), fix.to_owned());
    }
    let starts = |words: &[&str]| words.iter().any(|word| why.starts_with(word));
    let fix = if starts(&["start UCX", "read UCX's configuration"]) {
        // UCX is there, and refuses.
        "look at the UCX_ variables of the environment and at ucx.conf: /etc/ucx, the home, UCX_CONFIG_DIR and the current folder".to_owned()
    } else if starts(&["open a worker"]) {
        "give it what it lacks: shared memory, or descriptors (ulimit -n)".to_owned()
    } else {
        format!(
            "install UCX 1.13 or later (apt-get install libucx0; dnf install ucx ucx-ib), or name its folder in {LIBRARY_VARIABLE}"
        )
    };
    (why.to_owned(), fix)
}

/// Combines the findings from files with UCX's own report.
#[must_use]
pub fn diagnose(transport: Transport, probe: &Probe, ucx: &Result<UcxReport, String>) -> TransportReport {
    // The probe looks for UCX in the loader's folders; the one that was loaded may be another. Settings hold for any.
    let is_known = |fault: &&Finding| fault.topic != Topic::Ucx || !fault.because.is_empty();
    let fault = (transport == RDMA).then(|| probe.rdma_fault()).flatten().filter(is_known);
    if let Some(fault) = fault {
        let fix = fault.fix.clone().unwrap_or_else(|| "see the findings".to_owned());
        return TransportReport::unusable(transport, &fault.found, fix);
    }
    let report = match ucx {
        Ok(report) => report,
        Err(why) => {
            let stopped = probe.ucx_stopped().and_then(|setting| Some((&setting.found, setting.fix.as_ref()?)));
            return match stopped {
                Some((found, fix)) => TransportReport::unusable(transport, found, fix.as_str()),
                None => {
                    TransportReport::unusable(transport, "UCX cannot be used: see the finding ucx", fact_and_fix(why).1)
                }
            };
        }
    };
    match report.of(transport)[..] {
        // UCX_TLS or UCX_NET_DEVICES leaves out the cards.
        [] if transport == RDMA && probe.rdma_fault().is_some_and(|fault| fault.status == Status::Ok) => {
            TransportReport::unusable(transport, NO_TRANSPORT, KEPT_FROM)
        }
        [] if transport == RDMA => TransportReport::unusable(transport, NO_TRANSPORT, WITH_VERBS),
        [] => TransportReport::unusable(transport, NO_TRANSPORT, KEPT_FROM),
        ref devices => TransportReport::usable(transport, devices.join(", ")),
    }
}
