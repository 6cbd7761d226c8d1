//! GPUs, NCCL, and RDMA to the memory of GPUs.

use crate::machine::{Library, Loaded};
use crate::probe::files::Files;
use crate::probe::finding::{Finding, Status, Topic, finding};
use crate::probe::or_unknown;
use crate::tuning::host::Host;
use crate::tuning::rules::chosen;
use crate::tuning::rules::gpu::{Ways, direct};

pub(crate) fn gpu(files: &Files<'_>, host: &Host<'_>, loaded: &Loaded) -> Finding {
    let topic = Topic::Gpu;
    let driver = files.text("/proc/driver/nvidia/version").map(|text| driver_version(&text));
    // Their absence is noted.
    let _ = files.names("/dev");
    let gpus = host.gpus;
    let cuda = files.library("libcuda.so.1");
    let (Some(driver), true) = (&driver, gpus > 0) else {
        let what = match (driver, gpus) {
            (None, 0) => "no NVIDIA GPU (neither /proc/driver/nvidia/version nor /dev/nvidia0)".to_owned(),
            (None, _) => "/dev/nvidia0 without a driver (no /proc/driver/nvidia/version)".to_owned(),
            (Some(driver), _) => format!("NVIDIA driver {driver} without a GPU (no /dev/nvidia0)"),
        };
        return finding(topic, Status::Missing, what)
            .fix("install the NVIDIA driver; in a container use the NVIDIA container toolkit (docker: --gpus all)");
    };
    let what = format!("{gpus} NVIDIA GPU{}, driver {driver}", if gpus == 1 { "" } else { "s" });
    let Some(cuda) = cuda else {
        return finding(topic, Status::Missing, format!("{what}, but no libcuda.so.1 in the loader's directories"))
            .fix(
                "install the driver's user part (apt: libcuda1), or give the container the capability compute \
             (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
            );
    };
    let management = match files.library("libnvidia-ml.so.1") {
        Some(_) => "",
        None => ", no libnvidia-ml.so.1 for monitoring",
    };
    match &loaded.cuda {
        None => finding(topic, Status::Ok, format!("{what}{management}")),
        Some(Ok(version)) => finding(topic, Status::Ok, format!("{what}, up to CUDA {version}{management}")),
        Some(Err(error)) => finding(topic, Status::Missing, format!("{what}, but {}: {error}", cuda.path))
            .fix("reinstall the driver so that its kernel and user parts have one version"),
    }
}

pub(crate) fn nccl(files: &Files<'_>, host: &Host<'_>, loaded: &Loaded) -> Finding {
    let topic = Topic::Nccl;
    let wheel = wheel(host, loaded);
    let fix = format!(
        "apt-get install libnccl2 (NVIDIA's repository) or pip install {wheel}, and add its directory to LD_LIBRARY_PATH or set GYM_NCCL_LIBRARY to it"
    );
    let Some(Library { path, version }) = files.library("libnccl.so.2") else {
        let what = "NCCL not found (no libnccl.so.2 in the loader's directories)".to_owned();
        return finding(topic, Status::Missing, what).fix(&fix);
    };
    match loaded.nccl.clone().unwrap_or_else(|| Ok(or_unknown(version))) {
        Ok(version) => finding(topic, Status::Ok, format!("NCCL {version} ({path})")),
        Err(error) => finding(topic, Status::Missing, format!("NCCL cannot be loaded from {path}: {error}")).fix(&fix),
    }
}

/// Returns the wheel with NCCL for the CUDA of this environment. That for another CUDA puts its library in the same place.
fn wheel(host: &Host<'_>, loaded: &Loaded) -> String {
    let has = |soname: &str| host.machine.library(soname).ok().flatten().is_some();
    let of_driver = match &loaded.cuda {
        Some(Ok(version)) => version.split('.').next().and_then(|major| major.parse::<u32>().ok()),
        _ => None,
    };
    let cuda = match (has("libcudart.so.13"), has("libcudart.so.12"), of_driver) {
        (true, false, _) => Some(13),
        (false, true, _) | (false, false, Some(12)) => Some(12),
        _ => None,
    };
    match cuda {
        Some(cuda) => format!("nvidia-nccl-cu{cuda}"),
        None => "nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever fits the CUDA of this environment's PyTorch \
                 (torch.version.cuda), because the other one overwrites its library"
            .to_owned(),
    }
}

pub(crate) fn gpu_direct(files: &Files<'_>, host: &Host<'_>, needed: bool) -> Finding {
    let topic = Topic::GpuDirect;
    if !needed {
        let what = "GPUDirect RDMA needs an RDMA device and an NVIDIA GPU".to_owned();
        return finding(topic, Status::NotNeeded, what);
    }
    if let Some(rule) = direct(host, &chosen(host)) {
        return Finding::of_rule(topic, rule);
    }
    // Their absence is noted.
    for module in ["nvidia_peermem", "nv_peer_mem"] {
        let _ = files.exists(&format!("/sys/module/{module}"));
    }
    let ways = Ways::of(host);
    if ways.peermem || ways.older {
        let module = if ways.peermem { "nvidia_peermem" } else { "nv_peer_mem" };
        return finding(topic, Status::Ok, format!("GPUDirect RDMA by {module}"));
    }
    if ways.exports {
        let release = files.text("/proc/sys/kernel/osrelease").unwrap_or_default();
        return finding(topic, Status::Ok, format!("GPUDirect RDMA by dma-buf (kernel {release}, open driver)"));
    }
    finding(topic, Status::Warning, "no GPUDirect RDMA: transfers go through host memory".to_owned())
        .fix("modprobe nvidia_peermem, or use the open NVIDIA driver on kernel 5.12 or later")
}

/// Parses a driver version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …` → `550.54.15`.
fn driver_version(text: &str) -> String {
    let numbers = |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.split_whitespace().find(numbers).unwrap_or("of unknown version").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_the_kernel_says() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build";
        assert_eq!(driver_version(open), "570.86.15");
        assert_eq!(driver_version("rubbish"), "of unknown version");
    }
}
