//! A simulated inference engine: continuous batching, and a prefix cache of bounded tokens that forgets the least recently used.
//!
//! The model is that of vLLM with prefix caching: a request's blocks are in the cache from its admission on, those of running requests
//! stay, and a prefix is forgotten from its end.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

use crate::trace::SYSTEM_TOKENS;

const BLOCK_TOKENS: u32 = 16;

/// The speed and the size of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineSpec {
    pub(crate) cache_tokens: u64,
    pub(crate) batch_max: usize,
    pub(crate) prefill_tokens_per_s: f64,
    /// The time of a step with one sequence, and of each further one.
    pub(crate) step_ms: f64,
    pub(crate) step_ms_each: f64,
    /// All times are multiplied by this.
    pub(crate) slowness: f64,
}

impl EngineSpec {
    /// About a 30B model on one H100.
    pub(crate) const STANDARD: Self = Self {
        cache_tokens: 262_144,
        batch_max: 64,
        prefill_tokens_per_s: 8_000.0,
        step_ms: 12.0,
        step_ms_each: 0.25,
        slowness: 1.0,
    };
}

/// A request: the prompt is the system prompt, the prompt of the task, and what the session has added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) session: usize,
    pub(crate) prompt: u32,
    pub(crate) prompt_tokens: u32,
    /// The tokens after the prompt of the task.
    pub(crate) own_tokens: u32,
    pub(crate) output_tokens: u32,
}

impl Call {
    fn path(&self) -> [(Node, u32); 3] {
        [
            (Node::System, SYSTEM_TOKENS),
            (Node::Prompt(self.prompt), self.prompt_tokens),
            (Node::Session(self.session), self.own_tokens),
        ]
    }

    /// The tokens of the request.
    pub(crate) fn request_tokens(&self) -> u32 {
        self.path().iter().map(|(_, tokens)| tokens).sum()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Node {
    System,
    Prompt(u32),
    Session(usize),
}

#[derive(Debug, Default)]
struct Entry {
    tokens: u32,
    used: u64,
    running: usize,
}

/// The prefixes in the memory of an engine.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    tokens_max: u64,
    tokens: u64,
    entries: HashMap<Node, Entry>,
    by_use: BTreeMap<u64, Node>,
    clock: u64,
}

impl PrefixCache {
    pub(crate) fn new(tokens_max: u64) -> Self {
        Self { tokens_max, tokens: 0, entries: HashMap::new(), by_use: BTreeMap::new(), clock: 0 }
    }

    /// Returns the tokens of the request that need not be processed, and keeps its blocks until [`PrefixCache::release`]. Returns
    /// `None` if the running requests leave no room.
    pub(crate) fn admit(&mut self, call: &Call) -> Option<u32> {
        let path = call.path();
        let mut hit = 0;
        for (node, tokens) in path {
            let cached = self.entries.get(&node).map_or(0, |entry| entry.tokens.min(tokens));
            hit += cached;
            if cached < tokens {
                break;
            }
        }
        // The last token is always processed: its output begins the response.
        let hit = (hit / BLOCK_TOKENS * BLOCK_TOKENS).min(call.request_tokens() - 1);
        let full = path.map(|(node, tokens)| match node {
            Node::Session(_) => (node, tokens + call.output_tokens),
            _ => (node, tokens),
        });
        let before = self.tokens;
        // The parents last, so that they are forgotten after their continuations.
        for (node, tokens) in full.into_iter().rev() {
            self.clock += 1;
            let entry = self.entries.entry(node).or_default();
            self.by_use.remove(&entry.used);
            (entry.used, entry.running) = (self.clock, entry.running + 1);
            self.tokens += u64::from(tokens.saturating_sub(entry.tokens));
            entry.tokens = entry.tokens.max(tokens);
            self.by_use.insert(self.clock, node);
        }
        if self.forget() || before == 0 {
            return Some(hit);
        }
        self.release(call);
        self.forget();
        None
    }

    /// Allows the blocks of an ended request to be forgotten.
    pub(crate) fn release(&mut self, call: &Call) {
        for (node, _) in call.path() {
            self.entries.get_mut(&node).expect("a running request is cached").running -= 1;
        }
    }

    /// Forgets until the rest fits, and returns `true` if it does.
    fn forget(&mut self) -> bool {
        let mut forgotten = Vec::new();
        for (used, node) in &self.by_use {
            if self.tokens <= self.tokens_max {
                break;
            }
            let entry = self.entries.get_mut(node).expect("each used node is an entry");
            if entry.running == 0 {
                let over = u32::try_from(self.tokens - self.tokens_max).unwrap_or(u32::MAX);
                let cut = over.div_ceil(BLOCK_TOKENS).saturating_mul(BLOCK_TOKENS).min(entry.tokens);
                entry.tokens -= cut;
                self.tokens -= u64::from(cut);
                if entry.tokens == 0 {
                    forgotten.push(*used);
                }
            }
        }
        for used in forgotten {
            let node = self.by_use.remove(&used).expect("it was listed");
            self.entries.remove(&node);
        }
        self.tokens <= self.tokens_max
    }
}

/// A request at an engine. The number is that of the caller.
type Ticket = usize;

/// One engine. Time is in seconds.
#[derive(Debug)]
pub(crate) struct Engine {
    spec: EngineSpec,
    cache: PrefixCache,
    waiting: VecDeque<(Ticket, Call)>,
    prefill: Option<(Ticket, Call, f64)>,
    /// By the position at which they end. All advance by one token a step.
    running: BinaryHeap<Reverse<(u64, Ticket)>>,
    calls: HashMap<Ticket, Call>,
    /// The tokens that each sequence has generated since the engine started.
    position: f64,
    now: f64,
    pub(crate) hit_tokens: u64,
    pub(crate) busy_s: f64,
}

impl Engine {
    pub(crate) fn new(spec: EngineSpec) -> Self {
        Self {
            spec,
            cache: PrefixCache::new(spec.cache_tokens),
            waiting: VecDeque::new(),
            prefill: None,
            running: BinaryHeap::new(),
            calls: HashMap::new(),
            position: 0.0,
            now: 0.0,
            hit_tokens: 0,
            busy_s: 0.0,
        }
    }

    pub(crate) fn pending(&self) -> usize {
        self.waiting.len() + usize::from(self.prefill.is_some()) + self.running.len()
    }

    /// Adds a request. It begins with the next [`Engine::advance`], which follows at once.
    pub(crate) fn submit(&mut self, ticket: Ticket, call: Call) {
        self.waiting.push_back((ticket, call));
    }

    /// The tokens a second of each running sequence.
    fn speed(&self) -> f64 {
        let step_ms = self.spec.step_ms + self.spec.step_ms_each * self.running.len() as f64;
        // A step that also processes a part of a prompt takes about twice as long.
        let shared = if self.prefill.is_some() { 0.5 } else { 1.0 };
        1_000.0 / step_ms / self.spec.slowness * shared
    }

    /// The time of the next change, if nothing is submitted.
    pub(crate) fn next(&self) -> Option<f64> {
        let prefilled = self.prefill.as_ref().map(|(_, _, at)| *at);
        let ended =
            self.running.peek().map(|Reverse((end, _))| self.now + (*end as f64 - self.position) / self.speed());
        [prefilled, ended].into_iter().flatten().min_by(f64::total_cmp).map(|at| at.max(self.now))
    }

    /// Moves on to `now`, at most to [`Engine::next`], and returns the requests that have ended.
    pub(crate) fn advance(&mut self, now: f64) -> Vec<Ticket> {
        let passed = now - self.now;
        if self.prefill.is_some() || !self.running.is_empty() {
            self.busy_s += passed;
        }
        self.position += passed * self.speed();
        self.now = now;
        let mut ended = Vec::new();
        while let Some(Reverse((end, ticket))) = self.running.peek().copied()
            && end as f64 <= self.position + 1e-6
        {
            self.running.pop();
            let call = self.calls.remove(&ticket).expect("a running request is known");
            self.cache.release(&call);
            ended.push(ticket);
        }
        if let Some((ticket, call, at)) = self.prefill
            && at <= now
        {
            self.prefill = None;
            let end = (self.position + f64::from(call.output_tokens)).ceil() as u64;
            self.running.push(Reverse((end, ticket)));
            self.calls.insert(ticket, call);
        }
        self.start_prefill();
        ended
    }

    fn start_prefill(&mut self) {
        if self.prefill.is_some() || self.running.len() >= self.spec.batch_max {
            return;
        }
        let Some((_, call)) = self.waiting.front() else { return };
        let Some(hit) = self.cache.admit(call) else { return };
        let (ticket, call) = self.waiting.pop_front().expect("it was at the front");
        self.hit_tokens += u64::from(hit);
        let left = f64::from(call.request_tokens() - hit);
        let seconds = left / self.spec.prefill_tokens_per_s * self.spec.slowness;
        self.prefill = Some((ticket, call, self.now + seconds));
    }
}
