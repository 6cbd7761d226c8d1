//! A transport of your own beside ours: `cargo run --release --example own_transport`.
//!
//! Yours here is the in-process one behind a toll: it counts what passes. What moves bytes by itself implements `Link` too, or
//! builds on `gym_core::transport::mux`. The suite that every transport passes is `gym_core::testing::conformance::transport`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use gym_core::testing::figures::{Figures, answering};
use gym_core::transport::{ConnectOptions, Connector, InProcess, Link, Listener, PathInfo, Reply};
use gym_core::{CallContext, CancelToken, Channel, Endpoint, Error, Request, Result};

#[derive(Debug)]
struct Toll {
    road: InProcess,
    paid: Arc<AtomicU64>,
}

#[async_trait::async_trait]
impl Connector for Toll {
    fn scheme(&self) -> &'static str {
        "toll"
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        let beyond = Endpoint::parse(&format!("mem://{}", to.address()))?;
        let road = self.road.connect(cx, &beyond, options).await?;
        let path = PathInfo::new(self.scheme(), to.address(), road.path().ordered);
        Ok(Channel::new(TollLink { road, path, paid: Arc::clone(&self.paid) }))
    }
}

#[derive(Debug)]
struct TollLink {
    road: Channel,
    path: PathInfo,
    paid: Arc<AtomicU64>,
}

#[async_trait::async_trait]
impl Link for TollLink {
    async fn send(&self, request: Request) -> Result<Reply> {
        self.paid.fetch_add(request.message.len() as u64, Relaxed);
        self.road.start(request).await
    }

    fn path(&self) -> &PathInfo {
        &self.path
    }

    async fn closed(&self) -> Error {
        self.road.closed().await
    }

    async fn close(&self, grace: Duration) -> Result<()> {
        self.road.close(grace).await
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let road = InProcess::new().faithful();
    let mut listener = road.listen("figures")?;
    let serving =
        tokio::spawn(async move { listener.accept().await?.serve(Arc::new(answering()), CancelToken::new()).await });
    let toll = Toll { road, paid: Arc::default() };
    let figures = Figures::of(&toll, &Endpoint::parse("toll://figures")?).await?;

    let lasting = Duration::from_millis(500);
    let trips = figures.round_trips(None, lasting).await?;
    println!("round trip    p50 {:?}, p99 {:?}, of {} calls", trips.p50, trips.p99, trips.calls);
    println!("256 at a time {:.0} calls/s", figures.rate(256, lasting).await?);
    let segment = Bytes::from(vec![1; 1 << 20]);
    println!("1 MiB one way {:.1} GB/s", figures.bandwidth(&segment, 8, lasting).await? / 1e9);
    println!("toll          {} bytes", toll.paid.load(Relaxed));
    figures.channel().close(Duration::from_secs(5)).await?;
    serving.abort();
    Ok(())
}
