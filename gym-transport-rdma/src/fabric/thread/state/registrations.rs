//! Registrations of regions of the memory pool with UCX's devices.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::fabric::handle::command::FabricShared;
use crate::ucx::{Context, Memory, Status};

/// UCX copies shorter payloads anyway, so they need no registration.
const REGISTERED_FROM: usize = 4096;

/// Registers each region of the pool on first use, and drops the registration when the pool retires the region.
pub(crate) struct Registrations {
    context: Rc<Context>,
    shared: Arc<FabricShared>,
    /// Registrations by the start of the region.
    memory: BTreeMap<usize, Rc<Memory>>,
}

impl Registrations {
    pub(crate) fn new(context: Rc<Context>, shared: Arc<FabricShared>) -> Self {
        Self { context, shared, memory: BTreeMap::new() }
    }

    /// Returns the registration of a payload to send. Counts the payload if it lies outside the pool.
    pub(crate) fn of_payload(&mut self, payload: &[u8]) -> Option<Rc<Memory>> {
        let memory = self.of(payload);
        if memory.is_none() && payload.len() >= REGISTERED_FROM {
            self.shared.counters.bytes_unregistered.add(payload.len() as u64);
        }
        memory
    }

    /// Counts a payload that is sent over shared memory, which needs no registration, if it lies outside the pool.
    pub(crate) fn count(&self, payload: &[u8]) {
        if payload.len() >= REGISTERED_FROM && self.shared.pool.region_of(payload.as_ptr().addr()).is_none() {
            self.shared.counters.bytes_unregistered.add(payload.len() as u64);
        }
    }

    /// Returns the registration of the region that contains these bytes, and registers it on first use.
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
        // SAFETY: a region of the pool is unmapped only after `Pool::retired` returned it, or by `Pool::close`. `tidy`
        // drops its registration before the region, and `close` drops all registrations before it calls `Pool::close`.
        let new = match unsafe { Memory::register(&self.context, region.clone()) } {
            Ok(memory) => Rc::new(memory),
            Err(status) => return self.refused(&region, status),
        };
        self.memory.insert(region.start, Rc::clone(&new));
        Some(new)
    }

    fn refused(&self, region: &std::ops::Range<usize>, status: Status) -> Option<Rc<Memory>> {
        tracing::debug!(%status, bytes = region.len(), "memory registration failed");
        self.shared.counters.registrations_failed.add(1);
        None
    }

    /// Drops the registrations of regions that the pool has retired, and frees the regions.
    pub(crate) fn tidy(&mut self) {
        for region in self.shared.pool.retired() {
            self.memory.remove(&region.start());
            drop(region);
        }
    }

    /// Drops all registrations and closes the pool, after the worker was closed.
    pub(crate) fn close(self) {
        drop(self.memory);
        self.shared.pool.close();
        drop(self.context);
    }

    /// Leaks registrations and memory, because the worker could not be closed.
    pub(crate) fn leak(self) {
        std::mem::forget((self.memory, self.context, self.shared.pool.clone()));
    }
}
