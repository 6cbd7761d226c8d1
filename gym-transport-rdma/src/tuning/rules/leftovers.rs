//! Settings that are left from debugging, or from an image.

use crate::tuning::finding::Finding;
use crate::tuning::host::Host;
use crate::tuning::settings::{Setting, Source};

pub(super) fn check(host: &Host<'_>, findings: &mut Vec<Finding>) {
    let settings = &host.settings;
    let is_on = |name: &str| settings.number(name).is_some_and(|number| number != 0);
    let mut add = |setting: &Setting, found: String, fix: String| {
        findings.push(Finding::warning(setting.name.clone(), found, fix).because(setting.origin()));
    };
    let removed = |setting: &Setting| setting.remove();
    for (name, what) in [("NCCL_ALGO", "algorithms"), ("NCCL_PROTO", "protocols")] {
        if let Some(setting) = settings.nccl(name).filter(|setting| lacks_the_universal(&setting.value)) {
            let found = format!(
                "`{}` forces {what} for all operations and sizes; some operations have none of them, and fail or are slow",
                setting.value
            );
            add(setting, found, format!("{}: NCCL chooses", removed(setting)));
        }
    }
    for (name, what) in [
        ("NCCL_SHM_DISABLE", "GPUs of one node do not use shared memory, and go over the network, which is slow"),
        ("NCCL_P2P_DISABLE", "GPUs do not reach each other's memory (P2P, NVLink), and go through host memory"),
    ] {
        if let Some(setting) = settings.nccl(name).filter(|setting| is_on(name) && setting.value.trim() == "1") {
            add(setting, what.to_owned(), removed(setting));
        }
    }
    if let Some(setting) =
        settings.nccl("NCCL_P2P_LEVEL").filter(|setting| matches!(setting.value.as_str(), "LOC" | "0"))
    {
        let found = format!("`{}` forbids peer access (P2P) between GPUs, also over NVLink", setting.value);
        add(setting, found, removed(setting));
    }
    if let Some(setting) =
        settings.nccl("NCCL_NET_GDR_LEVEL").filter(|setting| matches!(setting.value.as_str(), "LOC" | "0"))
    {
        let found = format!("`{}` means never: GPUDirect RDMA is off (disabled)", setting.value);
        add(setting, found, format!("{}, or write PHB or SYS", removed(setting)));
    }
    for name in ["NCCL_IB_USE_INLINE", "NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS"] {
        if let Some(setting) = settings.nccl(name).filter(|_| is_on(name)) {
            let found = format!("an experimental switch is on, by {}: it has frozen jobs", setting.source);
            add(setting, found, format!("{}, or write {name}=0", removed(setting)));
        }
    }
    if let Some(setting) = settings.nccl("NCCL_GRAPH_FILE") {
        let found = format!(
            "rings and trees are taken from {} (by {}), which is right for one kind of machine only",
            setting.value, setting.source
        );
        add(setting, found, removed(setting));
    }
    for name in ["NCCL_TOPO_FILE", "NCCL_TUNER_PLUGIN"] {
        let absent = |setting: &&Setting| setting.value.starts_with('/') && host.lacks(&setting.value);
        if let Some(setting) = settings.nccl(name).filter(absent) {
            let found = format!("there is no file {}, and NCCL goes on without it", setting.value);
            add(setting, found, format!("{}; such a path is that of one vendor's image", removed(setting)));
        }
    }
    channels(host, &mut add);
    if let Some(setting) = settings.nccl("NCCL_NET_DISABLE_INTRA").filter(|_| host.gpus > 1) {
        let off = ["NCCL_NET_DISABLE_INTRA", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"];
        if off.iter().all(|name| is_on(name)) {
            let found = format!("{} leave GPUs of one node no way to each other", off.join(", "));
            add(setting, found, removed(setting));
        }
    }
    if let Some(setting) = settings.nccl("NCCL_GDRCOPY_ENABLE").filter(|_| is_on("NCCL_GDRCOPY_ENABLE")) {
        let is_known = host.has("/sys/module/nvidia") && host.lacks("/sys/module/gdrdrv") && host.lacks("/dev/gdrdrv");
        if is_known && host.gpus > 0 {
            let found = "GDRCopy is asked for, and its module gdrdrv is not loaded: NCCL goes on without it";
            add(setting, found.to_owned(), format!("modprobe gdrdrv, or {}", removed(setting)));
        }
    }
    if let Some(setting) = settings.nccl("NCCL_DEBUG").filter(|setting| setting.value.eq_ignore_ascii_case("TRACE")) {
        add(setting, "TRACE logs every operation of every rank".to_owned(), "write NCCL_DEBUG=WARN".to_owned());
    }
    if let Some(setting) = settings.nccl("NCCL_DEBUG_FILE") {
        debug_file(host, setting, &mut add);
    }
    if let Some(setting) = settings.nccl("NCCL_IB_DISABLE").filter(|_| is_on("NCCL_IB_DISABLE")) {
        disabled(host, setting, &mut add);
    }
    if let Some(list) = settings.variable("VLLM_RAY_EXTRA_ENV_VARS") {
        let found = format!("vLLM does not read VLLM_RAY_EXTRA_ENV_VARS: `{list}` reaches no Ray worker by this");
        let fix = "write VLLM_RAY_EXTRA_ENV_VARS_TO_COPY";
        findings.push(Finding::warning("VLLM_RAY_EXTRA_ENV_VARS", found, fix).because("vllm/ray/ray_env.py"));
    }
    if let Some(list) = settings.variable("VLLM_RAY_WORKER_ENV_VARS") {
        let found = format!("no published vLLM reads it: `{list}` reaches no Ray worker by this");
        let fix = "set the variables where ray start runs on each node, or in runtime_env; newer vLLM copies those that VLLM_RAY_EXTRA_ENV_VARS_TO_COPY names (and all with the prefix NCCL_)";
        findings.push(Finding::warning("VLLM_RAY_WORKER_ENV_VARS", found, fix).because("vllm/ray/ray_env.py"));
    }
}

/// Returns `true` for a list that has neither the algorithm nor the protocol that every operation has. Lists by operation, and exclusions, leave them.
fn lacks_the_universal(list: &str) -> bool {
    let universal = |word: &str| ["ring", "simple"].iter().any(|name| word.trim().eq_ignore_ascii_case(name));
    !list.starts_with('^') && !list.contains([':', '"', '\'']) && !list.split(',').any(universal)
}

/// Limits of channels that nobody wants, or that contradict each other.
fn channels(host: &Host<'_>, add: &mut impl FnMut(&Setting, String, String)) {
    const MOST: &str = "NCCL_MAX_NCHANNELS";
    const FEWEST: &str = "NCCL_MIN_NCHANNELS";
    let plain = |name: &str| {
        let setting = host.settings.nccl(name)?;
        Some((setting, setting.value.trim().parse::<i64>().ok()?))
    };
    let (most, fewest) = (plain(MOST), plain(FEWEST));
    if let Some((setting, 1)) = most {
        add(setting, "1 leaves one channel, which is slow".to_owned(), setting.remove());
    }
    if let (Some((_, most)), Some((setting, fewest))) = (most, fewest)
        && most > 0
        && fewest > most
    {
        let found = format!("at least {fewest} channels and at most {most}: only one of both holds");
        add(setting, found, format!("unset {FEWEST} or {MOST}, or write {fewest} for both"));
    }
    let sockets = ["NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"].map(plain);
    if let [Some((_, threads)), Some((setting, each))] = sockets
        && (1..=16).contains(&threads)
        && (1..=16).contains(&each)
        && threads * each > SOCKETS_MAX
    {
        let found = format!(
            "{threads} threads with {each} sockets each are more than {SOCKETS_MAX}, to which NCCL limits them"
        );
        add(
            setting,
            found,
            format!("write {}={}, so that the product is {SOCKETS_MAX} at most", setting.name, SOCKETS_MAX / threads),
        );
    }
}

/// The most sockets of a connection (`MAX_SOCKETS` of `net_socket.cc`).
const SOCKETS_MAX: i64 = 64;

fn debug_file(host: &Host<'_>, setting: &Setting, add: &mut impl FnMut(&Setting, String, String)) {
    let path = setting.value.as_str();
    let home = host.settings.variable("HOME").unwrap_or("/root");
    if path.starts_with('~') {
        let absolute = path.replacen('~', home, 1);
        return add(
            setting,
            format!("`{path}`: `~` is not expanded, so that a folder of that name is looked for"),
            format!("write the absolute path: NCCL_DEBUG_FILE={absolute}"),
        );
    }
    if path.contains("%h") && path.contains("%p") {
        return;
    }
    let ranks = host.settings.variable("LOCAL_WORLD_SIZE").and_then(|ranks| ranks.parse::<u32>().ok()).unwrap_or(1);
    if ranks > 1 && path.starts_with('/') && !path.contains("%p") && !path.starts_with("/dev/") {
        let found = format!("{ranks} ranks of this host write the same file {path}, and overwrite each other");
        return add(setting, found, format!("name host and process: NCCL_DEBUG_FILE={path}.%h.%p"));
    }
    let mounts = host.text("/proc/self/mounts").unwrap_or_default();
    let of_path = mounts
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (target, kind) = (*fields.get(1)?, *fields.get(2)?);
            let under =
                target == "/" || path == target || path.strip_prefix(target).is_some_and(|rest| rest.starts_with('/'));
            under.then_some((target.len(), kind))
        })
        .max_by_key(|(length, _)| *length);
    let shared = ["nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs"];
    if let Some((_, kind)) = of_path.filter(|(_, kind)| shared.iter().any(|prefix| kind.starts_with(prefix))) {
        let dot = path.rsplit_once('.').map_or(path, |(stem, _)| stem);
        add(
            setting,
            format!(
                "all ranks of all hosts write the same file {path}, on a shared file system ({kind}: nfs and others mix the lines, and are slow)"
            ),
            format!("name host and process: NCCL_DEBUG_FILE={dot}.%h.%p"),
        );
    }
}

fn disabled(host: &Host<'_>, setting: &Setting, add: &mut impl FnMut(&Setting, String, String)) {
    let without_effect: Vec<&str> = host
        .settings
        .all_of_nccl()
        .filter(|other| other.name.starts_with("NCCL_IB_") && other.name != setting.name && !other.value.is_empty())
        .map(|other| other.name.as_str())
        .collect();
    let active: Vec<&str> = host
        .cards
        .iter()
        .filter(|card| card.ports.iter().any(|port| port.is_active()))
        .map(|card| card.name.as_str())
        .collect();
    // Who also names the network means it.
    let is_meant = host.settings.nccl("NCCL_NET").is_some() || !host.may_use_rdma();
    if active.is_empty() || (without_effect.is_empty() && is_meant) {
        return;
    }
    let which = match active.len() {
        1 => format!("{} is", active[0]),
        _ => format!("{} are", active.join(", ")),
    };
    let found = match without_effect.is_empty() {
        true => format!("RDMA is switched off, although {which} active: NCCL takes sockets (TCP)"),
        false => format!(
            "RDMA is switched off, so that {} have no effect, although {which} active: NCCL takes sockets",
            without_effect.join(", "),
        ),
    };
    let fix = match setting.source {
        Source::Environment => "unset it, or write NCCL_IB_DISABLE=0".to_owned(),
        Source::Line { .. } => setting.remove(),
    };
    add(setting, found, fix);
}
