//! The cookies of one episode: names and values, which servers use to keep a session (RFC 6265, section 5).

use gym_core::Metadata;
use memchr::memchr;

/// Cookies by name, in the order in which they were first set.
///
/// ```
/// use gym_client::CookieJar;
/// use gym_core::Metadata;
///
/// // The response of a server that keeps a session.
/// let mut response = Metadata::new();
/// response.push("set-cookie", "session=abc; Path=/; HttpOnly");
/// let mut jar = CookieJar::new();
/// jar.merge(&response);
/// // The next request of the episode.
/// assert_eq!(jar.header().as_deref(), Some("session=abc"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CookieJar(Vec<(String, String)>);

impl CookieJar {
    /// Creates an empty jar.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the cookies of a request's `cookie` metadata.
    #[must_use]
    pub fn of_request(metadata: &Metadata) -> Self {
        let mut jar = Self::new();
        for header in metadata.all("cookie") {
            for pair in header.split(';') {
                if let Some((name, value)) = pair.split_once('=') {
                    jar.set(name.trim(), value.trim());
                }
            }
        }
        jar
    }

    /// Returns one cookie of a request's `cookie` metadata, the last of that name, without building a jar.
    #[must_use]
    pub fn find_in_request<'a>(metadata: &'a Metadata, name: &str) -> Option<&'a str> {
        let pairs = metadata.all("cookie").flat_map(|header| header.split(';'));
        let pairs = pairs.filter_map(|pair| pair.split_once('='));
        pairs.filter(|(known, _)| known.trim_ascii() == name).last().map(|(_, value)| value.trim_ascii())
    }

    /// Applies the `set-cookie` metadata of a response: sets cookies and removes expired ones.
    pub fn merge(&mut self, metadata: &Metadata) {
        for header in metadata.all("set-cookie") {
            let end = memchr(b';', header.as_bytes()).unwrap_or(header.len());
            let (pair, attributes) = header.split_at(end);
            let Some(equals) = memchr(b'=', pair.as_bytes()) else { continue };
            let (name, value) = (pair[..equals].trim_ascii(), pair[equals + 1..].trim_ascii());
            if is_expired(attributes.as_bytes()) {
                self.0.retain(|(known, _)| known != name);
            } else {
                self.set(name, value);
            }
        }
    }

    /// Sets one cookie.
    pub fn set(&mut self, name: &str, value: &str) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => value.clone_into(known),
            None => {
                // Most servers set one cookie.
                if self.0.is_empty() {
                    self.0.reserve_exact(1);
                }
                self.0.push((name.to_owned(), value.to_owned()));
            }
        }
    }

    /// Returns the value of a cookie.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns names and values, in the order in which they were first set.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Returns the value of a `cookie` header; `None` if the jar is empty.
    #[must_use]
    pub fn header(&self) -> Option<String> {
        let length = self.0.iter().map(|(name, value)| name.len() + value.len() + "=; ".len()).sum();
        let mut header = String::with_capacity(length);
        for (name, value) in &self.0 {
            if !header.is_empty() {
                header.push_str("; ");
            }
            header.push_str(name);
            header.push('=');
            header.push_str(value);
        }
        (!header.is_empty()).then_some(header)
    }
}

/// Returns `true` if one of the attributes, each after a semicolon, expires the cookie: a `Max-Age` of 0 or less.
fn is_expired(mut attributes: &[u8]) -> bool {
    while let Some(at) = memchr(b';', attributes) {
        attributes = attributes[at + 1..].trim_ascii_start();
        if let Some((name, age)) = attributes.split_at_checked(b"max-age=".len())
            && name.eq_ignore_ascii_case(b"max-age=")
            // Nearly every age begins with another digit, and needs no parser.
            && matches!(age.trim_ascii_start().first(), Some(b'0' | b'-' | b'+'))
        {
            let age = age[..memchr(b';', age).unwrap_or(age.len())].trim_ascii();
            let age = std::str::from_utf8(age).ok().and_then(|age| age.parse::<i64>().ok());
            if age.is_some_and(|age| age <= 0) {
                return true;
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_kept_over_answers_that_set_it_again_or_set_others() {
        let mut jar = CookieJar::new();
        let mut answer = Metadata::new();
        answer.push("set-cookie", "A___x=abc.def; path=/; Max-Age=1209600; httponly; samesite=lax");
        answer.push("set-cookie", "b=\"q v\"; Path=/");
        jar.merge(&answer);
        assert_eq!(jar.header().as_deref(), Some("A___x=abc.def; b=\"q v\""));
        let mut gone = Metadata::new();
        gone.push("set-cookie", "A___x=; Max-Age=0");
        jar.merge(&gone);
        assert_eq!(jar.header().as_deref(), Some("b=\"q v\""));
        let mut request = Metadata::new();
        request.push("cookie", "x=1; y=2");
        assert_eq!(CookieJar::of_request(&request).get("y"), Some("2"));
    }
}
