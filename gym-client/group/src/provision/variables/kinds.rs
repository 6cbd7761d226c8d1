//! Which variables of a process its ranks do not inherit, by kind, and the reason of each kind.
//!
//! A variable is listed here if it says where *another* process is in its launcher or on its machine. A setting, such as `NCCL_DEBUG` or
//! `I_MPI_FABRICS`, is for the ranks too, and stays.

use std::collections::BTreeSet;

use crate::provision::variables::Variables;

/// Variables that ranks do not inherit, for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VariableKind {
    /// Who sets them, or what they describe.
    pub of: &'static str,
    /// Their names. A pattern may begin or end with `*`. A pattern with `NAME` stands for the variables of a service.
    pub names: &'static [&'static str],
    /// The reason.
    pub why: &'static str,
}

const fn kind(of: &'static str, names: &'static [&'static str], why: &'static str) -> VariableKind {
    VariableKind { of, names, why }
}

/// The kinds of variables that no rank inherits: the place of another process in its launcher, the devices that it may use, and secrets of this SDK.
///
/// A group, a worker type and [`WorkerKind::with_configure`](crate::WorkerKind::with_configure) can still set them.
pub const NOT_INHERITED: [VariableKind; 19] = [
    kind(
        "torchrun",
        &[
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "NODE_RANK",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "ROLE_NAME",
            "ROLE_RANK",
            "ROLE_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_*",
            "PET_*",
        ],
        "With `TORCHELASTIC_USE_AGENT_STORE`, torch waits for a store that nobody serves.",
    ),
    kind(
        "Open MPI, PRRTE",
        &["OMPI_*", "ORTE_*", "PRTE_*", "PMIX_*"],
        "An engine with MPI takes itself for a rank of the other job.",
    ),
    kind(
        "MPICH, Hydra, Intel MPI, HPE MPT",
        &["PMI_*", "PMI2_*", "MPI_*", "MPIR_*", "HYDI_*", "HYDRA_*", "I_MPI_HYDRA_*", "I_MPI_MPIRUN*", "I_MPI_PMI_*"],
        "As those of Open MPI. The settings of Intel MPI stay.",
    ),
    kind(
        "MVAPICH",
        &["MV2_COMM_WORLD_*", "MVP_COMM_WORLD_*", "MPISPAWN_*", "MPIRUN_*"],
        "As those of Open MPI. The settings `MV2_*` stay.",
    ),
    kind("Slurm", &["SLURM_*", "SLURMD_*", "SRUN_*"], "Code that finds them takes its rank and its node from them."),
    kind("Flux", &["FLUX_*"], "As those of Slurm."),
    kind("PALS, ALPS", &["PALS_*", "ALPS_*"], "As those of Slurm, on machines of Cray."),
    kind("PBS, Cobalt", &["PBS_*", "COBALT_*"], "As those of Slurm."),
    kind("LSF, jsrun", &["LSB_*", "LSF_PM_*", "JSM_*"], "As those of Slurm."),
    kind("Grid Engine, HTCondor", &["SGE_*", "PE_HOSTFILE", "NSLOTS", "NHOSTS", "_CONDOR_*"], "As those of Slurm."),
    kind(
        "Horovod",
        &[
            "HOROVOD_RANK",
            "HOROVOD_SIZE",
            "HOROVOD_LOCAL_*",
            "HOROVOD_CROSS_*",
            "HOROVOD_HOSTNAME",
            "HOROVOD_GLOO_RENDEZVOUS_*",
        ],
        "Horovod in a rank joins the other rendezvous. Its settings stay.",
    ),
    kind(
        "DeepSpeed, Azure, Accelerate, Lightning",
        &[
            "CROSS_RANK",
            "CROSS_SIZE",
            "LOCAL_SIZE",
            "AZ_BATCH_MASTER_NODE",
            "AZ_BATCHAI_MPI_MASTER_NODE",
            "FORK_LAUNCHED",
            "ACCELERATE_TORCH_DEVICE",
            "PL_IN_DDP_SUBPROCESS",
            "PL_TRAINER_GPUS",
        ],
        "The place and the device of the other process. The settings `ACCELERATE_*` stay.",
    ),
    kind(
        "JAX, TPU, TensorFlow, XGBoost, Paddle",
        &[
            "JAX_COORDINATOR_*",
            "JAX_NUM_PROCESSES",
            "JAX_PROCESS_ID",
            "JAX_LOCAL_DEVICE_IDS",
            "MEGASCALE_*",
            "CLOUD_TPU_TASK_ID",
            "TPU_PROCESS_*",
            "TPU_WORKER_*",
            "TF_CONFIG",
            "DMLC_*",
            "PADDLE_TRAINER*",
            "PADDLE_CURRENT_ENDPOINT",
        ],
        "The coordinator and the number of the other process.",
    ),
    kind("Ray", &["RAY_*"], "The job, the node and the token of another program."),
    kind(
        "vLLM",
        &["VLLM_PORT", "VLLM_DP_RANK*", "VLLM_DP_SIZE", "VLLM_DP_MASTER_*"],
        "Engines with one port would collide. Each leader of tied ranks has its own `VLLM_PORT`.",
    ),
    SERVICES,
    kind(
        "visible devices",
        &[
            "*_VISIBLE_DEVICES",
            "*_VISIBLE_CORES",
            "*_VISIBLE_CHIPS",
            "*_VISIBLE_MODULES",
            "GPU_DEVICE_ORDINAL",
            "ZE_AFFINITY_MASK",
            "ONEAPI_DEVICE_SELECTOR",
            "SYCL_DEVICE_FILTER",
            "NEURON_RT_NUM_CORES",
            "TPU_CHIPS_PER_*",
            "RBLN_DEVICES",
        ],
        "A rank has its GPUs in `CUDA_VISIBLE_DEVICES`, which HIP reads too. A second list would count among these.",
    ),
    kind(
        "this SDK",
        &["GYM_WORKER", "GYM_NODE_*", "GYM_RAY_*", "GYM_LAUNCH_MARK"],
        "The task of another process of this SDK. Each child gets its own.",
    ),
    kind("secrets of this SDK", &["GYM_JOIN_SECRET"], "Whoever has it can start processes on the nodes."),
];

/// The variables that Kubernetes and Docker links set for a service. They are found by their values.
const SERVICES: VariableKind = kind(
    "Kubernetes services",
    &["NAME_PORT", "NAME_PORT_80_TCP*", "NAME_SERVICE_HOST", "NAME_SERVICE_PORT*"],
    "Where `NAME_PORT` is a URL such as `tcp://10.0.0.1:80`: a service named vllm sets a `VLLM_PORT` that vLLM cannot read. Those of the \
     service kubernetes stay.",
);

/// The kinds of variables that a controller does not send to the ranks of other machines, in addition to [`NOT_INHERITED`]. Such a rank has those of
/// its own machine.
pub const NOT_SENT: [VariableKind; 7] = [
    kind(
        "programs and libraries",
        &[
            "PATH",
            "LD_*",
            "LIBRARY_PATH",
            "CPATH",
            "C_INCLUDE_PATH",
            "CPLUS_INCLUDE_PATH",
            "PKG_CONFIG_PATH",
            "MANPATH",
            "INFOPATH",
            "CUDA_HOME",
            "CUDA_PATH",
            "CUDA_ROOT",
            "CUDA_MPS_*",
            "CUDNN_HOME",
            "CUDNN_PATH",
            "ROCM_HOME",
            "ROCM_PATH",
            "HIP_PATH",
            "MODULEPATH*",
            "LOADEDMODULES",
            "_LMFILES_",
            "LMOD_*",
            "JAVA_HOME",
            "GYM_UCX_*",
            "GYM_NCCL_LIBRARY",
            "GYM_CUDA_LIBRARY",
        ],
        "Paths that another machine need not have.",
    ),
    kind(
        "Python and Rust",
        &[
            "PYTHONPATH",
            "PYTHONHOME",
            "PYTHONSTARTUP",
            "PYTHONUSERBASE",
            "PYTHONPYCACHEPREFIX",
            "VIRTUAL_ENV*",
            "UV_PROJECT_ENVIRONMENT",
            "UV_PYTHON*",
            "CONDA_*",
            "_CONDA_*",
            "_CE_*",
            "MAMBA_*",
            "PYENV_*",
            "CARGO",
            "CARGO_*",
            "RUSTUP_*",
        ],
        "Environments of this machine.",
    ),
    kind(
        "directories and certificates",
        &[
            "HOME",
            "PWD",
            "OLDPWD",
            "TMPDIR",
            "TMP",
            "TEMP",
            "XDG_*",
            "GYM_VALUES_DIR",
            "SSL_CERT_*",
            "REQUESTS_CA_BUNDLE",
            "CURL_CA_BUNDLE",
        ],
        "Paths that another machine need not have.",
    ),
    kind(
        "host, user and session",
        &[
            "HOSTNAME",
            "HOST",
            "HOSTTYPE",
            "MACHTYPE",
            "OSTYPE",
            "USER",
            "USERNAME",
            "LOGNAME",
            "SHELL",
            "SHLVL",
            "_",
            "MAIL",
            "BASH*",
            "ZDOTDIR",
            "SSH_*",
            "GPG_*",
            "DBUS_*",
            "SUDO_*",
            "KRB5CCNAME",
            "INVOCATION_ID",
            "JOURNAL_STREAM",
            "NOTIFY_SOCKET",
            "LISTEN_FDS",
            "LISTEN_FDNAMES",
            "LISTEN_PID",
        ],
        "The login of this program.",
    ),
    kind(
        "terminal and language",
        &[
            "TERM",
            "TERM_*",
            "TERMINFO*",
            "COLORTERM",
            "COLUMNS",
            "LINES",
            "PS1",
            "PS2",
            "PROMPT_COMMAND",
            "LS_COLORS",
            "TMUX*",
            "STY",
            "WINDOWID",
            "DISPLAY",
            "WAYLAND_*",
            "XAUTHORITY",
            "SESSION_MANAGER",
            "EDITOR",
            "VISUAL",
            "PAGER",
            "LESS*",
            "LANG",
            "LANGUAGE",
            "LC_*",
        ],
        "Another machine has no such terminal, and need not have the language.",
    ),
    kind(
        "network",
        &[
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "FTP_PROXY",
            "ALL_PROXY",
            "NO_PROXY",
            "http_proxy",
            "https_proxy",
            "ftp_proxy",
            "all_proxy",
            "no_proxy",
            "VLLM_HOST_IP",
            "HOST_IP",
        ],
        "The addresses and the proxy of this machine: a proxy at 127.0.0.1 is not there on another.",
    ),
    kind(
        "container",
        &["KUBERNETES_*", "POD_*", "NODE_NAME", "container", "NVIDIA_REQUIRE_*", "NVIDIA_DRIVER_CAPABILITIES"],
        "The container of this program.",
    ),
];

/// The variables of which a rank on another machine takes those of its own machine, if it has them, and otherwise those of the controller: devices and
/// files that may have other names there.
pub const NODE_FIRST: VariableKind = kind(
    "devices of a machine",
    &[
        "*_SOCKET_IFNAME",
        "*_IFACE",
        "*_HCA",
        "*_HCA_LIST",
        "*_NET_DEVICES",
        "*_GID_INDEX",
        "*_TOPO_FILE",
        "NRL_GPU_CPU_AFFINITY_FILE",
    ],
    "Network devices have other names on other machines.",
);

impl VariableKind {
    /// Returns `true` if the variable is of this kind by its name alone.
    pub(super) fn has(&self, name: &str) -> bool {
        self.names.iter().any(|pattern| matches(pattern, name))
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(end), _) => name.ends_with(end),
        (_, Some(begin)) => name.starts_with(begin),
        _ => name == pattern,
    }
}

/// Returns the variables that a rank on this machine inherits.
pub(super) fn inherited(variables: Variables) -> Variables {
    let services = services(&variables);
    let of_service = |name: &str, value: &str| {
        is_service_url(name, value) || services.iter().any(|service| is_of_service(service, name))
    };
    let taken = |name: &str| NOT_INHERITED.iter().any(|kind| *kind != SERVICES && kind.has(name));
    variables.into_iter().filter(|(name, value)| !taken(name) && !of_service(name, value)).collect()
}

/// Returns the variables that a rank on another machine gets from this process.
pub(super) fn sendable(variables: Variables) -> Variables {
    let stays = |name: &str| NOT_SENT.iter().any(|kind| kind.has(name));
    inherited(variables).into_iter().filter(|(name, _)| !stays(name)).collect()
}

/// The service of the API of Kubernetes, whose clients read its variables.
const KUBERNETES: &str = "KUBERNETES";

/// Returns `true` for the URL of a service.
fn is_service_url(name: &str, value: &str) -> bool {
    let is_url = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    is_url && name.strip_suffix("_PORT").is_some_and(|service| service != KUBERNETES)
}

/// Returns the services whose URLs are in the environment.
fn services(variables: &Variables) -> BTreeSet<String> {
    let urls = variables.iter().filter(|(name, value)| is_service_url(name, value));
    urls.filter_map(|(name, _)| name.strip_suffix("_PORT").map(str::to_owned)).collect()
}

/// Returns `true` for the other variables of a service: `<service>_SERVICE_HOST`, `<service>_PORT_80_TCP_ADDR`, …
fn is_of_service(service: &str, name: &str) -> bool {
    let Some(rest) = name.strip_prefix(service).and_then(|rest| rest.strip_prefix('_')) else { return false };
    let of_port = rest.strip_prefix("PORT_").is_some_and(|port| port.starts_with(|first: char| first.is_ascii_digit()));
    of_port || rest == "SERVICE_HOST" || rest == "SERVICE_PORT" || rest.starts_with("SERVICE_PORT_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    /// For each kind a name, the value that makes it one, and a setting of the same family that a user sets on purpose.
    const CASES: [(&str, &[&str], &[&str]); 19] = [
        (
            "torchrun",
            &[
                "TORCHELASTIC_USE_AGENT_STORE",
                "TORCHELASTIC_RUN_ID",
                "GROUP_RANK",
                "ROLE_NAME",
                "LOCAL_WORLD_SIZE",
                "PET_NNODES",
            ],
            &["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_LOGS", "GROUP"],
        ),
        ("Open MPI, PRRTE", &["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PRTE_LAUNCHED"], &["UCX_TLS"]),
        (
            "MPICH, Hydra, Intel MPI, HPE MPT",
            &["PMI_RANK", "PMI_FD", "MPI_LOCALRANKID", "MPIR_CVAR_X", "HYDI_CONTROL_FD", "I_MPI_HYDRA_HOST_FILE"],
            &["I_MPI_FABRICS", "I_MPI_DEBUG"],
        ),
        ("MVAPICH", &["MV2_COMM_WORLD_LOCAL_RANK", "MPISPAWN_ID"], &["MV2_USE_CUDA"]),
        ("Slurm", &["SLURM_PROCID", "SLURMD_NODENAME"], &["SLURMX"]),
        ("Flux", &["FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"], &["INFLUX_URL"]),
        ("PALS, ALPS", &["PALS_RANKID", "ALPS_APP_PE"], &["MPICH_GPU_SUPPORT_ENABLED"]),
        ("PBS, Cobalt", &["PBS_TASKNUM", "COBALT_NODEFILE"], &[]),
        ("LSF, jsrun", &["LSB_HOSTS", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"], &["LSF_ENVDIR"]),
        ("Grid Engine, HTCondor", &["SGE_TASK_ID", "NSLOTS", "_CONDOR_SLOT"], &[]),
        (
            "Horovod",
            &["HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"],
            &["HOROVOD_FUSION_THRESHOLD"],
        ),
        (
            "DeepSpeed, Azure, Accelerate, Lightning",
            &["CROSS_RANK", "LOCAL_SIZE", "FORK_LAUNCHED"],
            &["ACCELERATE_MIXED_PRECISION", "DS_ACCELERATOR"],
        ),
        (
            "JAX, TPU, TensorFlow, XGBoost, Paddle",
            &["JAX_PROCESS_ID", "TPU_WORKER_ID", "TF_CONFIG", "DMLC_RANK"],
            &["JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"],
        ),
        (
            "Ray",
            &["RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"],
            &["RAYON_NUM_THREADS"],
        ),
        ("vLLM", &["VLLM_PORT", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL"], &["VLLM_USE_V1", "VLLM_HOST_IP"]),
        ("Kubernetes services", &[], &["DATABASE_PORT", "DATABASE_SERVICE_HOST", "KUBERNETES_SERVICE_HOST"]),
        (
            "visible devices",
            &[
                "CUDA_VISIBLE_DEVICES",
                "HIP_VISIBLE_DEVICES",
                "ROCR_VISIBLE_DEVICES",
                "GPU_DEVICE_ORDINAL",
                "ZE_AFFINITY_MASK",
                "ONEAPI_DEVICE_SELECTOR",
                "ASCEND_RT_VISIBLE_DEVICES",
                "HABANA_VISIBLE_MODULES",
                "NEURON_RT_VISIBLE_CORES",
                "TPU_VISIBLE_CHIPS",
                "MUSA_VISIBLE_DEVICES",
                "RBLN_DEVICES",
            ],
            &["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "NCCL_DEBUG", "HF_HOME", "OMP_PLACES"],
        ),
        ("this SDK", &["GYM_WORKER", "GYM_NODE_AGENT", "GYM_RAY_SPEC"], &["GYM_VALUES_DIR"]),
        ("secrets of this SDK", &["GYM_JOIN_SECRET"], &[]),
    ];

    #[test]
    fn variables_of_each_kind_are_left_out_and_settings_stay() {
        assert_eq!(CASES.map(|(of, ..)| of), NOT_INHERITED.map(|kind| kind.of), "a case for each kind");
        for (of, place, settings) in CASES {
            let all: Vec<(&str, &str)> = place.iter().chain(settings).map(|name| (*name, "3")).collect();
            let stayed = inherited(variables(&all));
            assert_eq!(stayed, variables(&settings.iter().map(|name| (*name, "3")).collect::<Vec<_>>()), "{of}");
            let kind = NOT_INHERITED.iter().find(|kind| kind.of == of).expect("compared above");
            assert!(place.iter().all(|name| kind.has(name)), "{of}");
        }
    }

    #[test]
    fn the_variables_of_a_service_are_found_by_its_url() {
        let service = [
            ("VLLM_PORT", "tcp://10.0.0.1:80"),
            ("VLLM_PORT_80_TCP", "tcp://10.0.0.1:80"),
            ("VLLM_PORT_80_TCP_ADDR", "10.0.0.1"),
            ("VLLM_SERVICE_HOST", "10.0.0.1"),
            ("VLLM_SERVICE_PORT", "80"),
            ("VLLM_SERVICE_PORT_HTTP", "80"),
            ("REDIS_CACHE_PORT", "udp://10.0.0.2:53"),
        ];
        let others = [
            ("VLLM_LOGGING_LEVEL", "DEBUG"),
            ("VLLM_PORT_RANGE", "80"),
            ("REDIS_PORT", "6379"),
            ("REDIS_SERVICE_HOST", "own"),
            ("KUBERNETES_PORT", "tcp://10.0.0.9:443"),
            ("KUBERNETES_SERVICE_HOST", "10.0.0.9"),
            ("DATABASE_URL", "tcp://10.0.0.3:9000"),
        ];
        assert_eq!(inherited(variables(&[&service[..], &others].concat())), variables(&others));
    }

    #[test]
    fn what_belongs_to_a_machine_is_not_sent_to_another() {
        let stays = [
            "PATH",
            "HOME",
            "TMPDIR",
            "PWD",
            "HOSTNAME",
            "USER",
            "LOGNAME",
            "SHELL",
            "LD_LIBRARY_PATH",
            "PYTHONPATH",
            "VIRTUAL_ENV",
            "XDG_RUNTIME_DIR",
            "SSH_AUTH_SOCK",
            "DBUS_SESSION_BUS_ADDRESS",
            "DISPLAY",
            "TERM",
            "LC_ALL",
            "KUBERNETES_SERVICE_HOST",
            "CUDA_HOME",
            "https_proxy",
            "GYM_JOIN_SECRET",
            "RAY_AUTH_TOKEN",
            "SLURM_PROCID",
        ];
        let sent = [
            "HF_HOME",
            "HF_TOKEN",
            "NCCL_DEBUG",
            "NCCL_SOCKET_IFNAME",
            "OMP_NUM_THREADS",
            "PYTHONUNBUFFERED",
            "WANDB_MODE",
        ];
        let all: Vec<(&str, &str)> = stays.iter().chain(&sent).map(|name| (*name, "x")).collect();
        let names = sendable(variables(&all)).into_keys().collect::<Vec<_>>();
        assert_eq!(names, sent);
    }

    #[test]
    fn a_pattern_is_a_name_or_one_of_its_ends() {
        for kind in NOT_INHERITED.iter().chain(&NOT_SENT).chain([&NODE_FIRST]).filter(|kind| **kind != SERVICES) {
            for name in kind.names {
                let inner = name.strip_prefix('*').or_else(|| name.strip_suffix('*')).unwrap_or(name);
                assert!(!inner.is_empty() && !inner.contains('*'), "{name}");
            }
            assert!(!kind.of.is_empty() && kind.why.ends_with('.'), "{kind:?}");
        }
    }
}
