//! The host and port of an endpoint.

use std::sync::Arc;

use gym_core::{Endpoint, Error, Result};
use http::Uri;

/// Host and port of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// Parses host, port and the prefix of every route from an endpoint.
pub(crate) fn parse(to: &Endpoint, scheme: &str) -> Result<(HostPort, Arc<str>)> {
    let wrong = |why: &str| Error::invalid(format!("`{to}` {why}; write {scheme}://host:port"));
    if to.scheme() != scheme {
        return Err(wrong("is not an HTTP endpoint"));
    }
    let (authority, prefix) = match to.address().find('/') {
        Some(slash) => to.address().split_at(slash),
        None => (to.address(), ""),
    };
    let authority: http::uri::Authority = authority.parse().map_err(|_| wrong("has no valid host and port"))?;
    if authority.as_str().contains('@') {
        return Err(wrong("has a user name, which is not sent"));
    }
    if prefix.contains(['?', '#']) {
        return Err(wrong("has a query"));
    }
    if !prefix.is_empty() && Uri::try_from(prefix).is_err() {
        return Err(wrong("has a path that HTTP cannot send"));
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    let port = match authority.port_u16() {
        Some(port) => port,
        None if authority.as_str() == authority.host() => 80,
        None => return Err(wrong("has no valid port")),
    };
    Ok((HostPort { host, port }, prefix.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(String, u16, String)> {
        let (address, prefix) = parse(&Endpoint::parse(text)?, "http")?;
        Ok((address.host, address.port, prefix.to_string()))
    }

    #[test]
    fn an_endpoint_is_host_port_and_prefix() {
        assert_eq!(parsed("http://a:1").unwrap(), ("a".into(), 1, String::new()));
        assert_eq!(parsed("http://a/x/y/").unwrap(), ("a".into(), 80, "/x/y".into()));
        assert_eq!(parsed("http://[::1]:2").unwrap(), ("::1".into(), 2, String::new()));
    }

    #[test]
    fn a_wrong_endpoint_is_named() {
        for text in [
            "https://a:1",
            "http://a:b",
            "http://u@a:1",
            "http://a:1/x?y",
            "http://a b",
            "http://a:1/x y",
            "http://a:1/x\r\ny: z",
        ] {
            let error = parsed(text).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
