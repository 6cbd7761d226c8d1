//! The Ray cluster of the cases: its nodes, their processes, and what the program that runs it does to them.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use gym_group::Group;
use gym_group::ray::RayAddress;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

/// Generous, and more than [`super::LONG`]: Ray notices slowly what it lost. Each of its cases runs alone, without the limit of the test runner.
pub(super) const LONG: Duration = Duration::from_secs(120);
/// What the program does for [`control`] includes starts of nodes.
const CONTROL: Duration = Duration::from_secs(300);
/// How long processes may remain that must end.
const REMAIN: Duration = Duration::from_secs(30);

/// The command line of an agent contains it.
pub(super) const AGENT: &str = "--gym-node-agent";

/// Returns the address of the cluster, or says that there is none.
pub(super) fn cluster_address() -> Option<RayAddress> {
    match std::env::var("GYM_RAY_TEST_ADDRESS") {
        Ok(address) => Some(RayAddress::parse(&address, "GYM_RAY_TEST_ADDRESS").expect("an address")),
        Err(_) => {
            println!("NOT RUN: no Ray cluster (`.ci/test ray` starts one)");
            None
        }
    }
}

/// Returns the address of the cluster after it was made whole: a case that failed may have left it without a node.
pub(super) fn whole_cluster() -> Option<RayAddress> {
    let address = cluster_address()?;
    control(&json!({"do": "repair"}));
    Some(address)
}

/// Returns the interpreter of the cluster.
pub(super) fn python() -> PathBuf {
    std::env::var_os("GYM_RAY_TEST_PYTHON").expect("a cluster").into()
}

/// Asks the program that runs the cluster to do something with it.
pub(super) fn control(request: &Value) -> Value {
    let path = std::env::var("GYM_RAY_TEST_CONTROL").expect("a cluster");
    let mut stream = UnixStream::connect(path).expect("the program that runs the cluster");
    stream.set_read_timeout(Some(CONTROL)).expect("a timeout");
    writeln!(stream, "{request}").expect("sends");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("a reply");
    let reply: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(reply["ok"], true, "{request}: {reply}");
    reply
}

/// Returns the processes of a node with this argument.
pub(super) fn processes(node: &str, argument: &str) -> Vec<i32> {
    listed(node, argument, "pid")
}

/// Returns the parents of the processes of a node with this argument.
pub(super) fn parents(node: &str, argument: &str) -> Vec<i32> {
    listed(node, argument, "parent")
}

fn listed(node: &str, argument: &str, key: &str) -> Vec<i32> {
    let reply = control(&json!({"do": "list_processes", "node": node, "containing": argument}));
    let all = reply["processes"].as_array().expect("a list").clone();
    let named = |process: &&Value| {
        process["command"].as_str().expect("a text").split(' ').any(|given| given.starts_with(argument))
    };
    let number = |process: &Value| i32::try_from(process[key].as_i64().expect("a number")).expect("fits");
    all.iter().filter(named).map(number).collect()
}

/// Kills a process of a node, which this program may not see.
pub(super) fn kill(pid: i32) {
    control(&json!({"do": "kill_process", "pid": pid}));
}

/// Returns the name of each node by its address.
pub(super) fn addresses() -> BTreeMap<String, String> {
    let reply = control(&json!({"do": "nodes"}));
    let nodes = reply["nodes"].as_array().expect("a list").clone();
    let text = |node: &Value, key: &str| node[key].as_str().expect("a text").to_owned();
    nodes.iter().map(|node| (text(node, "ip"), text(node, "name"))).collect()
}

/// Returns the name, as the cluster's program has it, of the node of each rank.
pub(super) fn nodes_of(group: &Group) -> Vec<String> {
    let addresses = addresses();
    let node = |name: &str| addresses[name.split_once('@').expect("share@address").1].clone();
    group.worker_status().iter().map(|rank| node(rank.node_name.as_deref().expect("it is on a node"))).collect()
}

/// Looks until `condition` holds.
pub(super) async fn until(what: &str, condition: impl FnMut() -> bool) {
    super::until_within(LONG, what, condition).await;
}

/// Waits until no process of ours is on a node, and prints how long that took.
pub(super) async fn no_process_of_ours(what: &str) {
    let begin = Instant::now();
    loop {
        let left: Vec<_> = ["n1", "n2"].iter().flat_map(|node| processes(node, "--gym-")).collect();
        if left.is_empty() {
            println!("    {what}: no process of ours after {:.2} s", begin.elapsed().as_secs_f64());
            return;
        }
        assert!(begin.elapsed() < REMAIN, "{what}: {left:?} are left");
        sleep(Duration::from_millis(50)).await;
    }
}
