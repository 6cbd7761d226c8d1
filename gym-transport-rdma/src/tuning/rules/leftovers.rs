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
    if let Some(setting) = settings.nccl("NCCL_DEBUG").filter(|setting| setting.value.eq_ignore_ascii_case("TRACE")) {
        add(setting, "TRACE logs every operation of every rank".to_owned(), "write NCCL_DEBUG=WARN".to_owned());
    }
    if let Some(setting) = settings.nccl("NCCL_DEBUG_FILE") {
        debug_file(host, setting, &mut add);
    }
    if let Some(setting) = settings.nccl("NCCL_IB_DISABLE").filter(|_| is_on("NCCL_IB_DISABLE")) {
        disabled(host, setting, &mut add);
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
