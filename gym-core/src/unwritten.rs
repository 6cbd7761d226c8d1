//! A message head that is still the value it will be written from, so that a call within one process writes nothing.
//!
//! Whoever asks for the text gets it: it is written on the first question and kept. Whoever knows the type takes the value.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

/// A value and how its text is made.
struct Unwritten<T> {
    value: T,
    write: fn(&T) -> Bytes,
    text: OnceLock<Bytes>,
}

/// An [`Unwritten`] of any type.
trait Head: Any + Send + Sync {
    fn text(&self) -> &Bytes;
    fn value(&self) -> &dyn Any;
    /// Puts the value into an `Option<T>` of its type, if nobody else holds it.
    fn move_into(self: Arc<Self>, place: &mut dyn Any) -> Result<(), Arc<dyn Head>>;
}

impl<T: Send + Sync + 'static> Head for Unwritten<T> {
    fn text(&self) -> &Bytes {
        self.text.get_or_init(|| (self.write)(&self.value))
    }

    fn value(&self) -> &dyn Any {
        &self.value
    }

    fn move_into(self: Arc<Self>, place: &mut dyn Any) -> Result<(), Arc<dyn Head>> {
        let Some(place) = place.downcast_mut::<Option<T>>() else { return Err(self) };
        *place = Some(Arc::try_unwrap(self).map_err(|shared| -> Arc<dyn Head> { shared })?.value);
        Ok(())
    }
}

/// The part of a [`Rope`](crate::Rope) that is not written yet. Cheap to clone; clones share the text.
#[derive(Clone)]
pub(crate) struct UnwrittenHead(Arc<dyn Head>);

impl UnwrittenHead {
    pub(crate) fn new<T: Send + Sync + 'static>(value: T, write: fn(&T) -> Bytes) -> Self {
        Self(Arc::new(Unwritten { value, write, text: OnceLock::new() }))
    }

    pub(crate) fn text(&self) -> &Bytes {
        self.0.text()
    }

    pub(crate) fn value<T: 'static>(&self) -> Option<&T> {
        self.0.value().downcast_ref()
    }

    /// The value, if it is a `T` and nobody else holds it.
    pub(crate) fn try_take<T: Send + Sync + 'static>(self) -> Result<T, Self> {
        let mut place: Option<T> = None;
        self.0.move_into(&mut place).map_err(Self)?;
        Ok(place.expect("what went well has put the value there"))
    }
}

impl fmt::Debug for UnwrittenHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnwrittenHead")
    }
}
