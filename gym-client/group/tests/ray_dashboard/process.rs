//! A process of its own, for what depends on the environment or on the file of the program.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use gym_core::CallContext;
use gym_group::ray::{Ray, RayAddress, RayDashboard};
use gym_group::{Provisioner as _, Workers};
use tokio::process::Command;
use tokio::time::timeout;

use super::fake::{Fake, LONG};
use super::reserve::{options, two_nodes};

const ADDRESS: &str = "RAY_DASHBOARD_TEST_ADDRESS";
/// Set if the process sends its program to the cluster.
pub(crate) const SENDS: &str = "RAY_DASHBOARD_TEST_SENDS";

/// The test in that process: connects to the cluster, reserves on it, and prints the results.
#[tokio::test]
async fn the_process() {
    let Ok(address) = std::env::var(ADDRESS) else { return };
    let address = RayAddress::parse(&address, ADDRESS).expect("an address");
    let cx = CallContext::within(LONG);
    match RayDashboard::connect(&cx, &address).await {
        Ok((dashboard, version)) => println!("connected to {version:?} by {dashboard:?}"),
        Err(error) => return println!("error: {error}\nwhich is {error:?}\ncode {:?}", error.code()),
    }
    let mut options = options();
    if std::env::var_os(SENDS).is_some() {
        options.program = None;
    }
    let ray = Ray::at(address, Workers::new()).with(options);
    let error = ray.reserve(&cx, &two_nodes()).await.map(drop).expect_err("there is no room");
    println!("{ray:?}\nerror: {error}\nwhich is {error:?}");
}

/// Returns the program of this process.
pub(crate) fn own_program() -> PathBuf {
    std::env::current_exe().expect("own path")
}

/// Runs that process with these variables and no others of Ray, and returns all that it says.
pub(crate) async fn process(fake: &Fake, program: &Path, variables: &[(&str, &OsStr)]) -> String {
    let empty = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(program);
    command.args(["--exact", "process::the_process", "--nocapture"]).stdin(Stdio::null()).kill_on_drop(true);
    for name in ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", SENDS] {
        command.env_remove(name);
    }
    command.env("HOME", empty.path()).env(ADDRESS, fake.url()).envs(variables.iter().copied());
    let output = timeout(LONG, command.output()).await.expect("in time").expect("runs");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    said
}
