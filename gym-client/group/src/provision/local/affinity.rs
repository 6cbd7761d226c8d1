//! Binds workers to the CPUs near their GPU, because a GPU copies fastest from memory of its own socket.
//!
//! As in NeMo RL, an administrator writes a file of lines `gpu:cpus` (`0:0-71`) and sets `NRL_GPU_CPU_AFFINITY_FILE` to its path.
//! `NRL_DISABLE_NUMA_BINDING=1` turns the binding off. Without the file, no worker is bound.

use std::collections::BTreeSet;

use gym_core::{Error, Result};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::placement::parse_cpu_list;

const FILE: &str = "NRL_GPU_CPU_AFFINITY_FILE";
const OFF: &str = "NRL_DISABLE_NUMA_BINDING";

/// Binds this thread, and the threads that it starts, to the CPUs near the GPU of this process. A worker that cannot be bound is
/// slower but works, so a failure is only logged.
pub(crate) fn bind_to_gpu() {
    let bound = cpus_of(|name| std::env::var(name).ok()).and_then(|cpus| match cpus {
        Some(cpus) => bind(&cpus),
        None => Ok(()),
    });
    if let Err(error) = bound {
        eprintln!("gym worker: not bound to CPUs: {error}");
    }
}

fn bind(cpus: &BTreeSet<u16>) -> Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus.iter().map(|cpu| usize::from(*cpu)).filter(|cpu| *cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    sched_setaffinity(None, &set).map_err(|error| Error::internal(format!("CPUs {cpus:?}")).caused_by(error))
}

/// Returns the CPUs that the file lists for the first GPU of this process; `None` if no binding is requested.
fn cpus_of(variable: impl Fn(&str) -> Option<String>) -> Result<Option<BTreeSet<u16>>> {
    let off = variable(OFF).is_some_and(|value| value == "1");
    let gpu = variable("CUDA_VISIBLE_DEVICES").and_then(|all| all.split(',').next().map(|gpu| gpu.trim().to_owned()));
    let (Some(path), Some(gpu), false) = (variable(FILE), gpu.filter(|gpu| !gpu.is_empty()), off) else {
        return Ok(None);
    };
    let text =
        std::fs::read_to_string(&path).map_err(|error| Error::invalid(format!("{FILE}={path}")).caused_by(error))?;
    let line = text.lines().filter_map(|line| line.split_once(':')).find(|(name, _)| name.trim() == gpu);
    let (_, cpus) =
        line.ok_or_else(|| Error::invalid(format!("{path} has no line for GPU {gpu}; add `{gpu}:<cpus>`")))?;
    parse_cpu_list(cpus).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpus_are_those_of_the_first_gpu_unless_it_is_turned_off() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("affinity");
        std::fs::write(&path, "0: 0-3\n1: 4-5, 9\n").expect("writes");
        let path = path.display().to_string();
        let with = |gpus: &str, off: &str| {
            let (path, gpus, off) = (path.clone(), gpus.to_owned(), off.to_owned());
            cpus_of(move |name| match name {
                FILE => Some(path.clone()),
                OFF => Some(off.clone()),
                _ => Some(gpus.clone()),
            })
        };
        assert_eq!(with("1,0", "0").expect("reads"), Some(BTreeSet::from([4, 5, 9])));
        assert_eq!(with("", "0").expect("no GPU"), None);
        assert_eq!(with("1", "1").expect("off"), None);
        let error = with("7", "0").expect_err("no line").to_string();
        assert!(error.contains("has no line for GPU 7"), "{error}");
        assert_eq!(cpus_of(|_| None).expect("nothing asked"), None);
    }
}
