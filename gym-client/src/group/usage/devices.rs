//! The GPUs of this machine, found without loading a driver.
//!
//! `CUDA_VISIBLE_DEVICES` takes precedence and is parsed as CUDA does. Without it, the kernel driver's list under `/proc` counts,
//! as far as the device files exist. In a container, that list shows all GPUs of the host, and the device files only those of the
//! container.

use std::fs;
use std::path::Path;

/// Returns the GPUs that programs may use, as in `CUDA_VISIBLE_DEVICES`: indices, or the identifiers in that variable. Empty if
/// there are none.
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

/// Returns the driver's devices in the order of their bus addresses, which is their index with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
fn present(root: &Path) -> Vec<String> {
    let Ok(folders) = fs::read_dir(root.join("proc/driver/nvidia/gpus")) else { return Vec::new() };
    let mut addresses: Vec<_> = folders.filter_map(|folder| Some(folder.ok()?.path())).collect();
    addresses.sort();
    let minor = |folder: &Path| -> Option<u32> {
        let text = fs::read_to_string(folder.join("information")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?.trim().parse().ok()
    };
    let usable = addresses
        .iter()
        .filter(|folder| minor(folder).is_some_and(|minor| root.join(format!("dev/nvidia{minor}")).exists()));
    usable.enumerate().map(|(index, _)| index.to_string()).collect()
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
            let text = format!("Model: \t\t NVIDIA\nDevice Minor: \t {minor}\n");
            fs::write(folder.join("information"), text).expect("writes");
            if minor != 1 {
                fs::write(root.path().join(format!("dev/nvidia{minor}")), "").expect("writes");
            }
        }
        assert_eq!(present(root.path()), ["0", "1"], "two of three were handed in, and are numbered anew");
    }
}
