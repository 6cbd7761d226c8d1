//! Which variables of a driver vLLM copies to its Ray workers, by version. Read in `vllm/ray/ray_env.py` and `vllm/envs.py` of the published versions.

/// The variables that vLLM copies from its driver to its Ray workers, beginning with a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopiedVariables {
    /// The first version.
    pub since: &'static str,
    /// Whether all variables are copied.
    pub all: bool,
    /// Whether those that `vllm.envs` registers are copied: the `VLLM_` ones that it knows, and not `NCCL_`.
    pub registered: bool,
    /// Beginnings of names that are copied.
    pub prefixes: &'static [&'static str],
    /// Variables that list further names, or further beginnings.
    pub named_by: &'static [&'static str],
}

/// The variables that vLLM copies, by version, the oldest first. `VLLM_HOST_IP` belongs to a node and is copied by none of them.
///
/// `VLLM_RAY_WORKER_ENV_VARS` is in no row: no published vLLM reads it.
pub const VLLM_COPIES: &[CopiedVariables] = &[
    CopiedVariables { since: "0.8", all: false, registered: true, prefixes: &[], named_by: &[] },
    CopiedVariables {
        since: "0.16",
        all: false,
        registered: true,
        prefixes: &["VLLM_", "LMCACHE_", "NCCL_", "UCX_", "HF_", "HUGGING_FACE_"],
        named_by: &["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"],
    },
    // Only its RayExecutorV2; the executor of before copies as the row above says.
    CopiedVariables { since: "0.20.2", all: true, registered: true, prefixes: &[], named_by: &[] },
];
