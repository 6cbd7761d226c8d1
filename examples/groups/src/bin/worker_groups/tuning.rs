//! Communication backends, gradient compression and profiling, and the parts that are not implemented yet.

use gym_group::placement::{ClusterSpec, ProfilerRequest, WorkerGroupConfig};

/// Shows backends and gradient compression: names are accepted, and unsupported values are rejected with the reason.
pub(crate) fn communication() -> anyhow::Result<()> {
    println!("\n# Communication");
    for backend in ["auto", "tcp", "nccl"] {
        let text = format!(r#"{{"bundle_ct_per_node_list": [8], "communication_backend": "{backend}"}}"#);
        match serde_json::from_str::<ClusterSpec>(&text)?.validate() {
            Ok(()) => println!("{backend}: there"),
            Err(error) => println!("{backend}: {error}"),
        }
    }
    let config: WorkerGroupConfig = serde_json::from_str(r#"{"enable_gradient_compression": true}"#)?;
    println!("gradient compression: {}", config.validate().expect_err("comes with NCCL"));
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
