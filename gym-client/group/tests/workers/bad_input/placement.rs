//! Groups that do not fit their cluster.

use gym_client::Transports;
use gym_core::CallContext;
use gym_core::transport::InProcess;
use gym_group::RankLayout;
use gym_group::placement::{ClusterSpec, WorkersOn};
use gym_group::{GroupRequest, InProcessRanks, VirtualCluster};

use super::super::types::{Init, workers};
use super::super::{LONG, options, stop};
use super::{Case, Got};

const PLACE: &str = "group that does not fit its cluster";
const SHARED: &str = "bundles in use";
const WRONG: &str = "refused: invalid_argument";

fn place(
    name: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
    change: impl Fn(&mut GroupRequest) + 'static,
) -> Case {
    let change = std::rc::Rc::new(change);
    Case::new(PLACE, name, outcome, says, move |fixture| {
        let change = std::rc::Rc::clone(&change);
        Box::pin(async move { Got::refused(fixture.on_a_cluster(|request| change(request)).await) })
    })
}

fn on(on: WorkersOn) -> impl Fn(&mut GroupRequest) {
    move |request| request.on = on.clone()
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        place(
            "more ranks than bundles",
            WRONG,
            &["placement group 0 has 2 bundles, but 3 workers"],
            on(WorkersOn::PerNode(3)),
        ),
        place(
            "ranks for more nodes",
            WRONG,
            &["workers_per_node has 2 entries for 1"],
            on(WorkersOn::PerNodeList(vec![1, 1])),
        ),
        place(
            "a bundle in two tied groups",
            WRONG,
            &["bundle 1 of node 0 is named twice"],
            on(WorkersOn::Tied(vec![(0, vec![0, 1]), (0, vec![1])])),
        ),
        place(
            "a tied group without bundles",
            WRONG,
            &["tied group 1 has no bundles"],
            on(WorkersOn::Tied(vec![(0, vec![0]), (0, vec![])])),
        ),
        place(
            "a missing bundle",
            WRONG,
            &["there is no bundle 7 on node 0"],
            on(WorkersOn::Tied(vec![(0, vec![0, 7])])),
        ),
        place("axes for more ranks", WRONG, &["the layout has 4 ranks, the group 2"], |request| {
            request.options.layout = Some(RankLayout::new([("dp", 2), ("tp", 2)]).expect("a layout"));
        }),
        place("an unregistered worker type", "refused: not_found", &["group policy", "`obedeint`"], |request| {
            request.worker = "obedeint".to_owned();
        }),
        Case::new(
            PLACE,
            "a memory limit within one process",
            "refused: unimplemented",
            &["group policy", "a memory limit needs processes"],
            |_| {
                Box::pin(async move {
                    let mut spec = ClusterSpec::new([1]);
                    spec.use_gpus = false;
                    let ranks = InProcessRanks::new(workers(), InProcess::new());
                    let cluster = VirtualCluster::new(spec, ranks).expect("valid").simulate_nodes(&[1]);
                    let mut request =
                        GroupRequest::new("policy", "obedient", &Init::default(), options()).expect("a request");
                    request.config = serde_json::from_str(r#"{"memory_limit": "1GB"}"#).expect("a configuration");
                    Got::refused(cluster.start(&CallContext::within(LONG), request).await)
                })
            },
        ),
        Case::new(
            SHARED,
            "a second group where colocation is off",
            "refused: resource_exhausted",
            &["group generation", "used by policy", "enable_colocation"],
            |_| Box::pin(second(|spec| spec.enable_colocation = Some(false))),
        ),
        Case::new(
            SHARED,
            "too many groups that share bundles",
            "refused: resource_exhausted",
            &["group generation", "used by policy", "max_colocated_worker_groups"],
            |_| Box::pin(second(|spec| spec.max_colocated_worker_groups = std::num::NonZeroU32::new(1))),
        ),
    ]
}

/// What a second group gets on the bundles of a first.
async fn second(change: impl FnOnce(&mut ClusterSpec)) -> Got {
    let mut spec = ClusterSpec::new([2]);
    spec.use_gpus = false;
    change(&mut spec);
    let switchboard = InProcess::new();
    let cluster = VirtualCluster::new(spec, InProcessRanks::new(workers(), switchboard.clone())).expect("valid");
    let cluster = cluster.simulate_nodes(&[2]);
    let request = |name| {
        let mut options = options();
        options.transports = Transports::from_features(switchboard.clone());
        GroupRequest::new(name, "obedient", &Init::default(), options).expect("a request")
    };
    let cx = CallContext::within(LONG);
    let first = cluster.start(&cx, request("policy")).await.expect("starts");
    let got = Got::refused(cluster.start(&cx, request("generation")).await);
    stop(&first).await;
    cluster.start(&cx, request("generation")).await.expect("the bundles are free again");
    got
}
