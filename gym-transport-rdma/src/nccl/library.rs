//! The libraries of NVIDIA in this process, and the functions that need no GPU.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::Library as Loaded;

use crate::machine::{
    Attempt, CUDA_FOLDERS, CUDA_LIBRARY_VARIABLE, LoadOptions, Location, NCCL_IN_PACKAGES, NCCL_LIBRARY_VARIABLE,
    check_whole, loader_message, path_of, python_packages,
};
use crate::nccl::{NcclError, NcclVersion, UNIQUE_ID_BYTES, UniqueId};

/// `ncclNcclResultt` is a C enum, passed as `int`; 0 is success.
pub(super) type NcclResult = c_int;

/// `typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId {
    pub(super) internal: [c_char; UNIQUE_ID_BYTES],
}

/// A library of NVIDIA: its name, its places, and how to get it.
pub(super) struct Kind {
    name: &'static str,
    soname: &'static str,
    variable: &'static str,
    /// A function of each version. What lacks it is another library.
    symbol: &'static str,
    /// Folders below a directory that is searched.
    below: &'static [&'static str],
    /// Directories that are searched last, in addition to Python's packages if there are folders below.
    places: &'static [&'static str],
    install: &'static str,
}

pub(super) const NCCL: Kind = Kind {
    name: "NCCL 2.19 or later",
    soname: "libnccl.so.2",
    variable: NCCL_LIBRARY_VARIABLE,
    symbol: "ncclGetVersion",
    below: &NCCL_IN_PACKAGES,
    places: &[],
    install: "Install it (pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever fits the CUDA of this environment's PyTorch; \
              Debian, Ubuntu: apt-get install libnccl2 from NVIDIA's repository)",
};

pub(super) const CUDA: Kind = Kind {
    name: "CUDA's driver",
    soname: "libcuda.so.1",
    variable: CUDA_LIBRARY_VARIABLE,
    symbol: "cuInit",
    below: &[],
    places: &CUDA_FOLDERS,
    install: "It comes with NVIDIA's driver; a container gets it from the host by the NVIDIA container toolkit (docker: --gpus all)",
};

impl Kind {
    /// Returns what was tried and what helps.
    pub(super) fn missing(&self, tried: &[Attempt]) -> String {
        let Self { name, install, variable, .. } = self;
        format!(
            "{name} cannot be loaded: {}. {install}, or set {variable} to its file or directory",
            Attempt::list(tried)
        )
    }

    /// Returns the files to open at a path that the user or a search names.
    fn files(&self, path: &Path) -> Result<Vec<PathBuf>, String> {
        // A bare name is one for the dynamic loader.
        let is_name = path.components().count() == 1 && !path.exists();
        if path.is_file() || is_name {
            return Ok(vec![path.to_owned()]);
        }
        if !path.is_dir() {
            return Err("no such file or directory".to_owned());
        }
        let folders = std::iter::once(path.to_owned()).chain(self.below.iter().map(|below| path.join(below)));
        let found: Vec<_> = folders.map(|folder| folder.join(self.soname)).filter(|file| file.exists()).collect();
        if found.is_empty() { Err(format!("has no {}", self.soname)) } else { Ok(found) }
    }
}

/// A library in this process. It is never unloaded: constructors may have left threads or exit handlers behind, and its functions outlive this value.
pub(super) struct Library {
    loaded: ManuallyDrop<Loaded>,
    path: PathBuf,
}

impl Library {
    /// Loads the first library that `read` accepts. A location that was set is the only one.
    ///
    /// # Errors
    /// The problem of each location.
    pub(super) fn load<T>(
        kind: &Kind,
        options: &LoadOptions,
        read: impl Fn(&Self) -> Result<T, String>,
    ) -> Result<T, Vec<Attempt>> {
        let variable = std::env::var_os(kind.variable).filter(|path| !path.is_empty());
        let by_variable = options.path.is_none() && variable.is_some();
        let is_set = options.path.is_some() || by_variable;
        let mut locations = options.locations(variable);
        if !is_set {
            let packages = if kind.below.is_empty() { Vec::new() } else { python_packages() };
            locations.extend(packages.into_iter().chain(kind.places.iter().map(PathBuf::from)).map(Location::Path));
        }
        let mut tried = Vec::new();
        for location in locations {
            let (place, files) = match &location {
                Location::Loader => {
                    (format!("{} in the loader's directories", kind.soname), Ok(vec![kind.soname.into()]))
                }
                Location::Path(path) if by_variable => {
                    (format!("{}={}", kind.variable, path.display()), kind.files(path))
                }
                Location::Path(path) => (path.display().to_string(), kind.files(path)),
            };
            let files = files.unwrap_or_else(|why| {
                tried.push(Attempt { place: place.clone(), why });
                Vec::new()
            });
            for file in files {
                match Self::open(kind, &file).and_then(|library| read(&library)) {
                    Ok(read) => return Ok(read),
                    Err(why) => {
                        let is_below = matches!(&location, Location::Path(path) if *path != file);
                        let place = if is_below { file.display().to_string() } else { place.clone() };
                        tried.push(Attempt { place, why });
                    }
                }
            }
        }
        Err(tried)
    }

    fn open(kind: &Kind, file: &Path) -> Result<Self, String> {
        check_whole(file)?;
        // SAFETY: loading runs the library's constructors. This is a library of NVIDIA's by its own soname, in a directory of the dynamic loader or of the
        // user. Any user of it in this process would run the same code. It changes neither signal handlers nor libc, and can be loaded on any thread.
        let loaded = unsafe { Loaded::new(file) }.map_err(|error| loader_message(&error))?;
        let mut library = Self { loaded: ManuallyDrop::new(loaded), path: file.to_owned() };
        // SAFETY: the address of the function is not called, but looked up.
        let first = unsafe { library.function::<*const c_void>(kind.symbol) }?;
        if file.components().count() == 1 {
            library.path = path_of(first).unwrap_or(library.path);
        }
        Ok(library)
    }

    /// Returns a function.
    ///
    /// # Safety
    /// The symbol has the type `T`, a function pointer or an address.
    pub(super) unsafe fn function<T: Copy>(&self, symbol: &'static str) -> Result<T, String> {
        // SAFETY: by this function's contract. The library stays loaded, so a copy is valid for good.
        let found = unsafe { self.loaded.get::<T>(symbol.as_bytes()) };
        found.map(|function| *function).map_err(|_| format!("it has no function {symbol}"))
    }

    /// Returns the path of the library.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Declares a table of functions of a library.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $symbol:literal($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name { $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl $name {
            /// Returns the functions of a library.
            ///
            /// # Errors
            /// The name of the first one that it lacks.
            pub(super) fn of(library: &$crate::nccl::library::Library) -> Result<Self, String> {
                $(
                    // SAFETY: the symbol has this signature in the headers of all supported versions.
                    let $field = unsafe { library.function($symbol) }?;
                )*
                Ok(Self { $($field),* })
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    };
}
#[cfg(feature = "nccl")]
pub(super) use functions;

functions! {
    /// The functions that need no communicator.
    Functions {
        get_version: "ncclGetVersion"(*mut c_int) -> NcclResult;
        get_error_string: "ncclGetErrorString"(NcclResult) -> *const c_char;
        get_unique_id: "ncclGetUniqueId"(*mut RawId) -> NcclResult;
    }
}

functions! {
    /// The answers of CUDA's driver without a GPU.
    DriverFunctions {
        version: "cuDriverGetVersion"(*mut c_int) -> c_int;
    }
}

/// Returns the newest version of CUDA that the driver supports, such as `12.8`. It needs no GPU.
///
/// # Errors
/// Why the library cannot be loaded, or does not tell its version.
pub(crate) fn cuda_driver_version(options: &LoadOptions) -> Result<String, String> {
    let functions = Library::load(&CUDA, options, DriverFunctions::of).map_err(|tried| Attempt::reasons(&tried))?;
    functions.driver_version().map_err(|code| format!("its version function failed with code {code}"))
}

impl DriverFunctions {
    /// Returns the newest version of CUDA that the driver supports, or the `CUresult`.
    pub(super) fn driver_version(&self) -> Result<String, c_int> {
        let mut code: c_int = 0;
        // SAFETY: the library stays loaded. `code` is a valid, exclusive place for one int during the call, which needs neither a device nor an earlier call.
        match unsafe { (self.version)(&raw mut code) } {
            0 => Ok(format!("{}.{}", code / 1_000, code % 1_000 / 10)),
            failed => Err(failed),
        }
    }
}

impl Functions {
    pub(super) fn version(&self) -> Result<NcclVersion, NcclError> {
        let mut code: c_int = 0;
        // SAFETY: the library stays loaded. `code` is a valid, exclusive place for one int during the call, which needs neither a device nor an earlier call.
        let result = unsafe { (self.get_version)(&raw mut code) };
        self.check("ncclGetVersion", result)?;
        Ok(NcclVersion::from_code(u32::try_from(code).unwrap_or(0)))
    }

    pub(super) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = RawId { internal: [0; UNIQUE_ID_BYTES] };
        // SAFETY: the library stays loaded. `id` is a valid, exclusive place for one `ncclUniqueId` during the call, which copies the id into it.
        let result = unsafe { (self.get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", result)?;
        Ok(UniqueId(id.internal.map(|byte| byte.to_ne_bytes()[0])))
    }

    pub(super) fn check(&self, function: &'static str, code: NcclResult) -> Result<(), NcclError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library stays loaded. The function takes any code, and returns a static text or null.
        let text = unsafe { (self.get_error_string)(code) };
        let text = if text.is_null() {
            "no text".to_owned()
        } else {
            // SAFETY: a C string that lives as long as the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(NcclError::Failed { function, code, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_places_are_tried_in_order_and_told() {
        let kind = Kind {
            name: "it",
            soname: "libgym-no-such.so.1",
            variable: "gym-no-such",
            symbol: "none",
            below: &[],
            places: &["/nowhere/first", "/nowhere/second"],
            install: "Install it",
        };
        let options = LoadOptions { path: None, search: vec!["/nowhere/given".into()] };
        let tried = Library::load(&kind, &options, |_| Ok(())).expect_err("nowhere");
        let places: Vec<&str> = tried.iter().map(|attempt| attempt.place.as_str()).collect();
        let loader = "libgym-no-such.so.1 in the loader's directories";
        assert_eq!(places, [loader, "/nowhere/given", "/nowhere/first", "/nowhere/second"]);
        assert!(tried[0].why.contains("cannot open shared object file"), "{}", tried[0]);
        let text = kind.missing(&tried);
        let end =
            "; /nowhere/second: no such file or directory. Install it, or set gym-no-such to its file or directory";
        assert!(text.starts_with("it cannot be loaded: libgym-no-such") && text.ends_with(end), "{text}");
    }
}
