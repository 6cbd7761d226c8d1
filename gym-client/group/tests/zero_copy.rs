//! A batch is not copied on its way to the ranks and back: the test counts the bytes allocated during a call, and
//! compares the pointers at the receiver. It is the only test of its program, because the count covers the whole
//! process.

use std::alloc::System;
use std::time::Duration;

use gym_core::{CallContext, Result};
use gym_group::{
    Batch, Dispatch, Handles, InProcessGroup, Method, Methods, Payload, RankLayout, Tensor, Worker, WorkerEnv,
    WorkerGroupExt,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const MIB: usize = 1 << 20;

/// Returns the address of the shard's first byte, and the shard.
#[derive(Clone, Copy, Debug)]
struct Where;

impl Method for Where {
    const NAME: &'static str = "where";
    type Args = ();
    type Reply = usize;
}

struct Looker;

impl Worker for Looker {
    type Init = ();

    fn start(_: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self)
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Where);
    }
}

impl Handles<Where> for Looker {
    async fn handle(&mut self, _: &CallContext, call: Payload<()>) -> Result<Payload<usize>> {
        let address = call.batch.column("data")?.dense()?.bytes().as_ptr() as usize;
        Ok(Payload { value: address, batch: call.batch })
    }
}

#[tokio::test]
async fn a_batch_reaches_every_rank_and_comes_back_in_the_memory_it_was_made_in() {
    let layout = RankLayout::new([("data", 4), ("tensor", 2)]).unwrap();
    let group = InProcessGroup::start::<Looker>("lookers", layout, ()).await.unwrap();
    let batch = Batch::empty().with("data", Tensor::from_vec([64 * MIB], vec![1_u8; 64 * MIB]).unwrap()).unwrap();
    let start = batch.column("data").unwrap().dense().unwrap().bytes().as_ptr() as usize;

    let region = Region::new(ALLOCATOR);
    let dispatch = Dispatch::shard("data").replicate(["tensor"]);
    let answers =
        group.call(Where, ()).batch(batch).dispatch(dispatch).deadline(Duration::from_secs(60)).await.unwrap();
    let allocated = region.change();

    for reply in answers.replies() {
        let shard = start + (reply.rank as usize / 2) * 16 * MIB;
        assert_eq!(reply.value, shard, "rank {} reads the caller's memory", reply.rank);
        let back = reply.batch.column("data").unwrap().dense().unwrap().bytes();
        assert_eq!((back.as_ptr() as usize, back.len()), (shard, 16 * MIB), "and gives it back");
    }
    let most = allocated.bytes_allocated + allocated.bytes_reallocated.unsigned_abs();
    assert!(most < MIB, "{most} bytes were allocated during the call: {allocated:?}");
}
