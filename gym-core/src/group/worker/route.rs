//! The path of a method, built and checked at compile time.

use std::marker::PhantomData;

use crate::group::worker::Method;
use crate::message::Route;

/// Path prefix of a worker's methods.
pub(crate) const PREFIX: &str = "/worker/";

/// Returns the route of a method, at which its worker takes calls: `/worker/NAME`.
#[must_use]
pub const fn route<M: Method>() -> Route {
    Route::from_static(Path::<M>::TEXT)
}

struct Path<M>(PhantomData<M>);

const PATH_BYTES_MAX: usize = PREFIX.len() + 100;

impl<M: Method> Path<M> {
    const BYTES: [u8; PATH_BYTES_MAX] = path(M::NAME);

    const TEXT: &'static str = {
        let (path, _) = Self::BYTES.split_at(PREFIX.len() + M::NAME.len());
        match str::from_utf8(path) {
            Ok(text) => text,
            Err(_) => panic!("a path of ASCII is UTF-8"),
        }
    };
}

const fn path(name: &str) -> [u8; PATH_BYTES_MAX] {
    let (prefix, name) = (PREFIX.as_bytes(), name.as_bytes());
    assert!(!name.is_empty(), "a method needs a NAME");
    assert!(prefix.len() + name.len() <= PATH_BYTES_MAX, "a method's NAME has at most 100 bytes");
    let mut path = [0; PATH_BYTES_MAX];
    let mut at = 0;
    while at < prefix.len() + name.len() {
        path[at] = if at < prefix.len() { prefix[at] } else { checked(name[at - prefix.len()]) };
        at += 1;
    }
    path
}

const fn checked(byte: u8) -> u8 {
    assert!(
        byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'),
        "a method's NAME has only letters, digits, `.`, `_` and `-`"
    );
    byte
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug)]
    struct Train;

    impl Method for Train {
        const NAME: &'static str = "policy.train_step-2";
        type Args = ();
        type Reply = ();
    }

    #[test]
    fn a_method_is_served_under_its_name() {
        assert_eq!(route::<Train>().as_str(), "/worker/policy.train_step-2");
    }
}
