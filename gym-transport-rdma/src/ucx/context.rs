//! UCP context: the transports and devices in use.

use std::ffi::CString;
use std::rc::Rc;

use super::print::printed;
use super::status::Status;
use crate::sys::Library;
use crate::sys::ucp::*;

/// A UCP context. Closed when the last object that uses it is dropped.
pub(crate) struct Context {
    pub(super) library: &'static Library,
    pub(super) raw: ucp_context_h,
}

/// A rejected operation, and UCX's status.
pub(crate) type Refused = (String, Status);

impl Context {
    /// Opens a context. `settings` are named without `UCX_` and override the environment.
    ///
    /// # Errors
    /// The rejected setting or operation, and UCX's status.
    pub(crate) fn open(library: &'static Library, settings: &[(String, String)]) -> Result<Rc<Self>, Refused> {
        let api = &library.api;
        let check = |what: &dyn Fn() -> String, code| Status::check(library, code).map_err(|status| (what(), status));
        let mut config = std::ptr::null_mut();
        // SAFETY: null for prefix and file selects UCX_ and no file; `config` is a valid place for the result.
        let code = unsafe { (api.ucp_config_read)(std::ptr::null(), std::ptr::null(), &raw mut config) };
        check(&|| "read UCX's configuration".to_owned(), code)?;
        let set = || -> Result<Rc<Self>, Refused> {
            for (name, value) in settings {
                let refused = |code| check(&|| format!("set UCX_{name} to `{value}`"), code);
                let (Ok(name), Ok(value)) = (CString::new(name.as_str()), CString::new(value.as_str())) else {
                    return Err((format!("set UCX_{name} to `{value}`"), Status::new(library, UCS_ERR_INVALID_PARAM)));
                };
                // SAFETY: `config` was read above; both arguments are C strings, which UCX copies.
                refused(unsafe { (api.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) })?;
            }
            let params = ucp_params_t {
                field_mask: u64::from(UCP_PARAM_FIELD_FEATURES),
                features: u64::from(UCP_FEATURE_AM | UCP_FEATURE_WAKEUP),
                request_size: 0,
                request_init: None,
                request_cleanup: None,
                tag_sender_mask: 0,
                mt_workers_shared: 0,
                estimated_num_eps: 0,
                estimated_num_ppn: 0,
                name: std::ptr::null(),
            };
            let mut raw = std::ptr::null_mut();
            // SAFETY: parameters with their mask for this version, a valid configuration, and a place for the result.
            let code = unsafe {
                (api.ucp_init_version)(UCP_API_MAJOR, UCP_API_MINOR, &raw const params, config, &raw mut raw)
            };
            let chosen = || settings.iter().map(|(name, value)| format!(" UCX_{name}={value}")).collect::<String>();
            check(&|| format!("start UCX with{}", chosen()), code)?;
            Ok(Rc::new(Self { library, raw }))
        };
        let context = set();
        // SAFETY: read above and not used again.
        unsafe { (api.ucp_config_release)(config) };
        context
    }

    /// Returns UCX's description of the context, which lists its transports and devices.
    pub(crate) fn describe(&self) -> String {
        // SAFETY: a live context and an open stream.
        printed(|stream| unsafe { (self.library.api.ucp_context_print_info)(self.raw, stream) }).unwrap_or_default()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: workers and memory hold an `Rc` of the context, so none of them exists any more.
        unsafe { (self.library.api.ucp_cleanup)(self.raw) }
    }
}
