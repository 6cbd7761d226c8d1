//! Finds the library files of a UCX installation.

use std::path::{Path, PathBuf};

/// Libraries in the order in which they must be loaded, because the search path of a Python wheel points to the machine
/// that built it.
pub(crate) const LIBRARIES: [&str; 4] = ["libucm", "libucs", "libuct", "libucp"];

/// Directories below `site-packages` in which Python packages install UCX.
const IN_SITE_PACKAGES: [&str; 3] = ["libucx/lib", "nixl_cu12.libs", "nixl_cu13.libs"];

/// The four library files of one UCX, in loading order.
pub(crate) type Files = [PathBuf; 4];

/// Finds the libraries in this directory, or in that of a Python package below it.
pub(crate) fn find(directory: &Path) -> Option<Files> {
    let below = IN_SITE_PACKAGES.iter().map(|below| directory.join(below));
    std::iter::once(directory.to_path_buf()).chain(below).find_map(|directory| in_directory(&directory))
}

fn in_directory(directory: &Path) -> Option<Files> {
    let mut names: Vec<String> =
        std::fs::read_dir(directory).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let mut files = Files::default();
    for (file, library) in files.iter_mut().zip(LIBRARIES) {
        *file = directory.join(names.iter().find(|name| is(library, name))?);
    }
    Some(files)
}

/// Matches `libucp.so.0`, `libucp.so`, and the names in wheels: `libucp-35bb6b8f.so.0.0.0`.
fn is(library: &str, name: &str) -> bool {
    name.strip_prefix(library)
        .is_some_and(|rest| rest == ".so" || rest == ".so.0" || (rest.starts_with('-') && rest.contains(".so")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, b"").unwrap();
        }
        folder
    }

    #[test]
    fn the_four_files_come_in_the_order_in_which_they_need_each_other() {
        let folder = folder_with(&["libucp.so.0", "libucm.so.0", "libuct.so.0", "libucs.so.0", "libucs_signal.so.0"]);
        let found = find(folder.path()).unwrap();
        let names = found.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned());
        assert_eq!(names, ["libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0"]);
    }

    #[test]
    fn a_wheel_is_found_below_site_packages_under_plain_and_hashed_names() {
        let plain = ["libucm", "libucs", "libuct", "libucp"].map(|name| format!("libucx/lib/{name}.so.0"));
        let hashed =
            ["libucm", "libucs", "libuct", "libucp"].map(|name| format!("nixl_cu12.libs/{name}-1f2e.so.0.0.0"));
        for names in [plain, hashed] {
            let folder = folder_with(&names.each_ref().map(String::as_str));
            assert_eq!(find(folder.path()).unwrap()[3], folder.path().join(&names[3]));
        }
    }

    #[test]
    fn a_folder_that_lacks_one_of_them_is_none() {
        assert_eq!(find(folder_with(&["libucp.so.0", "libucs.so.0", "libuct.so.0"]).path()), None);
        assert_eq!(find(Path::new("/nowhere/at/all")), None);
    }
}
