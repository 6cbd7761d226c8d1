//! The profile of a machine with RoCE, judged by the rules of the settings themselves.
#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod machines;

use gym_transport_rdma::probe::machine::Folder;
use gym_transport_rdma::tuning::{Fabric, Profile, agreement, judge, profile};
use machines::{Case, case, cases, scratch};
use serde_json::{Map, Value};

fn profile_of(case: &Case, fabric: Fabric) -> Option<Profile> {
    let folder = scratch();
    let root = case.write(folder.path()).remove(0);
    profile(&Folder::new(&root), fabric)
}

fn value<'p>(profile: &'p Profile, name: &str) -> Option<&'p str> {
    profile.variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
}

#[test]
fn the_profile_of_a_healthy_roce_machine_has_no_finding() {
    let fabric = Fabric::new().traffic_class(106).service_level(3);
    let mut profiles = 0;
    for mut case in cases() {
        if !case.id.starts_with("healthy-") || case.value.get("nodes").is_some() {
            continue;
        }
        case.value["environment"] = Value::Object(Map::new());
        let Some(profile) = profile_of(&case, fabric) else { continue };
        profiles += 1;
        for (nccl, ucx) in [("NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS"), ("NCCL_IB_SL", "UCX_IB_SL")] {
            assert_eq!(value(&profile, nccl), value(&profile, ucx), "{}", case.id);
        }
        let hca = value(&profile, "NCCL_IB_HCA").unwrap();
        assert_eq!(hca.strip_prefix('='), value(&profile, "UCX_NET_DEVICES"), "{}", case.id);
        case.value["environment"] =
            profile.variables.iter().map(|(name, value)| ((*name).to_owned(), Value::from(value.as_str()))).collect();
        let folder = scratch();
        let root = case.write(folder.path()).remove(0);
        assert_eq!(judge(&Folder::new(&root)), [], "{}: {profile:?}", case.id);
    }
    assert!(profiles >= 5, "only {profiles} machines with RoCE");
}

#[test]
fn a_row_is_named_only_where_a_library_does_not_find_it() {
    let row = |id: &str, name: &str| {
        let profile = profile_of(&case(id), Fabric::new()).unwrap();
        value(&profile, name).map(str::to_owned)
    };
    assert_eq!(row("healthy-roce-nothing-set", "NCCL_IB_GID_INDEX"), None);
    assert_eq!(row("healthy-roce-nothing-set", "UCX_IB_GID_INDEX"), None);
    assert!(row("gid-old-nccl-needs-index", "NCCL_IB_GID_INDEX").is_some());
    assert!(row("ucx-row-0-empty", "UCX_IB_GID_INDEX").is_some());
    assert_eq!(row("gid-ipv6-only-automatic", "NCCL_IB_ADDR_FAMILY").as_deref(), Some("AF_INET6"));
}

#[test]
fn machines_without_roce_have_no_profile() {
    for id in ["healthy-laptop", "healthy-infiniband-eight", "healthy-efa", "node-without-rail-interface"] {
        assert_eq!(profile_of(&case(id), Fabric::new()), None, "{id}");
    }
}

#[test]
fn what_must_agree_is_told_by_machines_with_gpus_or_settings_only() {
    let of = |case: &Case| {
        let folder = scratch();
        let root = case.write(folder.path()).remove(0);
        agreement(&Folder::new(&root))
    };
    let told = of(&case("healthy-roce-settings")).unwrap();
    assert_eq!((told["NCCL_IB_TC"].as_str(), told["NCCL"].as_str()), ("106", "2.27.3"), "{told:?}");
    assert!(!told.contains_key("NCCL_IB_HCA"), "cards have other names elsewhere: {told:?}");
    let mut laptop = case("healthy-laptop");
    assert_eq!(of(&laptop), None);
    laptop.value["environment"] = serde_json::json!({ "UCX_RNDV_THRESH": "64k" });
    assert_eq!(
        of(&laptop).unwrap().into_iter().collect::<Vec<_>>(),
        [("UCX_RNDV_THRESH".to_owned(), "64k".to_owned())]
    );
}
