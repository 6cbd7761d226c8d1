//! Ranks: who they are, what they find in their environment, where they meet.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gym_client::Transports;
use gym_core::transport::InProcess;
use gym_core::{CallContext, Code};
use gym_group::InProcessRanks;
use gym_group::{Dispatch, WorkerGroup, WorkerGroupExt};
use gym_group::{Group, GroupOptions, VariableSource};
use tokio::process::Command;

use super::types::{COUNTED, Deafen, Describe, Description, Init, Job, Work, allowed_cpus, workers};
use super::{LONG, group, options, provisioners, spec, start, stop, until};

async fn describe(group: &Group) -> Vec<Description> {
    group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values()
}

pub(crate) async fn c137_two_ranks_are_two_processes() {
    let group = group(2, options()).await;
    let ranks = describe(&group).await;
    let pids: BTreeSet<u32> = ranks.iter().map(|rank| rank.pid).collect();
    assert_eq!(pids.len(), 2);
    assert!(!pids.contains(&std::process::id()));
    let own = std::env::current_exe().expect("own path");
    let named = |program: &str| Path::new(program).file_name() == own.file_name();
    assert!(ranks.iter().all(|rank| named(&rank.program)), "`ps` shows the program: {}", ranks[0].program);
    stop(&group).await;
}

pub(crate) async fn c138_ranks_find_their_place_and_meet_at_a_held_port() {
    let group = group(2, options()).await;
    let ranks = describe(&group).await;
    for (number, Description { variables, .. }) in ranks.iter().enumerate() {
        let own = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"].map(|name| variables[name].clone());
        assert_eq!(own, [number.to_string(), number.to_string(), "2".to_owned(), "0".to_owned()]);
        // The two nodes of another run have a rank each.
        let local = if std::env::var_os("GYM_WORKERS_ON").is_some() { &["1", "2"][..] } else { &["2"] };
        assert!(local.contains(&variables["LOCAL_WORLD_SIZE"].as_str()), "{variables:?}");
        assert_eq!(variables["CUDA_VISIBLE_DEVICES"], "");
        told_as_it_is(&group, number, variables).await;
        for shared in ["MASTER_ADDR", "MASTER_PORT", "AVAILABLE_ADDR_LIST", "AVAILABLE_PORT_LIST"] {
            assert_eq!(variables[shared], ranks[0].variables[shared]);
        }
    }
    let port: u16 = ranks[0].variables["MASTER_PORT"].parse().expect("a port");
    assert!((1400..1999).contains(&port));
    assert!(gym_group::HeldPort::bind(port).is_err(), "it is held as long as the group lives");
    stop(&group).await;
    drop(group);
    until("it is given back", || gym_group::HeldPort::bind(port).is_ok()).await;
}

/// The environment that the group tells is the one that the rank has.
pub(super) async fn told_as_it_is(group: &Group, rank: usize, variables: &BTreeMap<String, String>) {
    let rank = u32::try_from(rank).expect("fits");
    let told = group.environment(&CallContext::within(LONG), rank).await.expect("it was launched");
    for (name, variable) in told.iter() {
        assert_eq!(variables.get(name), Some(&variable.value), "{name}");
    }
    let source = |name: &str| told.get(name).map(|variable| variable.source);
    assert_eq!([source("RANK"), source("PATH")], [Some(VariableSource::Rank), Some(VariableSource::Process)]);
    let none = group.environment(&CallContext::within(LONG), 99).await.expect_err("there is no such rank");
    assert_eq!(none.code(), Code::NotFound);
}

pub(crate) async fn c141_c142_later_layers_of_the_environment_win() {
    let mut spec = spec("layered", 1);
    spec.variables.insert("SHARED".to_owned(), "group".to_owned());
    spec.variables.insert("ONLY_group".to_owned(), "group".to_owned());
    spec.variables.insert("PATH".to_owned(), "/group".to_owned());
    let group = start(spec, options()).await.expect("starts");
    let Description { variables, .. } = describe(&group).await.swap_remove(0);
    assert_eq!(variables["SHARED"], "configured");
    assert_eq!(variables["PATH"], "/group", "over the controller's own");
    for unique in ["defaults", "group", "configured"] {
        assert_eq!(variables[&format!("ONLY_{unique}")], unique);
    }
    stop(&group).await;
}

pub(crate) async fn c140_the_configure_hook_adds_to_what_a_worker_is_made_from() {
    let group = start(spec("layered", 2), options()).await.expect("starts");
    let inits: Vec<Init> = describe(&group).await.into_iter().map(|rank| rank.init).collect();
    assert_eq!(inits, ["w0", "w1"].map(|name| Init { name: name.to_owned(), number: 7 }));
    stop(&group).await;
}

pub(crate) async fn c159_a_group_that_was_shut_down_shuts_down_again() {
    let group = group(1, options()).await;
    stop(&group).await;
    stop(&group).await;
    let error = group.call(Describe, ()).await.expect_err("stopped");
    assert!(error.to_string().contains("stopped"), "{error}");
}

pub(crate) async fn the_same_group_runs_in_one_process() {
    for (name, provisioner, transports) in provisioners() {
        let mut options = GroupOptions::new(transports).restarting(1);
        options.backoff_min = Duration::from_millis(5);
        let cx = CallContext::within(LONG);
        let group = Group::start(&cx, &*provisioner, spec("obedient", 3), options).await.expect(name);
        let before = describe(&group).await;
        assert_eq!(before.iter().map(|rank| rank.variables["RANK"].as_str()).collect::<Vec<_>>(), ["0", "1", "2"]);
        let running = group.call(Work, Job { ms: 60_000, tells: false }).deadline(LONG).start().await.expect("started");
        group.kill(1).await.expect("killed");
        let error = running.await.expect_err("a rank is gone");
        assert_eq!(error.first().map(|first| first.rank), Some(1), "{name}: {error:?}");
        group.restart_failed_workers(&cx).await.expect(name);
        let dispatch = Dispatch::rank(1);
        let after = group.call(Describe, ()).dispatch(dispatch).deadline(LONG).await.expect("answers").into_values();
        assert_eq!(after[0].incarnation, 2, "{name}");
        stop(&group).await;
    }
}

/// What torch's TCPStore does: SO_REUSEADDR, bind on all addresses, listen. Torch itself is gigabytes; this is its `bind`.
const STAND_IN: &str = "
import os, socket, sys
family, address = (socket.AF_INET6, '::') if sys.argv[1] == '6' else (socket.AF_INET, '0.0.0.0')
server = socket.socket(family, socket.SOCK_STREAM)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if family == socket.AF_INET6:
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
server.bind((address, int(os.environ['MASTER_PORT'])))
server.listen(128)
client = socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])), 10)
peer, _ = server.accept()
client.sendall(b'met')
print(peer.recv(3).decode())
";

pub(crate) async fn a_stand_in_for_torch_listens_on_the_master_port() {
    let group = group(1, options()).await;
    let variables = describe(&group).await.swap_remove(0).variables;
    // Twice on each: a rank that restarts listens again on the same port.
    for family in ["4", "6", "4"] {
        if family == "6" && !std::path::Path::new("/proc/net/if_inet6").exists() {
            continue;
        }
        let mut python = Command::new("python3");
        python.args(["-c", STAND_IN, family]).env("MASTER_PORT", &variables["MASTER_PORT"]);
        let output = python.env("MASTER_ADDR", &variables["MASTER_ADDR"]).output().await.expect("python3 runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said.trim(), "met", "IPv{family}: {}", String::from_utf8_lossy(&output.stderr));
    }
    stop(&group).await;
}

/// What Nsight Systems does, as far as a worker sees it: it is told how, and runs the program.
const PROFILER: &str = "#!/bin/sh
echo \"$*\" >> \"$0.asked\"
while [ \"${1#/}\" = \"$1\" ]; do shift; done
exec \"$@\"
";

pub(crate) async fn c161_a_profiled_worker_type_runs_under_the_profiler() {
    let folder = tempfile::tempdir().expect("a folder");
    let profiler = folder.path().join("nsys");
    std::fs::write(&profiler, PROFILER).expect("writes");
    std::fs::set_permissions(&profiler, std::fs::Permissions::from_mode(0o700)).expect("may");
    let variables = |patterns: &str| {
        let own = [
            ("PATH", folder.path().display().to_string()),
            ("NRL_NSYS_WORKER_PATTERNS", patterns.to_owned()),
            ("NRL_NSYS_PROFILE_STEP_RANGE", "3:5".to_owned()),
            ("NRL_NSYS_EXTRA_OPTIONS", r#"{"t": "cuda", "gpu-metrics-device": "all"}"#.to_owned()),
        ];
        own.map(|(name, value)| (name.to_owned(), value))
    };
    for patterns in ["*critic*", "*obed*,*critic*"] {
        let mut spec = spec("obedient", 2);
        spec.variables.extend(variables(patterns));
        let group = start(spec, options()).await.expect("starts");
        describe(&group).await;
        stop(&group).await;
    }
    let asked = std::fs::read_to_string(folder.path().join("nsys.asked")).expect("it was asked");
    let asked: Vec<&str> = asked.lines().collect();
    assert_eq!(asked.len(), 2, "the two ranks of the type that fits: {asked:?}");
    let how = "profile -t cuda -o obedient_3:5_%p --stop-on-exit=true --gpu-metrics-device=all /";
    assert!(asked.iter().all(|line| line.starts_with(how) && line.ends_with(" --gym-worker")), "{asked:?}");
}

pub(crate) async fn c194_a_rank_runs_on_the_cpus_near_its_gpu() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("affinity");
    let cpus = gym_group::placement::parse_cpu_list(&allowed_cpus()).expect("a list");
    let first = cpus.first().expect("a CPU");
    std::fs::write(&file, format!("0:99\n5:{first}\n")).expect("writes");
    let mut spec = spec("obedient", 2);
    spec.variables.insert("NRL_GPU_CPU_AFFINITY_FILE".to_owned(), file.display().to_string());
    spec.ranks[1].gpus = vec!["5".to_owned()];
    let group = start(spec, options()).await.expect("starts");
    let ranks = describe(&group).await;
    assert_eq!(ranks[0].cpus, allowed_cpus(), "without a GPU it is not bound");
    assert_eq!(ranks[1].cpus, first.to_string());
    stop(&group).await;
}

pub(crate) async fn ranks_of_this_process_end_with_a_group_that_is_dropped() {
    let switchboard = InProcess::new();
    let provisioner = InProcessRanks::new(workers(), switchboard.clone());
    let options = GroupOptions::new(Transports::from_features(switchboard));
    let group = Group::start(&CallContext::within(LONG), &provisioner, spec("counted", 2), options).await;
    let group = group.expect("starts");
    let call = group.call(Deafen, ()).deadline(LONG).start().await.expect("started");
    // Whoever keeps a channel to them keeps no rank.
    let view = group.view().borrow().clone();
    assert_eq!(COUNTED.load(Ordering::Relaxed), 2);
    drop(group);
    let error = call.await.expect_err("they are gone");
    assert_eq!(error.cause().code(), Code::Unavailable, "{error}");
    until("both have ended", || COUNTED.load(Ordering::Relaxed) == 0).await;
    drop(view);
}
