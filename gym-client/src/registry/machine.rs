//! The programs of this machine that report their waits: collectors, controllers of worker groups, and servers, which a person must find
//! although their head server does not answer.
//!
//! Each listens on a free loopback port and writes its URL into a file named after its process, in a folder that only this user can write.

use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::base::process;
use gym_core::base::temporary_folder;
use gym_core::observe::waits::{self, WAITS_ROUTE, WaitQuery};
use gym_core::transport::{ListenOptions, serve};
use gym_core::{CancelToken, Code, Endpoint, Error, Handler, Request, Response, Result, Verb};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::transport::{HTTP, Transports, body};

/// Maximum programs of one machine that are listed.
const PROGRAMS_MAX: usize = 1_024;

/// A program of this machine that reports its waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalProgram {
    /// Its process.
    pub pid: u32,
    /// Where it reports.
    pub endpoint: Endpoint,
    /// The head server whose page shows what it does; `None` if there is none.
    #[serde(default)]
    pub head: Option<Endpoint>,
    /// The addresses of the servers that run in its process.
    #[serde(default)]
    pub servers: Vec<Endpoint>,
}

/// Reports the waits of this process to `rgym stuck` on the same machine, until it is dropped.
///
/// It has a thread of its own, and so answers while handlers block all threads of the runtime.
#[derive(Debug)]
pub struct WaitsListener {
    file: PathBuf,
    stop: CancelToken,
}

impl WaitsListener {
    /// Listens on a free loopback port. `head` is the head server whose page shows what this process does, and `servers` are the addresses of the
    /// servers that run in it.
    ///
    /// # Errors
    /// The errors of the listener and of the file.
    pub async fn start(transports: &Transports, head: Option<Endpoint>, servers: Vec<Endpoint>) -> Result<Self> {
        let file = folder()?.join(std::process::id().to_string());
        let (transports, stop, (listens, listening)) = (transports.clone(), CancelToken::new(), oneshot::channel());
        let stopped = stop.clone();
        let serving = move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(listens.send(Err(no_thread(&error)))),
            };
            runtime.block_on(async {
                let place = ListenOptions::default().at("127.0.0.1".to_owned(), 0);
                match transports.listen(place, Arc::new(WaitsHandler), &[HTTP]).await {
                    Err(error) => drop(listens.send(Err(error))),
                    Ok((listener, handler)) => {
                        let endpoint = listener.endpoints().iter().find(|endpoint| endpoint.scheme() == HTTP.as_str());
                        let endpoint =
                            endpoint.cloned().ok_or_else(|| Error::internal("the listener has no HTTP endpoint"));
                        if listens.send(endpoint).is_ok()
                            && let Err(error) = serve(listener, handler, stopped, Duration::ZERO).await
                        {
                            tracing::debug!(%error, "this program no longer reports its waits");
                        }
                    }
                }
            });
        };
        let thread = std::thread::Builder::new().name("gym-waits".to_owned());
        thread.spawn(serving).map_err(|error| no_thread(&error))?;
        let endpoint = listening.await.map_err(|_| Error::internal("the thread that reports waits has ended"))??;
        let program = LocalProgram { pid: std::process::id(), endpoint, head, servers };
        let text = serde_json::to_vec(&program).map_err(|error| Error::internal(error.to_string()))?;
        fs::write(&file, text).map_err(|error| about(&file, &error))?;
        Ok(Self { file, stop })
    }
}

fn no_thread(error: &std::io::Error) -> Error {
    Error::internal(format!("no thread to report waits: {error}"))
}

impl Drop for WaitsListener {
    fn drop(&mut self) {
        self.stop.cancel();
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
        if !process::exists(pid) {
            let _ = fs::remove_file(entry.path());
            return None;
        }
        let program: LocalProgram = serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()?;
        Some(LocalProgram { pid, ..program })
    };
    entries.flatten().filter_map(program).take(PROGRAMS_MAX).collect()
}

/// Returns the folder of the files, which it creates.
fn folder() -> Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let folder = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder).join("gym-waits"),
        _ => temporary_folder(usize::MAX).join(format!("gym-waits-{user}")),
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
