//! Signal actions, kept as they were around a load: Debian's UCX takes SIGSEGV, SIGBUS, SIGILL and SIGFPE when it is
//! loaded, and with them Rust's message about a stack overflow.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

/// The kernel's signals; the two that cannot be handled are refused by `sigaction` and so left out.
const SIGNALS: std::ops::RangeInclusive<i32> = 1..=31;

/// Runs `change`, then puts back the actions that are others since, and says of which signals. Another thread that
/// installs a handler in between loses it: load before you do.
pub(super) fn kept<T>(change: impl FnOnce() -> T) -> (T, Vec<i32>) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before: Vec<_> = SIGNALS.filter_map(|signal| Some((signal, action(signal)?))).collect();
    let result = change();
    let mut restored = Vec::new();
    for (signal, before) in before {
        if action(signal).is_some_and(|after| after.sa_sigaction != before.sa_sigaction) {
            // SAFETY: `before` is what sigaction itself reported for this signal, so it is valid to be set.
            unsafe { libc::sigaction(signal, &raw const before, std::ptr::null_mut()) };
            restored.push(signal);
        }
    }
    (result, restored)
}

fn action(signal: i32) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::zeroed();
    // SAFETY: `action` is a valid place for one sigaction; a null new action only reads.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: filled by sigaction on success, and all zeros before, which is a valid value of the structure.
    (result == 0).then(|| unsafe { action.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_that_was_replaced_meanwhile_is_put_back() {
        // Nothing else in these tests uses SIGUSR2.
        let ((), restored) = kept(|| {
            let mut ignored = action(libc::SIGUSR2).unwrap();
            ignored.sa_sigaction = libc::SIG_IGN;
            // SAFETY: a valid action that only ignores.
            unsafe { libc::sigaction(libc::SIGUSR2, &raw const ignored, std::ptr::null_mut()) };
        });
        assert_eq!(restored, [libc::SIGUSR2]);
        assert_eq!(action(libc::SIGUSR2).unwrap().sa_sigaction, libc::SIG_DFL);
    }
}
