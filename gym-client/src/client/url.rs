//! The URL of an HTTP server, and the redirects that stay on its host and port. Used for calls of servers by name, and for model endpoints.

use std::fmt;

use http::uri::Authority;

/// A URL `scheme://[user:password@]host[:port][/path]`.
#[derive(Clone, PartialEq, Eq)]
pub struct EndpointUrl {
    /// The scheme is https.
    pub https: bool,
    /// `user:password`, as written.
    pub credentials: Option<String>,
    /// `host[:port]` in lower case, without the default port of the scheme.
    pub authority: String,
    /// Path and query: empty, or starting with a slash.
    pub path: String,
}

impl fmt::Debug for EndpointUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without its credentials.
        write!(f, "{}{}", self.origin(), self.path)
    }
}

impl EndpointUrl {
    /// Parses a URL and drops its fragment.
    ///
    /// # Errors
    /// The problem of the text, without its credentials.
    pub fn parse(text: &str) -> Result<Self, String> {
        // A string that cannot be parsed may contain a password.
        let shown = if text.contains('@') { "the value" } else { text };
        let wrong = |why: &str| format!("`{shown}` {why}");
        let (scheme, rest) = text.trim().split_once("://").ok_or_else(|| wrong("is not a URL"))?;
        let (https, own_port) = match scheme.to_ascii_lowercase().as_str() {
            "http" => (false, 80),
            "https" => (true, 443),
            other => return Err(wrong(&format!("has the scheme `{other}`; only http and https can be called"))),
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (credentials, authority) = match authority.rsplit_once('@') {
            Some((credentials, authority)) => (Some(credentials.to_owned()), authority),
            None => (None, authority),
        };
        let authority: Authority = authority.parse().map_err(|_| wrong("has no valid host"))?;
        let host = authority.host().to_ascii_lowercase();
        let authority = match authority.port_u16() {
            Some(port) if port != own_port => format!("{host}:{port}"),
            Some(_) => host,
            None if authority.as_str() == authority.host() => host,
            None => return Err(wrong("has no valid port")),
        };
        let path = if path.starts_with('?') { format!("/{path}") } else { path.to_owned() };
        Ok(Self { https, credentials, authority, path })
    }

    fn scheme(&self) -> &'static str {
        if self.https { "https" } else { "http" }
    }

    /// Returns scheme, host and port.
    #[must_use]
    pub fn origin(&self) -> String {
        format!("{}://{}", self.scheme(), self.authority)
    }

    /// Resolves a redirect from the path `from` (RFC 3986, section 5.2). Returns its path and query if the target is on this host
    /// and port.
    #[must_use]
    pub fn redirected(&self, from: &str, reference: &str) -> Option<String> {
        let reference = reference.split('#').next().unwrap_or_default();
        let from = from.split('?').next().unwrap_or_default();
        let first = reference.split(['/', '?']).next().unwrap_or_default();
        let absolute = if first.contains(':') {
            Some(reference.to_owned())
        } else {
            reference.starts_with("//").then(|| format!("{}:{reference}", self.scheme()))
        };
        let target = match absolute {
            Some(url) => {
                let to = Self::parse(&url).ok().filter(|to| to.origin() == self.origin())?;
                if to.path.is_empty() { "/".to_owned() } else { to.path }
            }
            None if reference.is_empty() => from.to_owned(),
            None if reference.starts_with('/') => reference.to_owned(),
            None if reference.starts_with('?') => format!("{from}{reference}"),
            None => format!("{}/{reference}", from.rsplit_once('/').map_or("", |(folder, _)| folder)),
        };
        Some(without_dots(&target))
    }
}

/// Returns the path without `.` and `..` segments.
fn without_dots(target: &str) -> String {
    let (path, query) = target.split_at(target.find('?').unwrap_or(target.len()));
    let mut segments = Vec::new();
    let mut parts = path.split('/').skip(1).peekable();
    while let Some(segment) = parts.next() {
        let last = parts.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    segments.pop();
                }
                if last {
                    segments.push("");
                }
            }
            other => segments.push(other),
        }
    }
    format!("/{}{query}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_scheme_host_port_and_path() {
        let parts = |text| EndpointUrl::parse(text).map(|url| (url.origin(), url.path, url.credentials));
        let some = |origin: &str, path: &str| Ok((origin.to_owned(), path.to_owned(), None));
        assert_eq!(parts("http://127.0.0.1:8000/v1"), some("http://127.0.0.1:8000", "/v1"));
        assert_eq!(parts(" HTTP://Engine:80"), some("http://engine", ""));
        assert_eq!(parts("https://[::1]:443/v1?a=b#c"), some("https://[::1]", "/v1?a=b"));
        assert_eq!(parts("http://u:p@h/v1").unwrap().2.as_deref(), Some("u:p"));
    }

    #[test]
    fn what_is_no_url_is_named_without_its_password() {
        for (text, says) in [
            ("nonsense", "`nonsense` is not a URL"),
            ("ftp://x/v1", "scheme `ftp`"),
            ("http://", "no valid host"),
            ("http://a b/v1", "no valid host"),
            ("http://a:99999/v1", "no valid port"),
            ("http://user:pw@/v1", "`the value` has no valid host"),
        ] {
            let error = EndpointUrl::parse(text).err().unwrap();
            assert!(error.contains(says) && !error.contains("pw"), "{text}: {error}");
        }
    }

    #[test]
    fn a_redirect_is_read_against_the_path_that_was_asked() {
        let url = EndpointUrl::parse("http://h:1/v1").unwrap();
        for (reference, leads) in [
            ("/v1/responses/", Some("/v1/responses/")),
            ("http://H:1/x?y=z#f", Some("/x?y=z")),
            ("//h:1", Some("/")),
            ("other", Some("/v1/other")),
            ("../up/./here?q=../x", Some("/up/here?q=../x")),
            ("..", Some("/")),
            ("?again", Some("/v1/responses?again")),
            ("http://h:2/x", None),
            ("https://h:1/x", None),
            ("//stranger/x", None),
            ("mailto:a@b", None),
        ] {
            assert_eq!(url.redirected("/v1/responses?old", reference).as_deref(), leads, "{reference}");
        }
    }
}
