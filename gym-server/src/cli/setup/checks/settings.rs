//! The settings of NCCL, UCX and Gloo as this process gets them: where each comes from, and what it hides.

use gym_client::transport::rdma::probe::machine::Machine;
use gym_client::transport::rdma::tuning;

/// Most settings that are printed one by one.
const SETTINGS_MAX: usize = 40;

/// A setting, with its source.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(in crate::cli) struct Setting {
    pub(in crate::cli) name: String,
    /// The value. Empty, if an empty variable hides the files.
    pub(in crate::cli) value: String,
    pub(in crate::cli) from: String,
    /// The values of other sources, which are not heard.
    pub(in crate::cli) hides: Vec<Hidden>,
}

/// A value that is not heard.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(in crate::cli) struct Hidden {
    pub(in crate::cli) from: String,
    pub(in crate::cli) value: String,
}

/// Returns the settings by name. What only describes an image is none.
pub(in crate::cli) fn settings(machine: &dyn Machine) -> Vec<Setting> {
    let of_nccl = tuning::explain(machine).into_iter().filter(|one| one.name != "NCCL_VERSION").map(|one| Setting {
        name: one.name,
        value: one.value,
        from: one.from,
        hides: one.hides.into_iter().map(|(from, value)| Hidden { from, value }).collect(),
    });
    let others = machine.variables().unwrap_or_default().into_iter();
    let others = others.filter(|(name, _)| ["UCX_", "GLOO_", "RCCL_"].iter().any(|prefix| name.starts_with(prefix)));
    // This program sets these, so that UCX leaves signals and memory functions alone.
    let own =
        |name: &str, value: &str| matches!(name, "UCX_HANDLE_ERRORS" | "UCX_MEM_MMAP_HOOK_MODE") && value == "none";
    let others = others.filter(|(name, value)| !own(name, value)).map(|(name, value)| Setting {
        name,
        value,
        from: "the environment".to_owned(),
        hides: Vec::new(),
    });
    of_nccl.chain(others).collect()
}

impl Setting {
    /// Returns `NCCL_IB_TC=106  the environment; hides 96 of /etc/nccl.conf:3`.
    pub(in crate::cli) fn text(&self) -> String {
        one_line(&format!("{}={}  {}", self.name, self.value.trim_end(), self.origin()))
    }

    /// Returns where the value comes from, and what it hides.
    pub(in crate::cli) fn origin(&self) -> String {
        let hidden =
            self.hides.iter().map(|hidden| format!("; hides `{}` of {}", hidden.value.trim_end(), hidden.from));
        let empty = if self.value.is_empty() { ", empty: the default holds" } else { "" };
        one_line(&format!("{}{empty}{}", self.from, hidden.collect::<String>()))
    }
}

/// A line of Windows, or a value of several lines, must not begin a line of its own.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// Returns a line for each setting.
pub(super) fn lines(machine: &dyn Machine) -> Vec<String> {
    let settings = settings(machine);
    let more = settings.len().checked_sub(SETTINGS_MAX).filter(|more| *more > 0);
    let shown = settings.iter().take(SETTINGS_MAX).map(|setting| format!("configuration: {}", setting.text()));
    shown
        .chain(more.map(|more| format!("configuration: {more} more settings; `config show --settings` prints all")))
        .collect()
}
