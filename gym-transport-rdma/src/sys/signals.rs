//! Preserves signal handlers while a library is loaded.
//!
//! When it is loaded, Debian's UCX replaces the handlers of SIGSEGV, SIGBUS, SIGILL and SIGFPE, and thereby disables
//! Rust's message about a stack overflow.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use parking_lot::Mutex;

/// The kernel's signals. `sigaction` rejects the two that cannot be handled, so they are skipped.
const SIGNALS: std::ops::RangeInclusive<i32> = 1..=31;

/// Runs `change`, then restores the signal actions that it has changed, and returns these signals.
///
/// If another thread installs a handler meanwhile, that handler is lost, so load UCX before you install handlers.
pub(super) fn preserving<T>(change: impl FnOnce() -> T) -> (T, Vec<i32>) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let before: Vec<_> = SIGNALS.filter_map(|signal| Some((signal, action(signal)?))).collect();
    let result = change();
    let mut restored = Vec::new();
    for (signal, before) in before {
        if action(signal).is_some_and(|after| after.sa_sigaction != before.sa_sigaction) {
            // SAFETY: `before` is the action that sigaction itself returned for this signal, so it is valid.
            unsafe { libc::sigaction(signal, &raw const before, std::ptr::null_mut()) };
            restored.push(signal);
        }
    }
    (result, restored)
}

fn action(signal: i32) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::zeroed();
    // SAFETY: `action` is a valid place for one sigaction; with a null new action, the call only reads.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: filled by sigaction on success, and all zeros before, which is a valid value of the structure.
    (result == 0).then(|| unsafe { action.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_that_was_replaced_meanwhile_is_put_back() {
        // No other test here uses SIGUSR2.
        let ((), restored) = preserving(|| {
            let mut ignored = action(libc::SIGUSR2).unwrap();
            ignored.sa_sigaction = libc::SIG_IGN;
            // SAFETY: a valid action that ignores the signal.
            unsafe { libc::sigaction(libc::SIGUSR2, &raw const ignored, std::ptr::null_mut()) };
        });
        assert_eq!(restored, [libc::SIGUSR2]);
        assert_eq!(action(libc::SIGUSR2).unwrap().sa_sigaction, libc::SIG_DFL);
    }
}
