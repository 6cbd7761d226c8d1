//! The address of a Ray cluster, in all its forms, and the token for it.

use std::fmt;
use std::path::PathBuf;

use gym_core::{Code, Endpoint, Error, Result};

/// The port of Ray's dashboard, which serves its REST interface.
pub(super) const DASHBOARD_PORT: u16 = 8265;
/// The forms, for errors.
const FORMS: &str = "ray://HOST:10001, HOST:6379, HOST, http://HOST:8265, https://HOST, auto, or local";
/// The word for a head of this machine.
const LOCAL: &str = "local";

/// The address of a Ray cluster, and where it was given.
///
/// | written | dashboard |
/// |---|---|
/// | `ray://HOST:10001`, `HOST:6379`, `HOST` | `http://HOST:8265`; the given port is that of another service; of `HOST:6379`, a driver that is a child of the program uses it |
/// | `http://HOST:PORT`, `https://HOST` | as written |
/// | `local` | `http://127.0.0.1:8265`, that of a head of this machine, which [`LocalHead`](crate::ray::LocalHead) starts if there is none |
/// | `auto` | `RAY_API_SERVER_ADDRESS`, or else `RAY_ADDRESS`, as Ray itself looks for it |
///
/// ```
/// use gym_group::ray::RayAddress;
///
/// let address = RayAddress::parse("ray://10.0.0.1:10001", "env.yaml:3")?;
/// assert_eq!(address.dashboard(), "http://10.0.0.1:8265");
/// assert_eq!(address.to_string(), "ray://10.0.0.1:10001 (env.yaml:3)");
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RayAddress {
    written: String,
    source: String,
    dashboard: String,
}

impl RayAddress {
    /// Parses an address. `source` says where it was given, for messages.
    ///
    /// # Errors
    /// `InvalidArgument` with the source and the forms.
    pub fn parse(written: &str, source: impl Into<String>) -> Result<Self> {
        Self::find(written, source.into(), &|name| std::env::var(name).ok())
    }

    /// Returns the address in `RAY_ADDRESS`, which every other source precedes.
    ///
    /// # Errors
    /// `InvalidArgument` if it is no address.
    pub fn of_environment() -> Result<Option<Self>> {
        match std::env::var("RAY_ADDRESS") {
            Ok(written) if !written.trim().is_empty() => Self::parse(&written, "RAY_ADDRESS").map(Some),
            _ => Ok(None),
        }
    }

    fn find(written: &str, source: String, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let text = written.trim();
        let wrong = |why: &str| {
            Error::invalid(format!("ray_head_node_address is '{written}', from {source}: {why}\n  fix: write {FORMS}"))
        };
        if text == "auto" {
            let names = ["RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"];
            let found = names.iter().find_map(|name| Some((name, environment(name).filter(|value| value != "auto")?)));
            let (name, value) = found.ok_or_else(|| wrong("neither RAY_API_SERVER_ADDRESS nor RAY_ADDRESS is set"))?;
            return Self::find(&value, format!("auto from {source}, {name}"), environment);
        }
        if text == LOCAL {
            let dashboard = format!("http://127.0.0.1:{DASHBOARD_PORT}");
            return Ok(Self { written: LOCAL.to_owned(), source, dashboard });
        }
        let dashboard = match text.split_once("://") {
            Some(("http" | "https", rest)) => {
                host_of(rest.trim_end_matches('/'))
                    .ok_or_else(|| wrong("it has no host, or more than a host and a port"))?;
                text.trim_end_matches('/').to_owned()
            }
            Some(("ray", rest)) => {
                let host = host_of(rest).ok_or_else(|| wrong("it has no host, or more than a host and a port"))?;
                format!("http://{host}:{DASHBOARD_PORT}")
            }
            Some((scheme, _)) => return Err(wrong(&format!("the scheme {scheme} is unknown"))),
            None => {
                let host = host_of(text).ok_or_else(|| wrong("it is not HOST or HOST:PORT"))?;
                format!("http://{host}:{DASHBOARD_PORT}")
            }
        };
        Endpoint::parse(&dashboard).map_err(|error| wrong(error.message()))?;
        Ok(Self { written: text.to_owned(), source, dashboard })
    }

    /// Uses this URL of the dashboard instead (`ray_dashboard_address`), for a cluster whose dashboard has another port or host.
    ///
    /// # Errors
    /// `InvalidArgument` unless it is an `http` or `https` URL of a host.
    pub fn with_dashboard(mut self, url: &str) -> Result<Self> {
        let url = url.trim().trim_end_matches('/');
        let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")).and_then(host_of);
        if self.is_local() && (!url.starts_with("http://") || !matches!(host, Some("127.0.0.1" | "localhost"))) {
            return Err(Error::invalid(format!(
                "ray_dashboard_address is '{url}', and ray_head_node_address is {LOCAL}, from {}\n  fix: write http://127.0.0.1:PORT, or leave it out",
                self.source
            )));
        }
        if host.is_none() {
            return Err(Error::invalid(format!(
                "ray_dashboard_address is '{url}'\n  fix: write a URL such as http://10.0.0.1:{DASHBOARD_PORT}"
            )));
        }
        url.clone_into(&mut self.dashboard);
        Ok(self)
    }

    /// Returns the address of a head of this machine.
    pub(super) fn of_local_head(cluster: &str, source: &str, dashboard_port: u16) -> Self {
        let dashboard = format!("http://127.0.0.1:{dashboard_port}");
        Self { written: cluster.to_owned(), source: format!("{LOCAL} from {source}"), dashboard }
    }

    /// Returns the address at which a driver on a node of the cluster connects: as written if that is `HOST:PORT`, and otherwise `auto`, for the cluster
    /// that the node belongs to.
    pub(super) fn cluster(&self) -> &str {
        let is_given = !self.written.contains("://") && host_of(&self.written).is_some_and(|host| host != self.written);
        if is_given { &self.written } else { "auto" }
    }

    /// Returns the port of the dashboard's URL.
    pub(super) fn dashboard_port(&self) -> u16 {
        let usual = if self.dashboard.starts_with("https:") { 443 } else { 80 };
        self.dashboard.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(usual)
    }

    /// Returns `true` for `local`: a head of this machine, which may have to be started first.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.written == LOCAL
    }

    /// Returns the address as it was written.
    #[must_use]
    pub fn written(&self) -> &str {
        &self.written
    }

    /// Returns where the address was given.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the URL of the cluster's dashboard, without a path.
    #[must_use]
    pub fn dashboard(&self) -> &str {
        &self.dashboard
    }
}

impl fmt::Display for RayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.written, self.source)
    }
}

/// Returns the host of `HOST`, `HOST:PORT`, or `[HOST]:PORT`.
fn host_of(text: &str) -> Option<&str> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (&text[..host.len() + 2], rest.strip_prefix(':').or((rest.is_empty()).then_some("1"))?),
        None => text.split_once(':').unwrap_or((text, "1")),
    };
    let inner = host.trim_start_matches('[').trim_end_matches(']');
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c) || (c == ':' && inner.len() < host.len());
    let valid = !inner.is_empty() && inner.chars().all(allowed) && port.parse::<u16>().is_ok_and(|port| port > 0);
    valid.then_some(host)
}

/// The token of a cluster with token authentication. It is never shown.
#[derive(Clone)]
pub(super) struct RayToken {
    pub(super) token: String,
    pub(super) source: String,
}

impl fmt::Debug for RayToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RayToken").field("source", &self.source).finish_non_exhaustive()
    }
}

/// The sources of a token, for errors.
pub(super) const TOKEN_SOURCES: &str = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token";

impl RayToken {
    /// Returns the token of this process, from where Ray itself takes it: `RAY_AUTH_TOKEN`, the file in `RAY_AUTH_TOKEN_PATH`, or `~/.ray/auth_token`.
    /// `RAY_AUTH_MODE=disabled` uses none, and `token` requires one.
    ///
    /// # Errors
    /// `FailedPrecondition` if a named file cannot be read, or a required token is missing.
    pub(super) fn find(environment: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let refused = |message: String| Error::not_started(Code::FailedPrecondition, message);
        let mode = environment("RAY_AUTH_MODE");
        if mode.as_deref() == Some("disabled") {
            return Ok(None);
        }
        let set = |name: &str| environment(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        if let Some(token) = set("RAY_AUTH_TOKEN") {
            return Ok(Some(Self { token, source: "RAY_AUTH_TOKEN".to_owned() }));
        }
        let named = set("RAY_AUTH_TOKEN_PATH").map(PathBuf::from);
        let path = named.clone().or_else(|| Some(PathBuf::from(set("HOME")?).join(".ray/auth_token")));
        match path.as_ref().map(|path| (path, std::fs::read_to_string(path))) {
            Some((path, Ok(text))) if !text.trim().is_empty() => {
                return Ok(Some(Self { token: text.trim().to_owned(), source: path.display().to_string() }));
            }
            Some((path, Err(error))) if named.is_some() => {
                return Err(refused(format!("RAY_AUTH_TOKEN_PATH: {} cannot be read: {error}", path.display())));
            }
            Some((path, Ok(_))) if named.is_some() => {
                return Err(refused(format!("RAY_AUTH_TOKEN_PATH: {} is empty", path.display())));
            }
            _ => {}
        }
        if mode.as_deref() == Some("token") {
            let message = format!(
                "RAY_AUTH_MODE is token, and there is none\n  fix: put the cluster's token into {TOKEN_SOURCES}"
            );
            return Err(refused(message));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_on_a_node_connects_at_the_port_that_is_written() {
        for (written, cluster) in [
            ("10.0.0.1:6379", "10.0.0.1:6379"),
            ("[::1]:6379", "[::1]:6379"),
            ("head", "auto"),
            ("ray://10.0.0.1:10001", "auto"),
            ("http://10.0.0.1:8265", "auto"),
        ] {
            assert_eq!(RayAddress::parse(written, "a test").unwrap().cluster(), cluster);
        }
        assert_eq!(RayAddress::of_local_head("127.0.0.1:6380", "a test", 8265).cluster(), "127.0.0.1:6380");
        assert_eq!(RayAddress::of_local_head("auto", "a test", 8265).cluster(), "auto");
    }

    fn find(written: &str, environment: &[(&str, &str)]) -> Result<RayAddress> {
        let environment =
            |name: &str| environment.iter().find_map(|(known, value)| (*known == name).then(|| (*value).to_owned()));
        RayAddress::find(written, "main.yaml:4".to_owned(), &environment)
    }

    #[test]
    fn every_form_of_an_address_leads_to_the_dashboard() {
        for (written, dashboard) in [
            ("ray://h.example:10001", "http://h.example:8265"),
            ("10.0.0.1:6379", "http://10.0.0.1:8265"),
            ("head", "http://head:8265"),
            ("[fd00::1]:6379", "http://[fd00::1]:8265"),
            ("http://h:9000/", "http://h:9000"),
            ("https://ray.example", "https://ray.example"),
            ("local", "http://127.0.0.1:8265"),
        ] {
            assert_eq!(find(written, &[]).unwrap().dashboard(), dashboard, "{written}");
        }
        let found = find("auto", &[("RAY_ADDRESS", "10.0.0.1:6379")]).unwrap();
        assert_eq!(found.to_string(), "10.0.0.1:6379 (auto from main.yaml:4, RAY_ADDRESS)");
        let both = [("RAY_ADDRESS", "a:6379"), ("RAY_API_SERVER_ADDRESS", "http://b:8265")];
        assert_eq!(find("auto", &both).unwrap().dashboard(), "http://b:8265");
    }

    #[test]
    fn what_is_no_address_is_rejected_with_its_source_and_the_forms() {
        for written in
            ["", "ray://", "ftp://h:1", "a b", "h:port", "h:0", "https://h/x", "http://", "auto", "h:1:2", "[fd00::1"]
        {
            let error = find(written, &[]).expect_err(written).to_string();
            assert!(error.contains("main.yaml:4") && error.contains("ray://HOST:10001"), "{written}: {error}");
        }
        let error = find("h", &[]).unwrap().with_dashboard("h:8265").unwrap_err().to_string();
        assert!(error.contains("ray_dashboard_address"), "{error}");
        assert_eq!(find("h", &[]).unwrap().with_dashboard("http://d:80/").unwrap().dashboard(), "http://d:80");
        let local = find("local", &[]).unwrap();
        let error = local.clone().with_dashboard("http://d:80").unwrap_err().to_string();
        assert!(error.contains("main.yaml:4") && error.contains("write http://127.0.0.1:PORT"), "{error}");
        assert_eq!(local.with_dashboard("http://127.0.0.1:9000").unwrap().dashboard(), "http://127.0.0.1:9000");
    }

    #[test]
    fn a_token_is_found_where_ray_looks_for_it_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "from-file\n").unwrap();
        std::fs::create_dir(folder.path().join(".ray")).unwrap();
        std::fs::write(folder.path().join(".ray/auth_token"), "from-home").unwrap();
        let (file, home) = (file.display().to_string(), folder.path().display().to_string());
        let find = |pairs: &[(&str, &str)]| {
            let pairs: Vec<(String, String)> = pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
            RayToken::find(&move |name: &str| {
                pairs.iter().find_map(|(known, value)| (known == name).then(|| value.clone()))
            })
        };
        let token = |pairs: &[(&str, &str)]| find(pairs).unwrap().map(|token| token.token);
        let all = [("RAY_AUTH_TOKEN", "direct"), ("RAY_AUTH_TOKEN_PATH", &*file), ("HOME", &*home)];
        assert_eq!(token(&all).as_deref(), Some("direct"));
        assert_eq!(token(&all[1..]).as_deref(), Some("from-file"));
        assert_eq!(token(&all[2..]).as_deref(), Some("from-home"));
        assert_eq!(token(&[]), None);
        assert_eq!(token(&[all[0], ("RAY_AUTH_MODE", "disabled")]), None);
        assert!(!format!("{:?}", find(&all).unwrap()).contains("direct"));
        let error = find(&[("RAY_AUTH_MODE", "token")]).unwrap_err().to_string();
        assert!(error.contains("RAY_AUTH_TOKEN_PATH"), "{error}");
        let error = find(&[("RAY_AUTH_TOKEN_PATH", "/no/such/file")]).unwrap_err().to_string();
        assert!(error.contains("/no/such/file cannot be read"), "{error}");
    }
}
