//! A value that is serialized on demand, so that a call within one process serializes nothing.
//!
//! The first request for the text serializes the value and keeps the text. A reader that knows the type takes the value itself.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

/// A value, its serializer, and its text once it is serialized.
struct Lazy<T> {
    value: T,
    write: fn(&T) -> Bytes,
    text: OnceLock<Bytes>,
}

/// A [`Lazy`] of any type.
trait AnyLazy: Any + Send + Sync {
    fn text(&self) -> &Bytes;
    fn value(&self) -> &dyn Any;
    /// Moves the value into an `Option<T>` of its type, unless another clone is alive.
    fn move_into(self: Arc<Self>, target: &mut dyn Any) -> Result<(), Arc<dyn AnyLazy>>;
}

impl<T: Send + Sync + 'static> AnyLazy for Lazy<T> {
    fn text(&self) -> &Bytes {
        self.text.get_or_init(|| (self.write)(&self.value))
    }

    fn value(&self) -> &dyn Any {
        &self.value
    }

    fn move_into(self: Arc<Self>, target: &mut dyn Any) -> Result<(), Arc<dyn AnyLazy>> {
        let Some(target) = target.downcast_mut::<Option<T>>() else { return Err(self) };
        *target = Some(Arc::try_unwrap(self).map_err(|shared| -> Arc<dyn AnyLazy> { shared })?.value);
        Ok(())
    }
}

/// The content of a [`Rope`](crate::Rope) that is not serialized yet. Cheap to clone; clones share the text.
#[derive(Clone)]
pub(crate) struct LazyValue(Arc<dyn AnyLazy>);

impl LazyValue {
    pub(crate) fn new<T: Send + Sync + 'static>(value: T, write: fn(&T) -> Bytes) -> Self {
        Self(Arc::new(Lazy { value, write, text: OnceLock::new() }))
    }

    pub(crate) fn text(&self) -> &Bytes {
        self.0.text()
    }

    pub(crate) fn value<T: 'static>(&self) -> Option<&T> {
        self.0.value().downcast_ref()
    }

    /// Returns the value, if it is a `T` and no other clone is alive.
    pub(crate) fn try_take<T: Send + Sync + 'static>(self) -> Result<T, Self> {
        let mut value: Option<T> = None;
        self.0.move_into(&mut value).map_err(Self)?;
        Ok(value.expect("a move that succeeds leaves the value"))
    }
}

impl fmt::Debug for LazyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LazyValue")
    }
}
