//! Devices that UCX finds on this machine, for diagnostics.

use crate::fabric::library::{bounded, load, refused};
use crate::fabric::options::FabricError;
use crate::sys::{LibraryInfo, LoadOptions};
use crate::ucx::{Context, Worker};

/// Library and devices that UCX finds on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceReport {
    /// The library, and the effects of loading it.
    pub(crate) library: LibraryInfo,
    /// Transports and devices that UCX can use, as `transport/device`.
    pub(crate) devices: Vec<String>,
}

/// Loads UCX into this process, and returns the transports and devices that it can use with the environment's settings.
///
/// # Errors
/// If UCX cannot be loaded, or cannot open a context or a worker.
pub(crate) fn device_report(options: &LoadOptions) -> Result<DeviceReport, FabricError> {
    let library = load(options)?;
    let settings: Vec<(String, String)> = bounded(&[]).into_iter().collect();
    let context = Context::open(library, &settings).map_err(refused)?;
    // UCX warns of unknown variables, and finds out that its queues do not fit, when it opens a worker.
    Worker::open(&context).map_err(refused)?;
    Ok(DeviceReport { library: library.info(), devices: devices(&context.describe()) })
}

/// Parses the output of `ucp_context_print_info`: `#  resource 1  :  md 1  dev 1  flags -- tcp/lo`.
pub(crate) fn devices(description: &str) -> Vec<String> {
    let resource = |line: &str| line.trim_start_matches(['#', ' ']).strip_prefix("resource ").map(str::to_owned);
    let name = |resource: String| resource.split_whitespace().last().map(str::to_owned);
    let resources = description.lines().filter_map(resource).filter_map(name);
    resources.filter(|name| name.contains('/')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_from_what_ucx_prints() {
        let printed = "#     component 0  :  self\n#\n#            md 1  :  component 1  tcp \n\
                       #      resource 0  :  md 0  dev 0  flags -- self/memory0\n\
                       #      resource 1  :  md 1  dev 1  flags -- rc_verbs/mlx5_0:1\n";
        assert_eq!(devices(printed), ["self/memory0", "rc_verbs/mlx5_0:1"]);
    }
}
