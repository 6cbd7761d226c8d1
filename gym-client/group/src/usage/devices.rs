//! The GPUs of this machine, found without loading a driver.
//!
//! `CUDA_VISIBLE_DEVICES` takes precedence and is parsed as CUDA does. Without it, the kernel driver's list under `/proc` counts,
//! as far as the device files exist. In a container, that list shows all GPUs of the host, and the device files only those of the
//! container.

use std::fs;
use std::path::Path;

/// Returns the GPUs that programs may use, as in `CUDA_VISIBLE_DEVICES`: indices, or the identifiers in that variable. Empty if
/// there are none.
///
/// ```
/// let gpus = gym_group::visible_gpus();
/// println!("{} GPUs: {}", gpus.len(), gpus.join(","));
/// ```
#[must_use]
pub fn visible_gpus() -> Vec<String> {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => named(&list),
        Err(_) => present(Path::new("/")),
    }
}

/// Returns the entries of the list. CUDA uses the entries before the first invalid one.
fn named(list: &str) -> Vec<String> {
    let entries = list.split(',').map(str::trim);
    let valid = |entry: &&str| entry.parse::<u32>().is_ok() || entry.starts_with("GPU-") || entry.starts_with("MIG-");
    let mut taken: Vec<String> = Vec::new();
    for entry in entries.take_while(valid) {
        // If a device is listed twice, CUDA uses none.
        if taken.iter().any(|known| known == entry) {
            return Vec::new();
        }
        taken.push(entry.to_owned());
    }
    taken
}

/// Returns the indices of the driver's devices.
fn present(root: &Path) -> Vec<String> {
    (0..DriverDevice::usable(root).len()).map(|index| index.to_string()).collect()
}

/// Returns the identity of a GPU that `CUDA_VISIBLE_DEVICES` names, which is the same for every process of the machine: its bus address, whether it
/// is named by index or by identifier. A MIG device, and a GPU that the driver does not list, are identified by their name.
pub(crate) fn gpu_identity(name: &str) -> String {
    identity(Path::new("/"), name)
}

fn identity(root: &Path, name: &str) -> String {
    let devices = DriverDevice::usable(root);
    if let Ok(index) = name.parse::<usize>() {
        return devices.get(index).map_or_else(|| index.to_string(), |device| device.address.clone());
    }
    // CUDA takes the beginning of an identifier if it is unique.
    let mut named = devices.iter().filter(|device| name.len() > 4 && device.uuid.starts_with(name));
    match (named.next(), named.next()) {
        (Some(device), None) => device.address.clone(),
        _ => name.to_owned(),
    }
}

/// A device of the kernel driver.
struct DriverDevice {
    /// Its bus address.
    address: String,
    /// Its identifier, `GPU-…`; empty if the driver does not tell it.
    uuid: String,
}

impl DriverDevice {
    /// Returns the devices whose files exist, in the order of their bus addresses, which is their index with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    fn usable(root: &Path) -> Vec<Self> {
        let Ok(folders) = fs::read_dir(root.join("proc/driver/nvidia/gpus")) else { return Vec::new() };
        let device = |folder: fs::DirEntry| {
            let text = fs::read_to_string(folder.path().join("information")).ok()?;
            let value = |key| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
            let minor: u32 = value("Device Minor:")?.parse().ok()?;
            let uuid = value("GPU UUID:").unwrap_or_default().to_owned();
            let address = folder.file_name().into_string().ok()?;
            root.join(format!("dev/nvidia{minor}")).exists().then_some(Self { address, uuid })
        };
        let mut devices: Vec<Self> = folders.flatten().filter_map(device).collect();
        devices.sort_by(|a, b| a.address.cmp(&b.address));
        devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_read_as_cuda_reads_it() {
        let cases: [(&str, &[&str]); 8] = [
            ("0,1,2", &["0", "1", "2"]),
            (" 3 , 1", &["3", "1"]),
            ("", &[]),
            ("-1", &[]),
            ("0,-1,2", &["0"]),
            ("1,none", &["1"]),
            ("GPU-8932f937-d72c,GPU-1", &["GPU-8932f937-d72c", "GPU-1"]),
            ("1,0,1", &[]),
        ];
        for (list, expected) in cases {
            assert_eq!(named(list), expected, "{list:?}");
        }
    }

    #[test]
    fn the_drivers_list_counts_as_far_as_the_device_files_exist() {
        let root = tempfile::tempdir().expect("a folder");
        assert_eq!(present(root.path()), Vec::<String>::new(), "no driver");
        fs::create_dir(root.path().join("dev")).expect("a folder");
        for (address, minor) in [("0000:1b:00.0", 0), ("0000:43:00.0", 1), ("0000:9d:00.0", 2)] {
            let folder = root.path().join("proc/driver/nvidia/gpus").join(address);
            fs::create_dir_all(&folder).expect("a folder");
            let text = format!("Model: \t\t NVIDIA\nGPU UUID: \t GPU-8932f93{minor}-d72c\nDevice Minor: \t {minor}\n");
            fs::write(folder.join("information"), text).expect("writes");
            if minor != 1 {
                fs::write(root.path().join(format!("dev/nvidia{minor}")), "").expect("writes");
            }
        }
        assert_eq!(present(root.path()), ["0", "1"], "two of three were handed in, and are numbered anew");
        let cases = [
            ("0", "0000:1b:00.0"),
            ("00", "0000:1b:00.0"),
            ("GPU-8932f930-d72c", "0000:1b:00.0"),
            ("GPU-8932f930", "0000:1b:00.0"),
            ("1", "0000:9d:00.0"),
            ("GPU-8932f932-d72c", "0000:9d:00.0"),
            // Two GPUs begin so; one was not handed in; the driver knows nothing of the others.
            ("GPU-8932f93", "GPU-8932f93"),
            ("GPU-", "GPU-"),
            ("GPU-8932f931-d72c", "GPU-8932f931-d72c"),
            ("2", "2"),
            ("MIG-GPU-8932f930-d72c/1/0", "MIG-GPU-8932f930-d72c/1/0"),
        ];
        for (name, expected) in cases {
            assert_eq!(identity(root.path(), name), expected, "{name}");
        }
    }
}
