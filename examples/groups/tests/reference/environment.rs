//! The page on environment variables.

use std::collections::{BTreeMap, BTreeSet};

use gym_group::{NODE_FIRST, NOT_INHERITED, NOT_SENT, VariableKind, VariableSource};

use crate::page::{Page, code, sources};

/// The variables that a user sets: name, reader, meaning.
const READ: [(&str, &str, &str); 53] = [
    ("ALL_PROXY", "`rgym doctor`", "As `HTTPS_PROXY`."),
    ("CONDA_PREFIX", "ranks with `communication_backend: nccl`, `rgym doctor`", "As `VIRTUAL_ENV`, for NCCL."),
    (
        "CUDA_VISIBLE_DEVICES",
        "worker groups",
        "The GPUs that a cluster may use, as CUDA reads the variable. A rank gets its own GPUs in it.",
    ),
    (
        "GYM_CUDA_LIBRARY",
        "ranks with `communication_backend: nccl`, `rgym doctor`",
        "The library of CUDA's driver: its file, or a directory with `libcuda.so.1`. No other place is searched.",
    ),
    (
        "GYM_JOIN_SECRET",
        "`rgym run --worker`, `examples/groups`",
        "The secret that nodes and their controllers share. With it, a worker whose program has worker types is a node. Ranks do not \
         inherit it.",
    ),
    (
        "GYM_NCCL_LIBRARY",
        "ranks with `communication_backend: nccl`, `rgym doctor`",
        "NCCL: the file of its library, or a directory with `libnccl.so.2`. No other place is searched.",
    ),
    (
        "GYM_QUIC_SECRET",
        "`examples/own-transport`",
        "The secret from which the example's QUIC transport derives its keys.",
    ),
    (
        "GYM_UCX_LIBRARY",
        "transports of UCX",
        "The place of UCX: a directory with libucm, libucs, libuct and libucp, or the path of libucp. No other place is searched.",
    ),
    (
        "GYM_VALUES_DIR",
        "`gym_client::values`",
        "The directory for the copies of values on this node. Otherwise `gym-values-UID` in `/dev/shm`.",
    ),
    ("HEAD_SERVER_URL", "`rgym`", "The head server, unless `--head-url` names it. `run` joins it as a worker."),
    ("HOME", "configuration", "The home directory in `~/` of `results_dir` and `cache_dir`."),
    (
        "HTTPS_PROXY",
        "`rgym doctor`",
        "Not used: this program calls model endpoints without a proxy. Named where an endpoint does not respond.",
    ),
    ("HTTP_PROXY", "`rgym doctor`", "As `HTTPS_PROXY`."),
    (
        "LD_LIBRARY_PATH",
        "`rgym doctor`",
        "Directories in which the dynamic loader looks for UCX, NCCL and CUDA's driver.",
    ),
    (
        "NEMO_GYM_ALLOW_UNSUPPORTED_PAIRING",
        "configuration",
        "Sets `allow_unsupported_pairing`, unless it is empty, `0` or `false`.",
    ),
    (
        "NEMO_GYM_EXTRA_ROOTS",
        "`rgym`, Python servers",
        "Directories, separated by colons, that are searched for servers and configuration files after those of `--search-dir`.",
    ),
    ("NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", "`rgym collect`", "Maximum attempts per rollout, unless `--attempts` is given."),
    ("NEMO_GYM_REASONING_FIELD", "`vllm_model`", "The value of `reasoning_field`, unless the block sets it."),
    ("NO_COLOR", "`rgym view`", "Turns colors off, unless it is empty."),
    ("NRL_DISABLE_NUMA_BINDING", "worker groups", "Turns the binding of ranks to CPUs off if it is `1`."),
    (
        "NRL_GPU_CPU_AFFINITY_FILE",
        "worker groups",
        "The path of a file of lines `gpu:cpus` (`0:0-71`). A rank is bound to the CPUs of its first GPU. Without the variable, no \
         rank is bound.",
    ),
    ("NRL_NSYS_EXTRA_OPTIONS", "worker groups", "A JSON object of further options of Nsight Systems."),
    (
        "NRL_NSYS_PROFILE_STEP_RANGE",
        "worker groups",
        "The steps to profile, for the name of the profile. It goes together with `NRL_NSYS_WORKER_PATTERNS`.",
    ),
    (
        "NRL_NSYS_WORKER_PATTERNS",
        "worker groups",
        "Patterns with `*` and `?`, separated by commas. Workers whose name matches run under Nsight Systems.",
    ),
    (
        "NRL_VIRTUAL_CLUSTER_MAX_RETRIES",
        "worker groups on Ray",
        "How often a placement group waits for room before a reservation fails. Otherwise 6.",
    ),
    (
        "NUM_EXPECTED_WORKERS",
        "`rgym run`",
        "Workers that must serve before the head server is ready, unless `--expected-workers` is given.",
    ),
    ("OPENAI_API_KEY", "`openai_model`, `vllm_model`", "The API key of the endpoint, unless the block sets one."),
    (
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "`rgym`",
        "The OpenTelemetry collector that gets the spans of rollouts, over HTTP: `http://HOST:4318`, or an https URL. Without the variable, none are exported.",
    ),
    ("OTEL_SDK_DISABLED", "`rgym`", "`true` exports no spans."),
    ("OTEL_SERVICE_NAME", "`rgym`", "The name of this process in exported spans. Otherwise `gym`."),
    ("OTEL_TRACES_EXPORTER", "`rgym`", "`none` exports no spans."),
    ("PATH", "all", "Directories in which `python3`, `nvidia-smi` and the programs of child processes are searched."),
    ("PYTHONPATH", "Python servers", "Kept, after the directory of the server."),
    (
        "RAY_ADDRESS",
        "`rgym`, worker groups on Ray",
        "The address of a Ray cluster, unless `ray_head_node_address` is set. Also the address that `auto` stands for.",
    ),
    ("RAY_API_SERVER_ADDRESS", "worker groups on Ray", "The address that `auto` stands for, before `RAY_ADDRESS`."),
    ("RAY_AUTH_MODE", "worker groups on Ray", "`disabled` sends no token; `token` requires one."),
    ("RAY_AUTH_TOKEN", "worker groups on Ray", "The token of the Ray cluster."),
    (
        "RAY_AUTH_TOKEN_PATH",
        "worker groups on Ray",
        "The file with the token of the Ray cluster. Otherwise `~/.ray/auth_token`.",
    ),
    ("RUST_LOG", "`rgym`", "Log levels per target, such as `warn,gym_client=debug`. It takes precedence over `-v`."),
    ("SSL_CERT_DIR", "feature `tls`", "A directory of trusted certificates, in the place of those of the system."),
    ("SSL_CERT_FILE", "feature `tls`", "A file of trusted certificates, in the place of those of the system."),
    (
        "TMPDIR",
        "all",
        "The directory for temporary files. Otherwise `/tmp`. A limited program gets its own directory in it. Programs with the same one divide the GPUs of a machine.",
    ),
    ("TOKIO_WORKER_THREADS", "`rgym`", "The number of runtime threads, unless `--threads` is given."),
    (
        "UCX_HANDLE_ERRORS",
        "transports of UCX",
        "Read by UCX when it is loaded. `rgym` and worker groups set it to `none`, unless it is set.",
    ),
    (
        "UCX_LOG_FILE",
        "transports of UCX",
        "Read by UCX when it is loaded. `rgym` and worker groups set it to `stderr`, unless it is set: by default, UCX logs into the output of a command.",
    ),
    (
        "UCX_MEM_MMAP_HOOK_MODE",
        "transports of UCX",
        "Read by UCX when it is loaded. `rgym` and worker groups set it to `none`, unless it is set.",
    ),
    ("UCX_TLS", "transports of UCX", "The transports that UCX may use. UCX also reads its other variables `UCX_…`."),
    (
        "UV_LOCK_TIMEOUT",
        "configuration",
        "The default of `uv_lock_timeout_seconds`, a key of NeMo Gym. Otherwise 1,800.",
    ),
    (
        "VIRTUAL_ENV",
        "`rgym`, ranks with `communication_backend: nccl`",
        "The virtual environment whose interpreter is the default of `--python`, and in whose packages NCCL is searched.",
    ),
    (
        "WORKER_CHECKS",
        "`rgym run --worker`",
        "The effect of a failed check at the start of a worker (`fail`, `warn`, `off`), unless `--checks` is given.",
    ),
    (
        "WORKER_HEARTBEAT_INTERVAL",
        "`rgym run`",
        "Seconds between two heartbeats of a worker, unless `--heartbeat-interval` is given.",
    ),
    (
        "WORKER_TIMEOUT",
        "`rgym run`",
        "Seconds after which a silent worker is gone, unless `--worker-timeout` is given.",
    ),
    (
        "XDG_RUNTIME_DIR",
        "`rgym collect`, `rgym stuck`",
        "The directory in which collectors and controllers are listed for `rgym stuck`. Otherwise `gym-waits-UID` in the directory for temporary files.",
    ),
];

/// A variable whose name is not in capitals, which the scan does not find.
const POLICY_API_KEY: (&str, &str, &str) = (
    "policy_api_key",
    "`openai_model`, `vllm_model`",
    "The API key of the endpoint, unless the block or `OPENAI_API_KEY` sets one.",
);

/// The variables that the SDK sets for its child processes: name, child, meaning.
const SET: [(&str, &str, &str); 23] = [
    ("AVAILABLE_ADDR_LIST", "rank", "The addresses of all ranks, as a Python list."),
    ("AVAILABLE_PORT_LIST", "rank", "A reserved port of each rank, as a Python list."),
    (
        "GYM_LAUNCH_MARK",
        "every child",
        "Identifies the launcher, so that all processes that a child started can be ended.",
    ),
    ("GYM_NODE_AGENT", "node agent on Ray", "The agent's share of its node, and its join secret, as JSON."),
    ("GYM_RAY_SHIM", "driver on Ray", "The source of the driver."),
    ("GYM_RAY_SPEC", "driver on Ray", "The bundles that the job reserves and the program that it starts, as JSON."),
    ("GYM_UCX_RESTARTED", "`rgym`", "Set when the program has executed itself again with the variables of UCX."),
    ("GYM_WORKER", "rank", "The worker type and its settings, as JSON."),
    ("LANG", "limited program", "`C.UTF-8`. A limited program has no variable of its parent."),
    ("LOCAL_RANK", "rank", "The number of the rank on its node, from 0."),
    ("LOCAL_WORLD_SIZE", "rank", "The number of ranks of the group on the node of the rank."),
    ("MASTER_ADDR", "rank", "The address for the rendezvous of torch."),
    ("MASTER_PORT", "rank", "The port for the rendezvous of torch."),
    ("NEMO_GYM_CONFIG_DICT", "Python server", "The merged configuration as YAML."),
    ("NEMO_GYM_CONFIG_PATH", "Python server", "The name of the instance to serve."),
    ("NODE_RANK", "rank", "The number of the node, from 0."),
    (
        "OMP_NUM_THREADS",
        "rank",
        "The CPUs of the bundle of the rank, at least 1, unless the program, the group or the worker type sets it.",
    ),
    ("PYTHONUNBUFFERED", "Python server", "`1`, so that lines of output arrive at once."),
    ("RANK", "rank", "The number of the rank in its group, from 0."),
    ("RAY_JOB_STOP_WAIT_TIME_S", "job on Ray", "The seconds that Ray gives the job to stop."),
    ("VLLM_PORT", "rank", "The port at which vLLM's ranks connect, for the leader of a tied group."),
    ("WORLD_SIZE", "rank", "The number of ranks of the group."),
    ("CUDA_VISIBLE_DEVICES", "rank", "The GPUs of the rank; empty without a GPU."),
];

/// Variables of tests, benchmarks and fuzzing. No program of a user reads them.
const OF_TESTS: [&str; 70] = [
    "FAKE_NCCL_ABORT_HANGS",
    "FAKE_NCCL_ANY_MAGIC",
    "FAKE_NCCL_ASYNC",
    "FAKE_NCCL_DEVICES",
    "FAKE_NCCL_FAIL",
    "FAKE_NCCL_GPU_RANKS",
    "FAKE_NCCL_LEAKS",
    "FAKE_NCCL_OWN_DEVICES",
    "FAKE_NCCL_RANK",
    "FAKE_NCCL_VERSION",
    "FAKE_NCCL_WRONG",
    "GYM_ABSENT",
    "GYM_AFFINITY_SEEDS",
    "GYM_AFFINITY_TRACE",
    "GYM_BAD_INPUT_CASE",
    "GYM_BAD_INPUT_TABLE",
    "GYM_COLLECTIVE_KILLS",
    "GYM_COLLECTIVE_SEED",
    "GYM_COLLECTIVE_SEEDS",
    "GYM_DATA_PYTHON",
    "GYM_FAULT_SEED",
    "GYM_FUZZ_TARGET",
    "GYM_GPU_CHECK",
    "GYM_GPU_FAKE",
    "GYM_GPU_RANK",
    "GYM_KILLS",
    "GYM_KILL_SEED",
    "GYM_NCCL_WHEELS",
    "GYM_NODE_KILLS",
    "GYM_PEER_PYTHON",
    "GYM_RAY_FAULTS",
    "GYM_RAY_TEST_ADDRESS",
    "GYM_RAY_TEST_CONTROL",
    "GYM_RAY_TEST_DRIVER",
    "GYM_RAY_TEST_FAULT_TOLERANT",
    "GYM_RAY_TEST_PYTHON",
    "GYM_REFERENCE",
    "GYM_SAFETENSORS_PYTHON",
    "GYM_SEGMENT_TEST_RANK",
    "GYM_TEST_CASE",
    "GYM_TEST_CUT",
    "GYM_TEST_LEDGER_OUTPUT",
    "GYM_TEST_MARK",
    "GYM_TEST_NODES",
    "GYM_TEST_PROGRAM",
    "GYM_TEST_TWO",
    "GYM_TLS_TEST_ENDPOINT",
    "GYM_UCX_ADDRESS",
    "GYM_UCX_DEVICES",
    "GYM_UCX_HEADERS_REQUIRED",
    "GYM_UCX_KILLS",
    "GYM_UCX_LINK_DOWN",
    "GYM_UCX_LINK_UP",
    "GYM_UCX_LISTEN_DEVICES",
    "GYM_UCX_REQUIRED",
    "GYM_UCX_SEED",
    "GYM_UCX_STOPS",
    "GYM_UCX_STORM",
    "GYM_UCX_TEST_PEER",
    "GYM_UCX_TEST_ROLE",
    "GYM_UCX_TRANSPORTS",
    "GYM_WITHOUT_WORKERS",
    "GYM_WORKERS_ON",
    "GYM_WORKER_KILLS",
    "NEMO_RECORDED",
    "RAY_DASHBOARD_TEST_ADDRESS",
    "RAY_DASHBOARD_TEST_SENDS",
    "RAY_USAGE_STATS_ENABLED",
    "SIMULATED_HOST",
    "WANDB_MODE",
];

/// Texts in capitals that are no variables of this program: parts of names, settings of UCX, variables of other launchers and of the
/// children of tests, variables of the build, and names of other kinds.
const NO_VARIABLES: [&str; 45] = [
    "A",
    "BIG",
    "CARGO_MANIFEST_DIR",
    "CARGO_PKG_VERSION",
    "DATABASE_URL",
    "EXTRA_OPTIONS",
    "F8_E4M3",
    "GLOO_SOCKET_IFNAME",
    "GYM_NODE_",
    "GYM_RAY_",
    "GYM_SOURCES",
    "HF_HOME",
    "HF_TOKEN",
    "HIP_VISIBLE_DEVICES",
    "MM_FIFO_SIZE",
    "MM_RX_BUFS_GROW",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NET_DEVICES",
    "ONLY",
    "PROFILE_STEP_RANGE",
    "PROTO_INDIRECT_ID",
    "RCACHE_ENABLE",
    "RDMA_CM_",
    "RNDV_SCHEME",
    "RX_SEG_SIZE",
    "SCREAMING_SNAKE_CASE",
    "SLURM_PROCID",
    "STEP_RANGE",
    "STRICT_PACK",
    "STRICT_SPREAD",
    "TCP_TX_SEG_SIZE",
    "TX_SEG_SIZE",
    "UCX_FOO",
    "UCX_MAX_EAGER_LANES",
    "UCX_NET_DEVICES",
    "UCX_UNKNOWN_TO_IT",
    "WATCHDOG",
    "WORKER_PATTERNS",
    "ZCOPY_THRESH",
];

#[test]
fn the_page_on_environment_variables_is_the_generated_one() {
    let mut page = Page::new(
        "environment.md",
        "Environment variables",
        "The variables that the SDK reads, and those that it sets for its child processes. A configuration reads any other variable \
         with `${oc.env:NAME}` or `${oc.env:NAME,default}`.",
    );
    let row = |(name, who, meaning): (&str, &str, &str)| [code(name), who.to_owned(), meaning.to_owned()];
    page.section("Read", "");
    page.table(["variable", "reader", "meaning"], READ.into_iter().chain([POLICY_API_KEY]).map(row));
    page.section("Set for child processes", "");
    page.table(["variable", "child", "meaning"], SET.map(row));
    page.section(
        "The environment of a rank",
        "A rank has the variables of these layers. Later layers take precedence over earlier ones. `Group::environment` tells the \
         environment of a rank with the layer of each variable; as a text, secrets are `****`.",
    );
    page.table(["layer", "from"], VariableSource::ALL.map(|layer| [code(layer.as_str()), layer.content().to_owned()]));
    page.section(
        "Not inherited by ranks",
        "Variables that launchers and other programs set for one process (`NOT_INHERITED`). A group, a worker type and its function can set such a \
         variable. Ranks get no variable that is not valid UTF-8; a warning names those.",
    );
    page.table(["kind", "variables", "reason"], NOT_INHERITED.map(|kind| kind_row(&kind)));
    page.section(
        "Not sent to other machines",
        "A controller sends its variables to the agents of its nodes, also on Ray, unencrypted, with the tokens in them, and at most 1 MiB. It does not \
         send the kinds above, and the following ones (`NOT_SENT`): a rank has those of its own machine.",
    );
    page.table(["kind", "variables", "reason"], NOT_SENT.map(|kind| kind_row(&kind)));
    page.section(
        "The node first",
        "For these, a variable of the agent takes precedence over that of the controller (`NODE_FIRST`).",
    );
    page.table(["kind", "variables", "reason"], [kind_row(&NODE_FIRST)]);
    page.section("Tests", "These variables are read by tests and benchmarks only.");
    let found = literals();
    let tests = OF_TESTS.map(|name| {
        let places: BTreeSet<String> = found.get(name).into_iter().flatten().map(|file| code(suite(file))).collect();
        [code(name), places.into_iter().collect::<Vec<_>>().join(", ")]
    });
    page.table(["variable", "named in"], tests);
    page.finish();
}

/// Returns the test suite of a file, such as `gym-client/group/tests/workers`: the modules of a suite change more often than what it reads. Other files stay as
/// they are.
fn suite(file: &str) -> &str {
    let Some(start) = file.find("/tests/").map(|at| at + "/tests/".len()) else { return file };
    let end = file[start..].find(['/', '.']).map_or(file.len(), |length| start + length);
    &file[..end]
}

fn kind_row(kind: &VariableKind) -> [String; 3] {
    [kind.of.to_owned(), kind.names.iter().map(|name| code(name)).collect::<Vec<_>>().join(" "), kind.why.to_owned()]
}

/// Returns every text of the sources that can be the name of a variable, with its files: capitals with an underscore, and the names
/// that are given to `var`, `var_os` and `env`.
fn literals() -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (file, text) in sources() {
        // These tables name every variable, and that of the kinds is on the page as it is.
        let tables = file.contains("tests/reference/") && !file.ends_with("page.rs");
        // These judge and record the settings of other libraries, on machines that are not this one.
        let judged = [
            "src/tuning/",
            "machine/variables.rs",
            "machine/redaction/",
            "tests/machines/",
            "tests/probe.rs",
            "tests/tuning.rs",
            "tests/profile.rs",
            "cli/inspect/recording/",
            "cli/setup/checks/",
            "registry/tuning.rs",
            "tests/cli/workers.rs",
        ];
        let of_others = judged.iter().any(|part| file.contains(part));
        if tables || of_others || file.ends_with("provision/variables/kinds.rs") {
            continue;
        }
        for (at, _) in text.match_indices('"') {
            let Some(end) = text[at + 1..].find('"') else { continue };
            let name = &text[at + 1..][..end];
            let capitals = name.starts_with(|c: char| c.is_ascii_uppercase())
                && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
            let before = text[..at].trim_end();
            let read = ["var(", "var_os(", ".env(", ".env_remove(", "env ="].iter().any(|call| before.ends_with(call));
            if capitals && (read || name.trim_matches('_').contains('_')) {
                found.entry(name.to_owned()).or_default().insert(file.clone());
            }
        }
    }
    found
}

#[test]
fn every_variable_in_the_sources_is_in_a_table_and_the_other_way_round() {
    let found: BTreeSet<String> = literals().into_keys().collect();
    let rows = READ.iter().chain(&SET).map(|(name, ..)| *name).chain(OF_TESTS);
    let known: BTreeSet<String> = rows.chain(NO_VARIABLES).map(str::to_owned).collect();
    let missing: Vec<&String> = found.difference(&known).collect();
    assert!(missing.is_empty(), "in the sources, but in no table of {}: {missing:?}", file!());
    let unused: Vec<&String> = known.difference(&found).filter(|name| *name != "RANK").collect();
    assert!(unused.is_empty(), "in a table of {}, but not in the sources: {unused:?}", file!());
    // Names that the scan does not find.
    let named = |name: &str| sources().into_iter().any(|(_, text)| text.contains(&format!("(\"{name}\", place.")));
    assert!(named("RANK"));
    assert!(
        sources().iter().any(|(file, text)| file.contains("model/secret.rs") && text.contains("\"policy_api_key\""))
    );
}

#[test]
fn the_tables_are_sorted() {
    let sorted = |names: &[&str]| assert!(names.is_sorted(), "{names:?}");
    sorted(&READ.map(|(name, ..)| name));
    sorted(&SET[..20].iter().map(|(name, ..)| *name).collect::<Vec<_>>());
    sorted(&OF_TESTS);
    sorted(&NO_VARIABLES);
}
