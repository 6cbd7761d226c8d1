//! Communication backends, gradient compression and profiling.

use gym_group::placement::{ClusterSpec, ProfilerRequest, WorkerGroupConfig};

/// Shows the settings of communication: the names of backends, and those of a worker group.
pub(crate) fn communication() -> anyhow::Result<()> {
    println!("\n# Communication");
    for backend in ["auto", "tcp", "nccl"] {
        let text = format!(r#"{{"bundle_ct_per_node_list": [8], "communication_backend": "{backend}"}}"#);
        let cluster: ClusterSpec = serde_json::from_str(&text)?;
        cluster.validate()?;
        println!("ranks meet over: {}", cluster.communication_backend);
    }
    let config: WorkerGroupConfig = serde_json::from_str(r#"{"enable_gradient_compression": true}"#)?;
    println!("gradients travel as bf16: {}", config.enable_gradient_compression);
    Ok(())
}

/// Shows the command of workers under Nsight Systems: these variables select worker types by pattern.
pub(crate) fn profiler() -> anyhow::Result<()> {
    println!("\n# Profiler");
    let asked = ProfilerRequest::from_variables(|name| match name {
        "NRL_NSYS_WORKER_PATTERNS" => Some("*score*".to_owned()),
        "NRL_NSYS_PROFILE_STEP_RANGE" => Some("3:5".to_owned()),
        _ => None,
    })?;
    let command = |worker| asked.as_ref().and_then(|asked| asked.command_for(worker));
    println!("a scorer would run as: {} …", command("scorer").unwrap_or_default().join(" "));
    println!("a policy would run as it is: {}", command("policy").is_none());
    Ok(())
}
