//! A case: a setting and a seed, and what was changed of the seed's plan to explore further or to shrink a failure. It has a text, with which
//! it is replayed.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use gym_core::testing::Faults;

use crate::groups::GroupPlan;
use crate::plan::{Plan, Setting, WholePlan};
use crate::script::{Script, Step, normalized};
use crate::values::ValuesPlan;

/// One run of the simulation. Its text has the form `cluster/17@3200:8812/first/keep=0,3/calm=reset/tasks=1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) setting: Setting,
    pub(crate) seed: u64,
    /// From each time on, in milliseconds, the script and the randomness are those of another seed.
    pub(crate) branches: Vec<(u64, u64)>,
    /// The faults of the first plans only.
    pub(crate) first: bool,
    /// The steps that are kept of the script.
    pub(crate) keep: Option<Vec<usize>>,
    /// The faults of the network that are removed.
    pub(crate) calm: Vec<&'static str>,
    /// Sizes that are smaller.
    pub(crate) sizes: Vec<(&'static str, u32)>,
}

/// What is played.
#[derive(Clone, Debug)]
pub(crate) enum AnyPlan {
    Deployment(Plan),
    Group(GroupPlan),
    Whole(Box<WholePlan>),
    Values(ValuesPlan),
}

/// The name of a fault of a network, and what removes it.
pub(crate) type NetworkFault = (&'static str, fn(&mut Faults));

/// The faults of a network.
pub(crate) const NETWORK_FAULTS: [NetworkFault; 11] = [
    ("loss_request", |faults| faults.loss_request = 0.0),
    ("loss_reply", |faults| faults.loss_reply = 0.0),
    ("delay", |faults| faults.delay_max = faults.delay_max.min(Faults::calm().delay_max)),
    ("long_way", |faults| faults.long_way = 0.0),
    ("reorder", |faults| faults.reorder = 0.0),
    ("reset", |faults| faults.reset = 0.0),
    ("refuse", |faults| faults.refuse_connect = 0.0),
    ("partition", |faults| faults.partition_every = Duration::ZERO),
    ("silent_crash", |faults| faults.silent_crash = 0.0),
    ("corrupt", |faults| faults.corrupt = 0.0),
    ("duplicate", |faults| faults.duplicate = 0.0),
];

/// The sizes that can shrink.
pub(crate) const SIZES: [&str; 5] = ["tasks", "repeats", "steps", "concurrency", "callers"];

impl Case {
    pub(crate) fn new(setting: Setting, seed: u64) -> Self {
        let (branches, calm, sizes) = Default::default();
        Self { setting, seed, branches, first: false, keep: None, calm, sizes }
    }

    /// The same seed with the faults of the first plans only.
    pub(crate) fn first(setting: Setting, seed: u64) -> Self {
        Self { first: true, ..Self::new(setting, seed) }
    }

    /// The same until a time, and another seed from then on.
    pub(crate) fn branch(&self, at_ms: u64, seed: u64) -> Self {
        let mut branch = self.clone();
        branch.branches.retain(|(at, _)| *at < at_ms);
        branch.branches.push((at_ms, seed));
        branch
    }

    pub(crate) fn plan(&self) -> AnyPlan {
        let mut plan = AnyPlan::drawn(self.setting, self.seed, self.first);
        for (at_ms, seed) in &self.branches {
            let at = Duration::from_millis(*at_ms);
            let other = AnyPlan::drawn(self.setting, *seed, self.first);
            plan.change_script(|script| {
                script.retain(|(time, _)| *time < at);
                script.push((at, Step::Reseed(*seed)));
                script.extend(other.script().iter().filter(|(time, _)| *time >= at));
            });
        }
        if let Some(keep) = &self.keep {
            plan.change_script(|script| {
                let mut at = 0..;
                script.retain(|_| at.next().is_some_and(|at| keep.contains(&at)));
            });
        }
        for (name, remove) in NETWORK_FAULTS {
            if self.calm.contains(&name) {
                remove(plan.faults());
            }
        }
        for (name, size) in &self.sizes {
            if let Some(known) = plan.size(name) {
                *known = (*size).min(*known);
            }
        }
        plan
    }
}

impl AnyPlan {
    fn drawn(setting: Setting, seed: u64, first: bool) -> Self {
        match setting {
            Setting::Groups => {
                let plan = GroupPlan::drawn(seed);
                Self::Group(if first { plan } else { plan.with_additions() })
            }
            Setting::Servers | Setting::Cluster => {
                let plan = Plan::drawn(seed, setting);
                Self::Deployment(if first { plan } else { plan.with_additions() })
            }
            Setting::Whole => Self::Whole(Box::new(WholePlan::drawn(seed, first))),
            Setting::Values => Self::Values(ValuesPlan::drawn(seed)),
        }
    }

    pub(crate) fn script(&self) -> &Script {
        match self {
            Self::Deployment(plan) => &plan.script,
            Self::Group(plan) => &plan.script,
            Self::Whole(plan) => &plan.deployment.script,
            Self::Values(plan) => &plan.script,
        }
    }

    pub(crate) fn heals_at(&self) -> Duration {
        match self {
            Self::Deployment(plan) => plan.heals_at,
            Self::Group(plan) => plan.heals_at,
            Self::Whole(plan) => plan.deployment.heals_at,
            Self::Values(plan) => plan.heals_at,
        }
    }

    pub(crate) fn faults(&mut self) -> &mut Faults {
        match self {
            Self::Deployment(plan) => &mut plan.faults,
            Self::Group(plan) => &mut plan.faults,
            Self::Whole(plan) => &mut plan.deployment.faults,
            Self::Values(plan) => &mut plan.faults,
        }
    }

    pub(crate) fn size(&mut self, name: &str) -> Option<&mut u32> {
        let deployment = match self {
            Self::Deployment(plan) => plan,
            Self::Whole(plan) => &mut plan.deployment,
            Self::Group(plan) => return (name == "callers").then_some(&mut plan.callers),
            Self::Values(plan) => return (name == "callers").then_some(&mut plan.callers),
        };
        match name {
            "tasks" => Some(&mut deployment.tasks),
            "repeats" => Some(&mut deployment.repeats),
            "steps" => Some(&mut deployment.steps),
            "concurrency" => Some(&mut deployment.concurrency),
            _ => None,
        }
    }

    fn change_script(&mut self, change: impl FnOnce(&mut Script)) {
        let (hosts, heals_at) = (self.hosts(), self.heals_at());
        let script = match self {
            Self::Deployment(plan) => &mut plan.script,
            Self::Group(plan) => &mut plan.script,
            Self::Whole(plan) => &mut plan.deployment.script,
            Self::Values(plan) => &mut plan.script,
        };
        change(script);
        *script = normalized(std::mem::take(script), &hosts, heals_at);
    }

    fn hosts(&self) -> Vec<&'static str> {
        match self {
            Self::Deployment(plan) => plan.hosts(),
            Self::Group(plan) => plan.hosts(),
            Self::Whole(plan) => plan.hosts(),
            Self::Values(plan) => plan.processes(),
        }
    }
}

impl fmt::Display for AnyPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deployment(plan) => plan.fmt(f),
            Self::Group(plan) => plan.fmt(f),
            Self::Whole(plan) => plan.fmt(f),
            Self::Values(plan) => plan.fmt(f),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.setting, self.seed)?;
        self.branches.iter().try_for_each(|(at_ms, seed)| write!(f, "@{at_ms}:{seed}"))?;
        if self.first {
            f.write_str("/first")?;
        }
        if let Some(keep) = &self.keep {
            let keep: Vec<_> = keep.iter().map(usize::to_string).collect();
            write!(f, "/keep={}", keep.join(","))?;
        }
        if !self.calm.is_empty() {
            write!(f, "/calm={}", self.calm.join(","))?;
        }
        self.sizes.iter().try_for_each(|(name, size)| write!(f, "/{name}={size}"))
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split('/');
        let setting = parts.next().unwrap_or_default().parse()?;
        let seeds = parts.next().ok_or_else(|| format!("`{text}` has no seed; expected such as cluster/17"))?;
        let mut seeds = seeds.split('@');
        let mut case = Self::new(setting, number(seeds.next().unwrap_or_default())?);
        for branch in seeds {
            let (at_ms, seed) = branch
                .split_once(':')
                .ok_or_else(|| format!("`@{branch}` is no branch; expected such as @3200:8812"))?;
            case.branches.push((number(at_ms)?, number(seed)?));
        }
        for part in parts {
            match part.split_once('=').unwrap_or((part, "")) {
                ("first", "") => case.first = true,
                ("keep", steps) => {
                    let steps = steps.split(',').filter(|step| !step.is_empty()).map(number);
                    case.keep = Some(steps.collect::<Result<_, _>>()?);
                }
                ("calm", names) => case.calm = names.split(',').map(fault).collect::<Result<_, _>>()?,
                (name, size) => {
                    let name = SIZES.into_iter().find(|known| *known == name);
                    let name =
                        name.ok_or_else(|| format!("`{part}` is none of first, keep, calm, {}", SIZES.join(", ")))?;
                    case.sizes.push((name, number(size)?));
                }
            }
        }
        Ok(case)
    }
}

fn number<N: FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number"))
}

fn fault(name: &str) -> Result<&'static str, String> {
    let names = NETWORK_FAULTS.map(|(name, _)| name);
    names.into_iter().find(|known| *known == name).ok_or_else(|| format!("`{name}` is none of {}", names.join(", ")))
}
