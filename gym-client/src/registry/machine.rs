//! The programs of this machine that report their waits without a server of their own: collectors, and controllers of worker groups.
//!
//! Each listens on a free loopback port and writes its URL into a file named after its process, in a folder that only this user can write.

use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::base::waits::{self, WAITS_ROUTE, WaitQuery};
use gym_core::transport::{ListenOptions, serve};
use gym_core::{CancelToken, Code, Endpoint, Error, Handler, Request, Response, Result, Verb};
use tokio::task::JoinSet;

use crate::transport::{HTTP, Transports, body};

/// Maximum programs of one machine that are listed.
const PROGRAMS_MAX: usize = 1_024;

/// A program of this machine that reports its waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalProgram {
    /// Its process.
    pub pid: u32,
    /// Where it reports.
    pub endpoint: Endpoint,
}

/// Reports the waits of this process to `rgym stuck` on the same machine, until it is dropped.
#[derive(Debug)]
pub struct WaitsListener {
    file: PathBuf,
    _serving: JoinSet<Result<()>>,
}

impl WaitsListener {
    /// Listens on a free loopback port. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The errors of the listener and of the file.
    pub async fn start(transports: &Transports) -> Result<Self> {
        let folder = folder()?;
        let place = ListenOptions::default().at("127.0.0.1".to_owned(), 0);
        let (listener, handler) = transports.listen(place, Arc::new(WaitsHandler), &[HTTP]).await?;
        let endpoint = listener.endpoints().iter().find(|endpoint| endpoint.scheme() == HTTP.as_str());
        let Some(endpoint) = endpoint.cloned() else {
            return Err(Error::internal("the listener has no HTTP endpoint"));
        };
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, handler, CancelToken::new(), Duration::ZERO));
        let file = folder.join(std::process::id().to_string());
        fs::write(&file, endpoint.to_string()).map_err(|error| about(&file, &error))?;
        Ok(Self { file, _serving: serving })
    }
}

impl Drop for WaitsListener {
    fn drop(&mut self) {
        // A file that remains names a process that has ended, and is ignored.
        let _ = fs::remove_file(&self.file);
    }
}

/// Returns the programs of this user and machine that report their waits. Removes the files of those that have ended.
#[must_use]
pub fn local_programs() -> Vec<LocalProgram> {
    let Ok(entries) = folder().and_then(|folder| fs::read_dir(&folder).map_err(|error| about(&folder, &error))) else {
        return Vec::new();
    };
    let program = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        if !fs::exists(format!("/proc/{pid}")).unwrap_or(true) {
            let _ = fs::remove_file(entry.path());
            return None;
        }
        let endpoint = Endpoint::parse(fs::read_to_string(entry.path()).ok()?.trim()).ok()?;
        Some(LocalProgram { pid, endpoint })
    };
    entries.flatten().filter_map(program).take(PROGRAMS_MAX).collect()
}

/// Returns the folder of the files, which it creates.
fn folder() -> Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let folder = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder).join("gym-waits"),
        _ => std::env::temp_dir().join(format!("gym-waits-{user}")),
    };
    match fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder) {
        Ok(()) => {}
        Err(error) => return Err(about(&folder, &error)),
    }
    // In a folder for all users, another user could have created it first.
    let owner = fs::symlink_metadata(&folder).map_err(|error| about(&folder, &error))?;
    if owner.is_dir() && owner.uid() == user {
        return Ok(folder);
    }
    Err(Error::not_started(Code::FailedPrecondition, format!("{} belongs to another user", folder.display())))
}

fn about(path: &std::path::Path, error: &std::io::Error) -> Error {
    Error::not_started(Code::Unavailable, error.to_string()).about(path.display().to_string())
}

#[derive(Debug)]
struct WaitsHandler;

impl Handler for WaitsHandler {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let response = if (request.verb, request.route.path()) == (Verb::Get, WAITS_ROUTE) {
            let query = WaitQuery::parse(request.route.query().unwrap_or_default());
            body::write(&waits::report(&query)).map(Response::json)
        } else {
            Err(Error::not_started(Code::NotFound, format!("this program has only GET {WAITS_ROUTE}")))
        };
        Box::pin(std::future::ready(response))
    }
}
