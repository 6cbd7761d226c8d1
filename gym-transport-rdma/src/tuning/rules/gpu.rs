//! RDMA to GPU memory, and what stands between card and GPU on PCI.

use super::{Chosen, list};
use crate::tuning::finding::Finding;
use crate::tuning::host::Host;
use crate::tuning::settings::Version;

/// Up to the version before this one, NCCL looks for the file of the older module only (NVIDIA/nccl#1676).
const KNOWS_PEERMEM: Version = Version(2, 23, 0);
/// The first kernel that exports GPU memory to cards.
const DMA_BUF_KERNEL: Version = Version(5, 12, 0);
/// Access control of PCI: the identifier of the capability, and the bits that send transfers up to the root.
const ACS_CAPABILITY: u16 = 0x000d;
const REDIRECTS: [(u16, &str); 3] = [(1 << 2, "ReqRedir"), (1 << 3, "CmpltRedir"), (1 << 4, "UpstreamFwd")];

pub(super) fn check(host: &Host<'_>, chosen: &Chosen<'_>, findings: &mut Vec<Finding>) {
    if !is_judged(host, chosen) {
        return;
    }
    findings.extend(direct(host, chosen));
    findings.extend(access_control(host, chosen));
    findings.extend(translation(host, chosen));
    findings.extend(nearer_than_any(host, chosen));
}

fn is_judged(host: &Host<'_>, chosen: &Chosen<'_>) -> bool {
    host.gpus > 0 && !chosen.ports.is_empty() && !host.has_foreign_network()
}

/// The ways of RDMA to GPU memory that a machine has.
pub(crate) struct Ways {
    /// `nvidia_peermem` is loaded.
    pub(crate) peermem: bool,
    /// Its predecessor is.
    pub(crate) older: bool,
    /// Driver and kernel export GPU memory through dma-buf.
    pub(crate) exports: bool,
}

impl Ways {
    pub(crate) fn of(host: &Host<'_>) -> Self {
        let kernel =
            host.text("/proc/sys/kernel/osrelease").and_then(|release| Version::read(&release.replace('-', ".")));
        let driver = host.text("/proc/driver/nvidia/version");
        let open = driver.is_some_and(|driver| driver.contains("Open Kernel Module"));
        Self {
            peermem: host.has("/sys/module/nvidia_peermem"),
            older: host.has("/sys/module/nv_peer_mem") || host.has("/sys/kernel/mm/memory_peers/nv_mem/version"),
            exports: open && kernel.is_some_and(|kernel| kernel >= DMA_BUF_KERNEL),
        }
    }
}

/// Says why there is no RDMA to GPU memory, though there are cards and GPUs.
pub(crate) fn direct(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    const ABOUT: &str = "GPUDirect";
    if !is_judged(host, chosen) {
        return None;
    }
    if host.settings.nccl("NCCL_NET_GDR_LEVEL").is_some_and(|level| level.value == "LOC" || level.value == "0") {
        return None; // It is off, which another rule says.
    }
    host.text("/proc/driver/nvidia/version")?;
    let Ways { peermem, older, exports } = Ways::of(host);
    let off =
        host.settings.nccl("NCCL_DMABUF_ENABLE").filter(|_| host.settings.number("NCCL_DMABUF_ENABLE") == Some(0));
    if let Some(finding) = unregistered(host, older, peermem || exports) {
        return Some(finding);
    }
    if older || (exports && off.is_none()) {
        return None;
    }
    if peermem {
        let version = host.nccl.filter(|version| *version < KNOWS_PEERMEM)?;
        let found = format!(
            "NCCL {version} looks for the module nv_peer_mem only, and nvidia_peermem is loaded: transfers go through host memory"
        );
        return Some(
            Finding::warning(ABOUT, found, "upgrade to NCCL 2.23 or later")
                .because("/sys/kernel/mm/memory_peers/nv_mem"),
        );
    }
    if exports && let Some(setting) = off {
        let found =
            "dma-buf is switched off, and was the only way of GPUDirect RDMA here: transfers go through host memory";
        let fix = "remove NCCL_DMABUF_ENABLE=0, or load nvidia_peermem (modprobe nvidia_peermem)";
        return Some(Finding::warning("NCCL_DMABUF_ENABLE", found, fix).because(setting.origin()));
    }
    if !host.lacks("/sys/module/nvidia_peermem") {
        return None;
    }
    let found = "no GPUDirect RDMA: nvidia_peermem is not loaded, and this driver exports no dma-buf; transfers go through host memory";
    Some(
        Finding::warning(
            ABOUT,
            found,
            "modprobe nvidia_peermem, or use the open NVIDIA driver on kernel 5.12 or later",
        )
        .because("/sys/module"),
    )
}

/// The older module is loaded, and has not registered itself.
fn unregistered(host: &Host<'_>, older: bool, others: bool) -> Option<Finding> {
    let places = ["/sys/kernel/mm/memory_peers/nv_mem/version", "/sys/kernel/memory_peers/nv_mem/version"];
    let is_loaded = older && host.has("/sys/module/nv_peer_mem") && places.iter().all(|place| host.lacks(place));
    let version = host.nccl.filter(|version| is_loaded && !others && *version < KNOWS_PEERMEM)?;
    let found = format!(
        "nv_peer_mem is loaded and not registered (no memory_peers/nv_mem), which NCCL {version} looks for: transfers go through host memory"
    );
    let fix = "reload it after ib_core (modprobe -r nv_peer_mem, modprobe nv_peer_mem), or reinstall it for this driver of the cards";
    Some(Finding::warning("GPUDirect", found, fix).because("/sys/kernel/mm/memory_peers"))
}

/// The level is nearer than any GPU is to any card.
fn nearer_than_any(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_NET_GDR_LEVEL";
    let setting = host.settings.nccl(NAME).filter(|setting| matches!(setting.value.as_str(), "PIX" | "PXB"))?;
    let (gpus, cards) = (gpus(host), cards(host, chosen));
    let ports = chosen.ports.iter().map(|port| port.card.as_str()).collect::<std::collections::BTreeSet<_>>();
    // All of them must be known, below bridges: a virtual machine shows none.
    let known = |path: &str| chain(path).len() > 1;
    let all_known = gpus.len() == host.gpus && cards.len() == ports.len() && cards.iter().all(|card| known(card));
    if gpus.is_empty() || cards.is_empty() || !all_known || !gpus.iter().all(|gpu| known(gpu)) || host.is_virtual() {
        return None;
    }
    let share = |card: &str, gpu: &str| chain(card).first() == chain(gpu).first();
    if cards.iter().any(|card| gpus.iter().any(|gpu| share(card, gpu))) {
        return None;
    }
    let found = format!(
        "`{}` allows GPUDirect RDMA below one switch only, and no card shares one with a GPU: it is never used",
        setting.value
    );
    Some(Finding::warning(NAME, found, format!("{}, or write PHB or SYS", setting.remove())).because(setting.origin()))
}

/// Returns the PCI addresses above and of a device, the root first: those of the folders in its path.
fn chain(path: &str) -> Vec<&str> {
    path.split('/')
        .filter(|part| {
            part.len() == 12 && part.as_bytes().get(4) == Some(&b':') && part.as_bytes().get(10) == Some(&b'.')
        })
        .collect()
}

fn gpus(host: &Host<'_>) -> Vec<String> {
    let addresses = host.machine.names("/proc/driver/nvidia/gpus").unwrap_or_default();
    addresses.iter().filter_map(|address| host.machine.real(&format!("/sys/bus/pci/devices/{address}")).ok()).collect()
}

fn cards<'h>(host: &'h Host<'_>, chosen: &Chosen<'_>) -> Vec<&'h str> {
    let taken = |name: &str| chosen.ports.iter().any(|port| port.card == name);
    host.cards.iter().filter(|card| taken(&card.name)).filter_map(|card| card.pci.as_deref()).collect()
}

/// A bridge above both a card and a GPU that sends transfers up to the root.
fn access_control(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    let (gpus, cards) = (gpus(host), cards(host, chosen));
    let mut redirecting: Vec<(String, String)> = Vec::new();
    for card in &cards {
        for bridge in chain(card) {
            let shared = gpus.iter().any(|gpu| chain(gpu).contains(&bridge)) && !card.ends_with(bridge);
            if !shared || redirecting.iter().any(|(known, _)| known == bridge) {
                continue;
            }
            let config = host.machine.bytes(&format!("/sys/bus/pci/devices/{bridge}/config")).unwrap_or_default();
            if let Some(control) = acs_control(&config) {
                let bits: Vec<&str> =
                    REDIRECTS.iter().filter(|(bit, _)| control & bit != 0).map(|(_, name)| *name).collect();
                if control & (REDIRECTS[0].0 | REDIRECTS[1].0) != 0 {
                    redirecting.push((bridge.to_owned(), bits.join(", ")));
                }
            }
        }
    }
    let (_, bits) = redirecting.first()?;
    let bridges: Vec<&str> = redirecting.iter().map(|(bridge, _)| bridge.as_str()).collect();
    let found = format!(
        "the switch {} between card and GPU sends transfers up to the root ({bits}): slow, or a hang",
        list(&bridges)
    );
    let fix =
        format!("disable ACS there: setpci -s {} ECAP_ACS+0x6.w=0000 (at each start), or in the BIOS", bridges[0]);
    Some(Finding::warning("ACS", found, fix).because("the PCI configuration of the bridge"))
}

/// Returns the control register of the ACS capability; `None` if it is not there, or cannot be read.
fn acs_control(config: &[u8]) -> Option<u16> {
    let word = |at: usize| Some(u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?));
    let mut at = 0x100;
    // 480 capabilities fit; a damaged list may be a circle.
    for _ in 0..480 {
        let header = word(at)?;
        if header == 0 || header == u32::MAX {
            return None;
        }
        if header as u16 == ACS_CAPABILITY {
            return Some((word(at + 4)? >> 16) as u16);
        }
        at = usize::try_from(header >> 20).ok()?;
        if at < 0x100 {
            return None;
        }
    }
    None
}

fn translation(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    if host.is_virtual() {
        return None; // Its devices need the translation of the host.
    }
    let kind = |path: &str| {
        let group = host.machine.real(&format!("{path}/iommu_group")).ok()?;
        host.text(&format!("{group}/type"))
    };
    let translates = |path: &str| kind(path).filter(|kind| kind.starts_with("DMA"));
    let card = cards(host, chosen).into_iter().find_map(translates)?;
    let gpu = gpus(host).iter().find_map(|gpu| translates(gpu))?;
    let found =
        format!("card and GPU are behind an IOMMU that translates ({card} and {gpu}): GPUDirect is slow, or fails");
    Some(
        Finding::warning(
            "IOMMU",
            found,
            "start the kernel with iommu=pt (passthrough), or switch the IOMMU off in the BIOS",
        )
        .because("/sys/kernel/iommu_groups/*/type"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_of_bridges_is_read_from_the_path() {
        assert_eq!(chain("/sys/devices/pci0000:19/0000:19:00.0/0000:1a:00.0"), ["0000:19:00.0", "0000:1a:00.0"]);
        assert!(chain("/sys/devices/virtual/infiniband/rxe0").is_empty());
    }

    #[test]
    fn a_damaged_configuration_is_no_capability() {
        assert_eq!(acs_control(&[0; 64]), None);
        assert_eq!(acs_control(&[0; 4096]), None);
        let mut circle = vec![0; 4096];
        circle[0x100..0x104].copy_from_slice(&(0x1000_0001_u32).to_le_bytes());
        assert_eq!(acs_control(&circle), None);
        circle[0x100..0x104].copy_from_slice(&(0x000d_u32).to_le_bytes());
        circle[0x106] = 0x1c;
        assert_eq!(acs_control(&circle), Some(0x1c));
    }
}
