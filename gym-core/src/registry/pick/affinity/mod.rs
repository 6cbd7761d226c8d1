//! Session affinity with a load guard: the choice of a model replica whose prefix cache has the prompt.
//!
//! ```text
//!   session known? ── yes ─► its replica ─┐
//!        │ no                             ├─ within the bound? ── yes ─► hit
//!   prompt known?  ── yes ─► its replica ─┘          └── no ─► shed: this key alone moves
//!        └ no ─► the less loaded of two that the prompt's hash names
//! ```
//!
//! The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): no replica has more than
//! `1 + spread` times the mean of the calls in flight, plus a slack. Their ring is replaced by a map of recent keys, so that a key
//! stays where it is when its former replica has room again.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use parking_lot::Mutex;
use serde_json::value::RawValue;

use crate::message::RawObject;
use crate::registry::pick::Load;

/// The limits of an [`Affinity`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AffinityOptions {
    /// The share by which a replica may exceed the mean of the calls in flight. The default is 0.25.
    pub spread: f64,
    /// The calls in flight that a replica may have beyond that, but at most as many as the mean. The default is 4: a difference of
    /// some calls costs less than a prompt that another replica has to process again. At the end of a run, when few calls are in
    /// flight, the limit of the mean sends the last sessions of a slow replica to the idle ones: with one of 12 replicas four times
    /// as slow, the end of the simulated run comes after 210 s instead of 405 s.
    pub slack: usize,
    /// The maximum number of remembered keys, of sessions and prompts together. The default is 65,536, about 3 MB. A key is
    /// forgotten at the earliest after half as many other keys have been used.
    pub keys_max: usize,
}

impl Default for AffinityOptions {
    fn default() -> Self {
        Self { spread: 0.25, slack: 4, keys_max: 65_536 }
    }
}

impl AffinityOptions {
    /// Returns the maximum number of calls in flight at one of `replicas` replicas if one more call begins, and `pending` are in
    /// flight at all of them. At least one replica is below it.
    #[must_use]
    pub fn bound(&self, pending: usize, replicas: usize) -> usize {
        let mean = (pending + 1) as f64 / replicas.max(1) as f64;
        // Saturates, and 0 for a spread that is not a number: the mean is the least bound that some replica meets.
        let allowed = ((1.0 + self.spread) * mean).ceil().max(mean.ceil()) as usize;
        allowed.saturating_add(self.slack.min(mean as usize))
    }
}

/// Chooses the replica that a session or a prompt was sent to before, unless too many calls are in flight there.
#[derive(Debug, Default)]
pub struct Affinity {
    options: AffinityOptions,
    state: Mutex<AffinityState>,
}

#[derive(Debug, Default)]
struct AffinityState {
    keys: RecentKeys,
    counts: AffinityCounts,
}

/// The decisions of an [`Affinity`] so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct AffinityCounts {
    /// Calls that were sent to the replica of their session or prompt.
    pub hits: u64,
    /// Calls that were not, because too many calls were in flight there.
    pub sheds: u64,
    /// Calls that were not, because the replica could not be chosen: it has exited, or has rejected the call.
    pub lost: u64,
    /// Calls of sessions and prompts that were unknown.
    pub placed: u64,
    /// The most calls in flight at one replica, relative to the mean of all, at the last choice. 1 is even; 0 before the first choice.
    pub skew: f64,
}

impl AffinityCounts {
    /// Adds the decisions of another choice among the same replicas. The skew is the larger one.
    pub fn add(&mut self, other: &Self) {
        self.hits += other.hits;
        self.sheds += other.sheds;
        self.lost += other.lost;
        self.placed += other.placed;
        self.skew = self.skew.max(other.skew);
    }
}

/// The part of a message that tells whether the prompt ends with it.
#[derive(serde::Deserialize)]
struct PromptMessage<'a> {
    #[serde(default, borrow)]
    role: Option<std::borrow::Cow<'a, str>>,
}

/// The key of a session or of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AffinityKey(u64);

impl AffinityKey {
    /// Returns the key of a session.
    #[must_use]
    pub fn of_session(id: &str) -> Self {
        Self::of(&("session", id))
    }

    /// Returns the key of the prompt that a conversation begins with. The parts are hashed in order.
    #[must_use]
    pub fn of_prompt<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = DefaultHasher::new();
        "prompt".hash(&mut hasher);
        parts.into_iter().for_each(|part| part.hash(&mut hasher));
        Self(hasher.finish())
    }

    /// Returns the key of a session that has a number instead of an id.
    #[must_use]
    pub fn of_number(number: u64) -> Self {
        Self::of(&("number", number))
    }

    /// Returns the key of the prompt that a request to a model begins with: everything up to its first user message. Attempts at one
    /// task share it, and so do all turns of a conversation. `None` if the request has no messages.
    #[must_use]
    pub fn of_request(request: &RawObject) -> Option<Self> {
        let instructions = request.get("instructions").unwrap_or_default();
        let messages = request.get("input").or_else(|| request.get("messages"))?;
        if messages.first() == Some(&b'"') {
            return Some(Self::of_prompt([&instructions[..], &messages[..]]));
        }
        let messages: Vec<&RawValue> =
            serde_json::from_slice(&messages).ok().filter(|list: &Vec<_>| !list.is_empty())?;
        let first_user = messages.iter().position(|message| {
            serde_json::from_str(message.get()).is_ok_and(|PromptMessage { role }| role.as_deref() == Some("user"))
        });
        let prompt = &messages[..=first_user.unwrap_or(0)];
        let parts = prompt.iter().map(|message| message.get().as_bytes());
        Some(Self::of_prompt([&instructions[..]].into_iter().chain(parts)))
    }

    fn of(key: &impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        Self(hasher.finish())
    }

    /// Returns the rank of a replica for this key: rendezvous hashing. If a replica leaves, only its own keys get another one.
    fn score(self, index: usize) -> u64 {
        Self::of(&(self.0, index)).0
    }
}

impl Affinity {
    /// Creates a choice without known keys.
    #[must_use]
    pub fn new(options: AffinityOptions) -> Self {
        Self { options, state: Mutex::new(AffinityState::default()) }
    }

    /// Returns the decisions so far.
    #[must_use]
    pub fn counts(&self) -> AffinityCounts {
        self.state.lock().counts
    }

    /// Returns the number of known keys.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.state.lock().keys.len()
    }

    /// Records the replica of a session that was served while it was the only one. Has no effect if the session is known.
    pub fn remember(&self, session: AffinityKey, index: usize) {
        let keys = &mut self.state.lock().keys;
        if keys.get(session, self.options.keys_max).is_none() {
            keys.put(session, index, self.options.keys_max);
        }
    }

    /// Returns the index of the replica for a call of a session; `None` if there is no candidate.
    ///
    /// `prompt` is called only for an unknown session: it returns the key of the prompt that the conversation begins with, which
    /// the attempts at one task share. If both keys are missing, the less loaded of two replicas is chosen.
    ///
    /// The caller counts the call as pending before it chooses again. Otherwise the bound would not hold.
    #[must_use]
    pub fn pick(
        &self,
        session: Option<AffinityKey>,
        prompt: impl FnOnce() -> Option<AffinityKey>,
        open: &[Load],
    ) -> Option<usize> {
        // One replica leaves no choice, and what is known about the others stays true.
        if open.len() < 2 {
            return open.first().map(|only| only.index);
        }
        let pending = open.iter().map(|load| load.pending).sum();
        let bound = self.options.bound(pending, open.len());
        let mut state = self.state.lock();
        let known = session.and_then(|key| state.keys.get(key, self.options.keys_max));
        let chosen = match known {
            Some(home) => state.stay(home, open, bound).unwrap_or_else(|| {
                let key = session.expect("a known session has a key");
                less_loaded(key, open, bound)
            }),
            None => {
                let prompt = prompt();
                match prompt.and_then(|key| Some((key, state.keys.get(key, self.options.keys_max)?))) {
                    Some((key, home)) => state.stay(home, open, bound).unwrap_or_else(|| {
                        let gone = open.iter().all(|load| load.index != home);
                        let next = first_with_room(key, open, bound);
                        if gone {
                            state.keys.put(key, next, self.options.keys_max);
                        }
                        next
                    }),
                    None => {
                        state.counts.placed += 1;
                        // Without any key, a hash of the number of decisions takes turns.
                        let key = prompt.or(session).unwrap_or_else(|| AffinityKey::of(&state.counts.placed));
                        let chosen = less_loaded(key, open, bound);
                        if let Some(prompt) = prompt {
                            state.keys.put(prompt, chosen, self.options.keys_max);
                        }
                        chosen
                    }
                }
            }
        };
        if let Some(session) = session.filter(|_| known != Some(chosen)) {
            state.keys.put(session, chosen, self.options.keys_max);
        }
        state.counts.skew = skew(open, pending, chosen);
        Some(chosen)
    }
}

impl AffinityState {
    /// Returns `home` if it can be chosen and has room, and counts the decision.
    fn stay(&mut self, home: usize, open: &[Load], bound: usize) -> Option<usize> {
        let counts = &mut self.counts;
        match open.iter().find(|load| load.index == home) {
            Some(load) if load.pending < bound => {
                counts.hits += 1;
                return Some(home);
            }
            Some(_) => counts.sheds += 1,
            None => counts.lost += 1,
        }
        None
    }
}

/// Returns the less loaded of the first two replicas with room, in the order of the key's hash. A replica that is new or was away is
/// one of the two for at most a share of `2 / replicas` of the keys, however idle it is.
fn less_loaded(key: AffinityKey, open: &[Load], bound: usize) -> usize {
    let with_room = || open.iter().filter(|load| load.pending < bound);
    let first = with_room().max_by_key(|load| key.score(load.index));
    let second = with_room()
        .filter(|load| first.is_none_or(|first| first.index != load.index))
        .max_by_key(|load| key.score(load.index));
    let chosen = first.into_iter().chain(second).min_by_key(|load| load.pending);
    chosen.expect("the mean of the calls in flight is below the bound").index
}

/// Returns the first replica with room in the order of the key's hash. The sessions of one prompt that exceed the bound thus meet at
/// the same replica, and those of other prompts elsewhere.
fn first_with_room(key: AffinityKey, open: &[Load], bound: usize) -> usize {
    let with_room = open.iter().filter(|load| load.pending < bound);
    let chosen = with_room.max_by_key(|load| key.score(load.index));
    chosen.expect("the mean of the calls in flight is below the bound").index
}

/// Returns the ratio of the most calls in flight to their mean, if one more begins at `chosen`.
fn skew(open: &[Load], pending: usize, chosen: usize) -> f64 {
    let most = open.iter().map(|load| load.pending + usize::from(load.index == chosen)).max().unwrap_or(0);
    most as f64 * open.len() as f64 / (pending + 1) as f64
}

/// The replicas of recently used keys, in two generations: if the younger one is full, the older one is forgotten. An exact order of
/// use would need a list through all entries, and a key that was forgotten early costs one prompt.
#[derive(Debug, Default)]
struct RecentKeys {
    young: HashMap<AffinityKey, usize>,
    old: HashMap<AffinityKey, usize>,
}

impl RecentKeys {
    fn get(&mut self, key: AffinityKey, keys_max: usize) -> Option<usize> {
        if let Some(index) = self.young.get(&key) {
            return Some(*index);
        }
        let index = self.old.remove(&key)?;
        self.put(key, index, keys_max);
        Some(index)
    }

    fn put(&mut self, key: AffinityKey, index: usize, keys_max: usize) {
        if self.young.len() >= (keys_max / 2).max(1) && !self.young.contains_key(&key) {
            self.old = std::mem::take(&mut self.young);
        }
        self.old.remove(&key);
        self.young.insert(key, index);
    }

    fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests;
