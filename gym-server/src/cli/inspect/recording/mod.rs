//! `rgym doctor --record` and `--replay`: a machine as a file, judged here and elsewhere.
//!
//! A replay asks recordings and folders only: it loads no library, calls no endpoint, and follows no link out of a folder.

#[cfg(feature = "rdma")]
mod machines;
#[cfg(feature = "rdma")]
mod report;

#[cfg(feature = "rdma")]
pub(super) use report::{record, replay};
#[cfg(not(feature = "rdma"))]
pub(super) use unbuilt::{record, replay};

#[cfg(not(feature = "rdma"))]
mod unbuilt {
    use std::path::{Path, PathBuf};

    use crate::cli::args::options::DoctorArgs;
    use crate::cli::exit::{Failure, Outcome};

    pub(in crate::cli::inspect) async fn record(_: &Path, _: &DoctorArgs) -> Outcome {
        Err(without_rdma())
    }

    pub(in crate::cli::inspect) fn replay(_: &[PathBuf], _: bool) -> Outcome {
        Err(without_rdma())
    }

    fn without_rdma() -> Failure {
        let fix = "build it with the feature `rdma` of gym-server";
        Failure::Usage(format!("this program was built without the checks of a machine; fix: {fix}"))
    }
}
