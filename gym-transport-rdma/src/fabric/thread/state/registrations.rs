//! Registrations of regions of the memory pool with the devices.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::fabric::handle::command::FabricShared;
use crate::ucx::{Context, Memory, Status};

/// Shorter payloads are copied by UCX anyway, so how they are registered does not matter.
const REGISTERED_FROM: usize = 4096;

/// Registers each region of the pool when it is first used here, and forgets it when the pool gives it up.
pub(crate) struct Registrations {
    context: Rc<Context>,
    shared: Arc<FabricShared>,
    /// By the start of the region.
    memory: BTreeMap<usize, Rc<Memory>>,
}

impl Registrations {
    pub(crate) fn new(context: Rc<Context>, shared: Arc<FabricShared>) -> Self {
        Self { context, shared, memory: BTreeMap::new() }
    }

    /// What a payload that is to be sent is registered with; counted when it lies outside of the pool.
    pub(crate) fn of_payload(&mut self, payload: &[u8]) -> Option<Rc<Memory>> {
        let memory = self.of(payload);
        if memory.is_none() && payload.len() >= REGISTERED_FROM {
            self.shared.counters.bytes_unregistered.add(payload.len() as u64);
        }
        memory
    }

    /// A payload that goes over shared memory, which nothing need be registered for; counted as any.
    pub(crate) fn count(&self, payload: &[u8]) {
        if payload.len() >= REGISTERED_FROM && self.shared.pool.region_of(payload.as_ptr().addr()).is_none() {
            self.shared.counters.bytes_unregistered.add(payload.len() as u64);
        }
    }

    /// What these bytes are registered with.
    pub(crate) fn of(&mut self, bytes: &[u8]) -> Option<Rc<Memory>> {
        if bytes.len() < REGISTERED_FROM {
            return None;
        }
        let address = bytes.as_ptr().addr();
        let known = self.memory.range(..=address).next_back().map(|(_, known)| known);
        if let Some(known) = known.filter(|known| known.covers(bytes)) {
            return Some(Rc::clone(known));
        }
        let region = self.shared.pool.region_of(address)?;
        // SAFETY: a region of the pool is unmapped only after it came out of `Pool::retired` or by `Pool::close`; `tidy`
        // drops its registration before the region, and `forget_all` precedes the latter.
        let new = match unsafe { Memory::register(&self.context, region.clone()) } {
            Ok(memory) => Rc::new(memory),
            Err(status) => return self.refused(&region, status),
        };
        self.memory.insert(region.start, Rc::clone(&new));
        Some(new)
    }

    fn refused(&self, region: &std::ops::Range<usize>, status: Status) -> Option<Rc<Memory>> {
        tracing::debug!(%status, bytes = region.len(), "register memory");
        self.shared.counters.registrations_failed.add(1);
        None
    }

    /// Forgets what the pool has given up.
    pub(crate) fn tidy(&mut self) {
        for region in self.shared.pool.retired() {
            self.memory.remove(&region.start());
            drop(region);
        }
    }

    /// At the end, when the worker is gone: nothing is registered any more, and the pool keeps nothing any more.
    pub(crate) fn give_back(self) {
        drop(self.memory);
        self.shared.pool.close();
        drop(self.context);
    }

    /// At the end, when the worker could not be given back: registrations stay, and with them the memory.
    pub(crate) fn leak(self) {
        std::mem::forget((self.memory, self.context, self.shared.pool.clone()));
    }
}
