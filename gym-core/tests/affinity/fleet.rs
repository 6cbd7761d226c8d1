//! A collector that plays a trace with a bounded window of sessions over simulated engines.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use gym_core::registry::{Affinity, AffinityCounts, AffinityKey, AffinityOptions, Balance, Load, Picker};

use crate::engine::{Call, Engine, EngineSpec, PrefixCache};
use crate::trace::Session;

/// The sessions in flight.
const WINDOW: usize = 384;

/// How a call is sent to an engine.
#[derive(Debug)]
pub(crate) enum Policy {
    /// Session affinity with a load guard.
    Affinity(Affinity),
    /// Consistent hashing of the session. Without joins and leaves, each form of it is one hash.
    HashOfSession,
    /// Consistent hashing of the task's prompt.
    HashOfPrompt,
    /// A rule that looks at the load only.
    Load(Picker),
}

impl Policy {
    pub(crate) fn affinity() -> Self {
        Self::Affinity(Affinity::new(AffinityOptions::default()))
    }

    pub(crate) fn of(balance: Balance) -> Self {
        Self::Load(Picker::new(balance))
    }

    fn pick(&self, session: usize, prompt: u32, open: &[Load]) -> usize {
        let hashed = |key: (&str, u64)| {
            let score = |load: &&Load| {
                let mut hasher = DefaultHasher::new();
                (key, load.index).hash(&mut hasher);
                hasher.finish()
            };
            open.iter().max_by_key(score).expect("an engine").index
        };
        match self {
            Self::HashOfSession => hashed(("session", session as u64)),
            Self::HashOfPrompt => hashed(("prompt", u64::from(prompt))),
            Self::Load(picker) => picker.pick(open).expect("an engine"),
            Self::Affinity(affinity) => {
                let key = AffinityKey::of_session(&session.to_string());
                let prompt = || Some(AffinityKey::of_prompt([&prompt.to_le_bytes()[..]]));
                affinity.pick(Some(key), prompt, open).expect("an engine")
            }
        }
    }
}

/// What a run shows.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) makespan_s: f64,
    pub(crate) hit_tokens: u64,
    pub p99_s: f64,
    /// The longest time that an engine was busy, relative to the mean.
    pub(crate) busy_skew: f64,
    /// The mean over all calls of the most calls at one engine, relative to the mean of all engines.
    pub(crate) pending_skew: f64,
    pub(crate) counts: AffinityCounts,
    pub(crate) calls: usize,
}

/// A session that begins its next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Wake {
    at_us: u64,
    session: usize,
}

/// Returns the hits of one cache without a bound, which sees the calls of one session after another.
pub(crate) fn hits_of_one_unbounded_cache(sessions: &[Session]) -> u64 {
    let mut cache = PrefixCache::new(u64::MAX);
    let mut hits = 0;
    for (index, session) in sessions.iter().enumerate() {
        let mut own = 0;
        for turn in 0..session.turns.len() {
            let call = call(index, session, turn, &mut own);
            hits += u64::from(cache.admit(&call).expect("it has no bound"));
            cache.release(&call);
        }
    }
    hits
}

/// Returns the call of a turn. `own` is what the session has added to its prompt, and grows.
fn call(index: usize, session: &Session, turn: usize, own: &mut u32) -> Call {
    let at = session.turns[turn];
    let own_tokens = *own + at.new_tokens;
    *own = own_tokens + at.output_tokens;
    Call {
        session: index,
        prompt: session.prompt,
        prompt_tokens: session.prompt_tokens,
        own_tokens,
        output_tokens: at.output_tokens,
    }
}

/// Plays a trace. `away` is an engine that cannot be chosen from the first to the second time, in seconds.
pub(crate) fn play(
    sessions: &[Session],
    specs: &[EngineSpec],
    policy: &Policy,
    away: Option<(usize, f64, f64)>,
) -> Outcome {
    let mut engines: Vec<_> = specs.iter().map(|spec| Engine::new(*spec)).collect();
    let mut wakes = BTreeSet::new();
    let mut turns = vec![0; sessions.len()];
    let mut own = vec![0; sessions.len()];
    let mut began = vec![0.0; sessions.len()];
    let mut latencies = Vec::new();
    let mut unstarted: VecDeque<usize> = (0..sessions.len()).collect();
    let micros = |seconds: f64| (seconds * 1e6).round() as u64;
    for session in unstarted.drain(..WINDOW.min(sessions.len())) {
        wakes.insert(Wake { at_us: 0, session });
    }
    let (mut now, mut skews) = (0.0_f64, 0.0_f64);
    // Only the engines of which it changes: to ask each engine at each event takes ten times as long.
    let mut nexts = vec![None; engines.len()];
    loop {
        let next = nexts.iter().enumerate().filter_map(|(index, at)| Some(((*at)?, index)));
        let next = next.min_by(|one: &(f64, usize), other| one.0.total_cmp(&other.0));
        let wake = wakes.first().map(|wake| wake.at_us as f64 / 1e6);
        let index = match (next, wake) {
            (None, None) => break,
            (Some((at, index)), wake) if wake.is_none_or(|wake| at <= wake) => {
                now = now.max(at);
                index
            }
            _ => {
                let Wake { at_us, session } = wakes.pop_first().expect("one is due");
                now = now.max(at_us as f64 / 1e6);
                let is_away = |index| away.is_some_and(|(of, from, to)| of == index && (from..to).contains(&now));
                let loads = engines.iter().enumerate().map(|(index, one)| Load { index, pending: one.pending() });
                let open: Vec<_> = loads.filter(|load| !is_away(load.index)).collect();
                let chosen = policy.pick(session, sessions[session].prompt, &open);
                let call = call(session, &sessions[session], turns[session], &mut own[session]);
                began[session] = now;
                engines[chosen].submit(session, call);
                let pending = || engines.iter().map(Engine::pending);
                let total: usize = pending().sum();
                skews += pending().max().expect("an engine") as f64 * engines.len() as f64 / total as f64;
                chosen
            }
        };
        for session in engines[index].advance(now) {
            latencies.push(now - began[session]);
            let think = f64::from(sessions[session].turns[turns[session]].think_ms) / 1e3;
            turns[session] += 1;
            if turns[session] < sessions[session].turns.len() {
                wakes.insert(Wake { at_us: micros(now + think), session });
            } else if let Some(session) = unstarted.pop_front() {
                wakes.insert(Wake { at_us: micros(now), session });
            }
        }
        nexts[index] = engines[index].next();
    }
    latencies.sort_by(f64::total_cmp);
    let busy = || engines.iter().map(|engine| engine.busy_s);
    Outcome {
        makespan_s: now,
        hit_tokens: engines.iter().map(|engine| engine.hit_tokens).sum(),
        p99_s: latencies[latencies.len() * 99 / 100],
        busy_skew: busy().fold(0.0, f64::max) * engines.len() as f64 / busy().sum::<f64>(),
        pending_skew: skews / latencies.len() as f64,
        counts: if let Policy::Affinity(affinity) = policy { affinity.counts() } else { AffinityCounts::default() },
        calls: latencies.len(),
    }
}
