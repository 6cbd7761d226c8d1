//! How servers reach each other: the keys `transport` and `require_transport`, which NeMo Gym does not have.

use gym_core::transport::{Transport, TransportPolicy};
use serde::de::DeserializeOwned;

use crate::config::problem::{ConfigError, Mistake, Problem};
use crate::config::yaml::node::{Node, Tree};

const TRANSPORT: &str = "transport";
const REQUIRE: &str = "require_transport";

/// The transport policy that the configuration names; `None` when it names none.
pub(crate) fn transport_policy(resolved: &Node) -> Result<Option<TransportPolicy>, ConfigError> {
    let transport: Option<TransportPolicy> =
        read(resolved, TRANSPORT, "write auto, or some of mem, shm, rdma, ucx_tcp, http")?;
    let require: Option<Transport> = read(resolved, REQUIRE, "write one of mem, shm, rdma, ucx_tcp, http")?;
    let unmet = |error: gym_core::Error| problem(resolved, REQUIRE, error.message(), "name it in transport too");
    TransportPolicy::configured(transport, require).map_err(unmet)
}

fn read<T: DeserializeOwned>(resolved: &Node, key: &str, fix: &str) -> Result<Option<T>, ConfigError> {
    match resolved.step(key) {
        Some(node) if !matches!(node.value, Tree::Null) => match serde_json::from_value(node.to_json()) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(problem(resolved, key, &error.to_string(), fix)),
        },
        _ => Ok(None),
    }
}

fn problem(resolved: &Node, key: &str, what: &str, fix: &str) -> ConfigError {
    let origin = resolved.step(key).map(|node| node.origin.clone()).unwrap_or_default();
    Problem::new(Mistake::Value, &origin, key, what).fix(fix).into()
}

#[cfg(test)]
mod tests {
    use crate::config::loader::ConfigLoader;
    use crate::config::resolve::overrides::Overrides;
    use crate::config::schema::GymConfig;

    fn load(text: &str, overrides: &[&str]) -> Result<GymConfig, String> {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join("a.yaml"), text).expect("writes");
        let overrides = Overrides::parse(overrides.iter().map(|text| (*text).to_owned())).expect("overrides");
        ConfigLoader::new(folder.path()).load(&["a.yaml"], &overrides).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_names_the_rungs_and_the_command_line_wins() {
        assert_eq!(load("x: 1\n", &[]).expect("loads").transport_policy, None);
        let file = "transport: [shm, rdma, http]\nrequire_transport: rdma\n";
        let transport_policy = load(file, &[]).expect("loads").transport_policy.expect("named");
        assert_eq!(transport_policy.to_string(), "shm, rdma, http, at least rdma");
        let transport_policy = load(file, &["++transport=auto"]).expect("loads").transport_policy.expect("named");
        assert_eq!(transport_policy.to_string(), "auto, at least rdma");
    }

    #[test]
    fn mistakes_have_their_place_and_their_fix() {
        let error = load("x: 1\ntransport: rmda\n", &[]).expect_err("no such transport");
        assert!(error.contains("a.yaml:2: transport: `rmda` is no transport") && error.contains("fix: "), "{error}");
        let error = load("transport: http\nrequire_transport: shm\n", &[]).expect_err("cannot be met");
        assert!(error.contains("a.yaml:2: require_transport") && error.contains("add shm"), "{error}");
    }
}
