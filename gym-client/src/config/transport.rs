//! How servers reach each other: the keys `transport` and `require_transport`, which NeMo Gym does not have.

use gym_core::{Ladder, Level};
use serde::de::DeserializeOwned;

use super::node::{Node, Tree};
use super::problem::{ConfigError, Mistake, Problem};

const TRANSPORT: &str = "transport";
const REQUIRE: &str = "require_transport";

/// The ladder that the configuration names; `None` when it names none.
pub(super) fn ladder(resolved: &Node) -> Result<Option<Ladder>, ConfigError> {
    let transport: Option<Ladder> = read(resolved, TRANSPORT, "write auto, or some of mem, shm, rdma, ucx_tcp, http")?;
    let require: Option<Level> = read(resolved, REQUIRE, "write one of mem, shm, rdma, ucx_tcp, http")?;
    let unmet = |error: gym_core::Error| problem(resolved, REQUIRE, error.message(), "name it in transport too");
    Ladder::configured(transport, require).map_err(unmet)
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
    use super::super::{ConfigLoader, GymConfig, Overrides};

    fn load(text: &str, overrides: &[&str]) -> Result<GymConfig, String> {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join("a.yaml"), text).expect("writes");
        let overrides = Overrides::parse(overrides.iter().map(|text| (*text).to_owned())).expect("overrides");
        ConfigLoader::new(folder.path()).load(&["a.yaml"], &overrides).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_names_the_rungs_and_the_command_line_wins() {
        assert_eq!(load("x: 1\n", &[]).expect("loads").ladder, None);
        let file = "transport: [shm, rdma, http]\nrequire_transport: rdma\n";
        let ladder = load(file, &[]).expect("loads").ladder.expect("named");
        assert_eq!(ladder.to_string(), "shm, rdma, http, at least rdma");
        let ladder = load(file, &["++transport=auto"]).expect("loads").ladder.expect("named");
        assert_eq!(ladder.to_string(), "auto, at least rdma");
    }

    #[test]
    fn mistakes_have_their_place_and_their_fix() {
        let error = load("x: 1\ntransport: rmda\n", &[]).expect_err("no such rung");
        assert!(error.contains("a.yaml:2: transport: `rmda` is no transport") && error.contains("fix: "), "{error}");
        let error = load("transport: http\nrequire_transport: shm\n", &[]).expect_err("cannot be met");
        assert!(error.contains("a.yaml:2: require_transport") && error.contains("add shm"), "{error}");
    }
}
