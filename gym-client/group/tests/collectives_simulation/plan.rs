//! Derives from a seed what the ranks of a group call, and the faults between them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gym_core::testing::Faults;

use crate::script::{Operation, Script};

/// The schedule of a seed.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) world_size: u32,
    pub(crate) regime: Regime,
    pub(crate) network: Faults,
    pub(crate) steps: Vec<StepPlan>,
    /// The longest deadline of an operation, and that of a join.
    pub(crate) deadline: Duration,
    pub(crate) join: Duration,
    /// The supervisor tells the loss of a rank, and then its replacement; otherwise only the replacement.
    pub(crate) tells_losses: bool,
    /// How long it takes to notice a loss, and to replace the rank.
    pub(crate) notices: Duration,
    pub(crate) replaces: Duration,
    /// A new epoch comes after the faults. Otherwise the ranks meet again in the epoch in which they failed.
    pub(crate) renewed: bool,
}

/// How many faults there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Regime {
    /// No faults.
    Calm,
    /// One fault, and a network that loses nothing else.
    One,
    /// Several faults, and a network that loses messages.
    Many,
}

/// What the controller of the group asks for: all ranks meet along some axes, and play a script in each meeting.
#[derive(Clone, Debug)]
pub(crate) struct StepPlan {
    pub(crate) meetings: Vec<(Axis, Arc<Script>)>,
    /// The most transfers that a rank keeps before it awaits them.
    pub(crate) kept_max: usize,
    pub(crate) pause_ms: u64,
    /// Ranks give up their first joins, and join again.
    pub(crate) impatient: bool,
    pub(crate) faults: Vec<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    All,
    Data,
    Tensor,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    pub(crate) rank: u32,
    /// The other rank of a cut.
    pub(crate) other: u32,
    pub(crate) at: Duration,
    /// Ends with the step, if it does not end by itself.
    pub(crate) lasts: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    Crash,
    SilentCrash,
    /// The rank ends, and its host closes its peers.
    End,
    Freeze,
    Isolate,
    Mute,
    /// The way from the rank to the other one.
    Cut,
    Slow,
    /// Two ranks abort their meeting at the same time.
    Abort,
    /// The same while another rank, which may be the one that decides, stands still.
    AbortUnheard,
    /// The calls of a rank are cancelled.
    Cancel,
    /// A rank calls with another number of elements than the others.
    Differ,
}

impl FaultKind {
    const ALL: [Self; 12] = [
        Self::Crash,
        Self::SilentCrash,
        Self::End,
        Self::Freeze,
        Self::Isolate,
        Self::Mute,
        Self::Cut,
        Self::Slow,
        Self::Abort,
        Self::AbortUnheard,
        Self::Cancel,
        Self::Differ,
    ];

    /// Returns `true` if a rank of the group causes it, and not what is around it.
    pub(crate) fn is_of_program(self) -> bool {
        matches!(self, Self::Abort | Self::Cancel | Self::Differ)
    }

    /// Returns `true` if the rank has to be replaced.
    pub(crate) fn ends(self) -> bool {
        matches!(self, Self::Crash | Self::SilentCrash | Self::End)
    }
}

impl Plan {
    pub(crate) fn drawn(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0xc011_ec71_5eed);
        let millis = |rng: &mut fastrand::Rng, from, to| Duration::from_millis(rng.u64(from..=to));
        let world_size = rng.u32(2..=6);
        let regime = match rng.u8(..6) {
            0 => Regime::Calm,
            1..=3 => Regime::One,
            _ => Regime::Many,
        };
        let mut network = Faults::calm();
        network.delay_max = millis(&mut rng, 1, 4);
        network.connect_timeout = Duration::from_secs(1);
        if regime == Regime::Many {
            let mut chance = |max: f64| if rng.u8(..3) == 0 { max * rng.f64() } else { 0.0 };
            (network.loss_request, network.loss_reply) = (chance(0.05), chance(0.05));
            (network.reset, network.refuse_connect) = (chance(0.02), chance(0.3));
            network.corrupt = chance(0.01);
            (network.long_way, network.long_way_max) = (chance(0.05), millis(&mut rng, 10, 2_000));
            if rng.u8(..4) == 0 {
                network.partition_every = millis(&mut rng, 300, 5_000);
                network.partition_for = millis(&mut rng, 100, 3_000);
            }
        }
        let steps = rng.usize(2..=4);
        let faulty = rng.usize(..steps);
        let deadline = millis(&mut rng, 2_000, 4_000);
        let step = |at| {
            let faults = match regime {
                Regime::Calm => 0,
                Regime::One => usize::from(at == faulty),
                Regime::Many => rng.usize(..=3),
            };
            let mut step = StepPlan::drawn(&mut rng, world_size, faults, regime == Regime::One);
            // A rank that gives up when the others have met is a second fault.
            step.impatient &= regime != Regime::One;
            step
        };
        let mut steps: Vec<StepPlan> = (0..=steps).map(step).collect();
        let last = steps.last_mut().expect("a step");
        (last.impatient, last.faults) = (false, Vec::new());
        let silent = |fault: &Fault| fault.kind == FaultKind::SilentCrash;
        if steps.iter().flat_map(|step| &step.faults).any(silent) {
            network.silent_crash = if regime == Regime::One { 1.0 } else { 0.5 };
        }
        Self {
            seed,
            world_size,
            regime,
            network,
            steps,
            deadline,
            join: deadline * 2,
            tells_losses: rng.u8(..4) > 0,
            notices: millis(&mut rng, 1, 2_000),
            replaces: millis(&mut rng, 1, 1_000),
            renewed: rng.bool(),
        }
    }

    /// The shortest deadline of an operation.
    pub(crate) fn deadline_min(&self) -> Duration {
        self.deadline / 2
    }

    /// The step with the first fault.
    pub(crate) fn faulty(&self) -> usize {
        self.steps.iter().position(|step| !step.faults.is_empty()).unwrap_or(self.steps.len())
    }

    /// The axes of the group. Four and six ranks have two.
    pub(crate) fn axes(&self) -> Vec<(&'static str, u32)> {
        match self.world_size {
            4 | 6 => vec![("data", 2), ("tensor", self.world_size / 2)],
            ranks => vec![("data", ranks)],
        }
    }
}

impl StepPlan {
    fn drawn(rng: &mut fastrand::Rng, world_size: u32, faults: usize, lasting: bool) -> Self {
        let axes: &[Axis] = match (world_size, rng.u8(..4)) {
            (4 | 6, 0) => &[Axis::Data],
            (4 | 6, 1) => &[Axis::Tensor, Axis::Data],
            (4 | 6, 2) => &[Axis::All, Axis::Tensor],
            (_, 3) => &[Axis::Data, Axis::All],
            _ => &[Axis::All],
        };
        let ranks = |axis| match (axis, world_size) {
            (Axis::Data, 4 | 6) => 2,
            (Axis::Tensor, _) => world_size / 2,
            _ => world_size,
        };
        let meetings = axes
            .iter()
            .map(|axis| {
                let operations = rng.usize(1..=6);
                let script = (0..operations).map(|_| Operation::drawn(rng, ranks(*axis) as usize)).collect();
                (*axis, Arc::new(script))
            })
            .collect();
        let fault = |_| {
            let rank = rng.u32(..world_size);
            let other = (rank + rng.u32(1..world_size)) % world_size;
            let kind = FaultKind::ALL[rng.usize(..FaultKind::ALL.len())];
            let rank = if kind == FaultKind::AbortUnheard && rng.bool() { 0 } else { rank };
            let other = if rank == other { rank + 1 } else { other };
            let at = Duration::from_millis(rng.u64(..300) * rng.u64(..=1));
            let lasts = (!lasting || rng.bool()).then(|| Duration::from_millis(rng.u64(1..6_000)));
            Fault { kind, rank, other, at, lasts }
        };
        let mut faults: Vec<Fault> = (0..faults).map(fault).collect();
        // Ranks that all call with the same other number of elements do not differ.
        let differing = faults.iter().filter(|fault| fault.kind == FaultKind::Differ).count();
        faults.retain(|fault| fault.kind != FaultKind::Differ || differing == 1);
        Self { meetings, kept_max: rng.usize(..4), pause_ms: rng.u64(1..60), impatient: rng.u8(..4) == 0, faults }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { world_size, regime, network, deadline, join, .. } = self;
        writeln!(f, "{world_size} ranks, {regime:?}, deadline {deadline:?}, join {join:?}; network: {network}")?;
        let Self { tells_losses, notices, replaces, renewed, .. } = self;
        writeln!(f, "tells losses: {tells_losses}, notices {notices:?}, replaces {replaces:?}, renewed: {renewed}")?;
        for (number, step) in self.steps.iter().enumerate() {
            writeln!(
                f,
                "step {number}: keeps {}, pauses {} ms, impatient: {}",
                step.kept_max, step.pause_ms, step.impatient
            )?;
            for (axis, script) in &step.meetings {
                let calls: Vec<String> = script.iter().map(|operation| format!("{:?}", operation.kind)).collect();
                writeln!(f, "    {axis:?}: {}", calls.join(", "))?;
            }
            step.faults.iter().try_for_each(|fault| writeln!(f, "    {fault:?}"))?;
        }
        Ok(())
    }
}
