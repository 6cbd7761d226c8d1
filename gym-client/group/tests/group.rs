//! In-process groups pass the conformance suite, with messages in memory and with serialized messages.

use std::sync::Arc;

use async_trait::async_trait;
use gym_core::testing::{Faults, SimNet};
use gym_core::transport::{ConnectOptions, Connector, InProcess, Listener};
use gym_core::{CallContext, CancelToken, Channel, Handler};
use gym_group::testing::{
    GroupFixture, GroupSetup, ServedGroups, TestBlockingWorker, TestGroup, TestWorker, TestWorkerKind, group,
    group_rogues,
};
use gym_group::{InProcessGroup, InProcessOptions, Rank, WorkerGroupExt};

/// [`InProcessGroup`]s.
struct InThisProcess {
    faithful: bool,
}

#[derive(Debug)]
struct Started(Arc<InProcessGroup>, TestWorkerKind);

#[async_trait(?Send)]
impl GroupFixture for InThisProcess {
    async fn start(&self, setup: GroupSetup) -> Box<dyn TestGroup> {
        let mut options = InProcessOptions::default();
        options.faithful = self.faithful;
        options.host.calls_max = setup.calls_max;
        let started = match setup.worker {
            TestWorkerKind::Async => {
                InProcessGroup::start_with::<TestWorker>("tested", setup.layout, (), options).await
            }
            TestWorkerKind::Blocking => {
                InProcessGroup::start_with::<TestBlockingWorker>("tested", setup.layout, (), options).await
            }
        };
        Box::new(Started(Arc::new(started.expect("the suite's workers start")), setup.worker))
    }
}

#[async_trait(?Send)]
impl TestGroup for Started {
    fn group(&self) -> Arc<dyn WorkerGroupExt> {
        Arc::clone(&self.0) as _
    }

    async fn replace(&self, rank: Rank) {
        let restarted = match self.1 {
            TestWorkerKind::Async => self.0.restart::<TestWorker>(rank, ()).await,
            TestWorkerKind::Blocking => self.0.restart::<TestBlockingWorker>(rank, ()).await,
        };
        restarted.expect("the suite's workers start");
    }
}

#[tokio::test]
async fn in_process() {
    group(&InThisProcess { faithful: false }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_process_on_two_threads() {
    group(&InThisProcess { faithful: false }).await;
}

#[tokio::test]
async fn in_process_written_out_and_read_back() {
    group(&InThisProcess { faithful: true }).await;
}

/// Serves a handler under a unique name and connects to it.
async fn served(connector: impl Connector, mut listener: impl Listener, handler: Arc<dyn Handler>) -> Channel {
    let endpoint = listener.endpoints()[0].clone();
    tokio::spawn(async move {
        let incoming = listener.accept().await.expect("the channel's own connection");
        incoming.serve(handler, CancelToken::new()).await
    });
    let connected = connector.connect(&CallContext::default(), &endpoint, &ConnectOptions::default()).await;
    connected.expect("the listener accepts")
}

async fn over_memory(handler: Arc<dyn Handler>) -> Channel {
    let in_process = InProcess::new();
    let listener = in_process.listen("rank").expect("no name is taken yet");
    served(in_process, listener, handler).await
}

async fn over_simulated_wires(handler: Arc<dyn Handler>) -> Channel {
    let net = SimNet::new(1, Faults::calm());
    let listener = net.host("rank").listen("rank").expect("the net is new");
    served(net.host("controller"), listener, handler).await
}

#[tokio::test]
async fn served_over_memory() {
    group(&ServedGroups::over(over_memory)).await;
}

#[tokio::test]
async fn ranks_that_lie_over_memory() {
    group_rogues(over_memory).await;
}

#[tokio::test]
async fn ranks_that_lie_over_simulated_wires() {
    group_rogues(over_simulated_wires).await;
}
