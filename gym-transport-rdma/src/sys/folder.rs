//! Where the files of a UCX lie.

use std::path::{Path, PathBuf};

/// What libucp needs, in the order in which it must be loaded: a wheel's own search path points to where it was built.
pub(crate) const LIBRARIES: [&str; 4] = ["libucm", "libucs", "libuct", "libucp"];

/// Where Python packages that bring a UCX have it, below `site-packages`.
const IN_SITE_PACKAGES: [&str; 3] = ["libucx/lib", "nixl_cu12.libs", "nixl_cu13.libs"];

/// The four files of one UCX, in the order of loading.
pub(crate) type Files = [PathBuf; 4];

/// The files in this folder, or where a Python package below it has them.
pub(crate) fn find(folder: &Path) -> Option<Files> {
    let below = IN_SITE_PACKAGES.iter().map(|below| folder.join(below));
    std::iter::once(folder.to_path_buf()).chain(below).find_map(|folder| in_folder(&folder))
}

fn in_folder(folder: &Path) -> Option<Files> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let mut files = Files::default();
    for (file, library) in files.iter_mut().zip(LIBRARIES) {
        *file = folder.join(names.iter().find(|name| is(library, name))?);
    }
    Some(files)
}

/// `libucp.so.0`, `libucp.so`, or what wheels call it: `libucp-35bb6b8f.so.0.0.0`.
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
