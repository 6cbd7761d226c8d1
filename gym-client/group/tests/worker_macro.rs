//! What `worker!` declares: methods, their registration and their handlers.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use gym_group::prelude::*;

/// Arguments with the same visibility as the worker.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct By(u64);

struct Counter(u64);

worker! {
    /// Methods of the counter.
    impl Worker for Counter as counter {
        fn start(env: WorkerEnv, from: u64) -> Result<Self> {
            Ok(Self(from + u64::from(env.rank)))
        }
        exclusive async fn add(&mut self, _: &CallContext, call: Payload<By>) -> Result<Payload<u64>> {
            self.0 += call.value.0;
            Ok(self.0.into())
        }
        /// The count.
        shared(idempotent) async fn get(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<u64>> {
            Ok(self.0.into())
        }
    }
}

mod thread {
    use gym_group::prelude::{CallContext, Methods, Payload, Result, WorkerEnv, worker};

    /// Not `Send`: the worker stays on the thread of its rank.
    pub(crate) struct Local(std::rc::Rc<u64>);

    worker! {
        impl Worker for Local as pub(crate) local {
            fn start(_: WorkerEnv, (): ()) -> Result<Self> {
                Ok(Self(std::rc::Rc::new(7)))
            }
            blocking(idempotent) fn read(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<u64>> {
                Ok((*self.0).into())
            }
        }
    }

    #[test]
    fn the_macro_registers_each_method_once() {
        assert_eq!(format!("{:?}", Methods::<Local>::of()), r#"{"local.read"}"#);
    }
}

#[tokio::test]
async fn one_signature_declares_the_method_its_registration_and_its_handler() {
    let group = InProcessGroup::start::<Counter>("counters", RankLayout::line(2).unwrap(), 10).await.unwrap();
    assert_eq!(group.call(counter::add, By(5)).await.unwrap().into_values(), [15, 16]);
    assert_eq!(group.call(counter::get, ()).await.unwrap().into_values(), [15, 16]);
    assert_eq!((counter::add::NAME, counter::get::NAME), ("counter.add", "counter.get"));
    assert_eq!((counter::add::IDEMPOTENT, counter::get::IDEMPOTENT), (false, true));
}

#[tokio::test]
async fn a_blocking_worker_is_called_from_another_module() {
    let group = InProcessGroup::start::<thread::Local>("locals", RankLayout::line(2).unwrap(), ()).await.unwrap();
    assert_eq!(group.call(thread::local::read, ()).await.unwrap().into_values(), [7, 7]);
}
