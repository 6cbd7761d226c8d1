//! Measurements of a transport: latency, rate, bandwidth, and CPU time while idle. They work with any connector.
//!
//! ```text
//!   Figures::of(connector, endpoint) ──► round_trips · rate · bandwidth · idle · waiting
//!                        │
//!              answering() served at the endpoint, best in another process
//! ```
//!
//! They use the real clock: run them in a release build, on an idle machine.

use std::collections::VecDeque;
use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use crate::base::error::{Code, Error, Result};
use crate::message::CallContext;
use crate::message::{Message, Request, Response, Status};
use crate::transport::Channel;
use crate::transport::{ConnectOptions, Connector, Endpoint};
use crate::transport::{Handler, handler_fn};

/// The route that echoes the message.
const ECHO: &str = "/figures/echo";
/// The route that responds without the segments.
const TAKE: &str = "/figures/take";
/// The route that responds 200 ms before the deadline.
const WAIT: &str = "/figures/wait";
/// The deadline of each call.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// The largest accepted response.
const REPLY_BYTES_MAX: usize = 2 << 30;
/// The head of a small call, of the size of a typed call's head.
const HEAD: &str = r#"{"method":"echo","args":{"step":17}}"#;

/// Returns the handler that the measurements call. Serve it at the endpoint.
#[must_use]
pub fn answering() -> impl Handler {
    handler_fn(|request: Request| async move {
        let message = match request.route.path() {
            ECHO => request.message,
            TAKE => Message::default(),
            WAIT => {
                let left = request.context.remaining();
                sleep(left.saturating_sub(Duration::from_millis(200))).await;
                Message::default()
            }
            other => return Err(Error::not_started(Code::NotFound, format!("the figures do not call {other}"))),
        };
        Ok(Response::new(Status::OK, message))
    })
}

/// Measurements over one channel.
#[derive(Clone, Debug)]
pub struct Figures {
    channel: Channel,
}

/// The latency of sequential calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundTrips {
    /// The median.
    pub p50: Duration,
    /// The 99th percentile.
    pub p99: Duration,
    /// The number of calls.
    pub calls: usize,
}

impl RoundTrips {
    /// Computes the percentiles of these times, in any order; zero without times.
    #[must_use]
    pub fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |share: usize| times.get(times.len() * share / 100).copied().unwrap_or_default();
        Self { p50: at(50), p99: at(99), calls: times.len() }
    }
}

impl Figures {
    /// Connects to the endpoint at which [`answering`] is served.
    ///
    /// # Errors
    /// The errors of the connector.
    pub async fn of(connector: &dyn Connector, to: &Endpoint) -> Result<Self> {
        Ok(Self::over(connector.connect(&CallContext::within(WAIT_TIMEOUT), to, &ConnectOptions::default()).await?))
    }

    /// Uses an open channel.
    #[must_use]
    pub fn over(channel: Channel) -> Self {
        Self { channel }
    }

    /// Returns the channel, for other measurements.
    #[must_use]
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Makes sequential calls for `lasting`, of which the first tenth is a warm-up. `segment` is sent and echoed.
    ///
    /// # Errors
    /// The error of the first call that fails; `DataLoss` if a response has another size than its request.
    pub async fn round_trips(&self, segment: Option<&Bytes>, lasting: Duration) -> Result<RoundTrips> {
        let began = Instant::now();
        // Allocated in advance, so that no call waits for its growth.
        let mut times = Vec::with_capacity(1 << 20);
        loop {
            let at = Instant::now();
            let answer = self.channel.call(request(ECHO, segment)).await?;
            let took = at.elapsed();
            if answer.message.segments.first().map(Bytes::len) != segment.map(Bytes::len) {
                return Err(Error::finished(Code::DataLoss, "the response has another size than the request"));
            }
            let since = began.elapsed();
            if since > lasting && !times.is_empty() {
                return Ok(RoundTrips::of(times));
            }
            if since > lasting / 10 {
                times.push(took);
            }
        }
    }

    /// Measures small calls per second, with `window` calls in flight.
    ///
    /// # Errors
    /// The error of the first call that fails.
    pub async fn rate(&self, window: usize, lasting: Duration) -> Result<f64> {
        let (began, mut replies, mut answered) = (Instant::now(), VecDeque::new(), 0_u32);
        while began.elapsed() < lasting || answered == 0 {
            while replies.len() < window.max(1) {
                replies.push_back(self.channel.start(request(ECHO, None)).await?);
            }
            // Half of the window at a time, so that calls start and end in bursts, as those of a worker group do.
            while replies.len() > window / 2 {
                let Some(reply) = replies.pop_front() else { break };
                reply.await?;
                answered += 1;
            }
        }
        Ok(f64::from(answered) / began.elapsed().as_secs_f64())
    }

    /// Measures bytes per second in one direction, with `window` calls of the same `segment` in flight. The first
    /// window is a warm-up.
    ///
    /// # Errors
    /// The error of the first call that fails.
    pub async fn bandwidth(&self, segment: &Bytes, window: usize, lasting: Duration) -> Result<f64> {
        let (window, mut replies) = (window.max(1), VecDeque::new());
        let (mut began, mut taken) = (Instant::now(), 0_usize);
        loop {
            while replies.len() < window {
                replies.push_back(self.channel.start(request(TAKE, Some(segment))).await?);
            }
            let Some(reply) = replies.pop_front() else { continue };
            reply.await?;
            taken += 1;
            if taken == window {
                began = Instant::now();
            }
            if taken > window && began.elapsed() > lasting {
                return Ok(((taken - window) * segment.len()) as f64 / began.elapsed().as_secs_f64());
            }
        }
    }

    /// Measures the CPU time per second without calls in flight, as a share of one core. `cpu` returns the CPU time so
    /// far of the measured processes.
    ///
    /// # Errors
    /// The error of the first call, which opens lazy connections.
    pub async fn idle(&self, lasting: Duration, cpu: impl FnMut() -> Duration) -> Result<f64> {
        self.channel.call(request(ECHO, None)).await?;
        Ok(used(cpu, sleep(lasting)).await.0)
    }

    /// Like [`Figures::idle`], with one call in flight, which ends after `lasting`.
    ///
    /// # Errors
    /// The error of that call.
    pub async fn waiting(&self, lasting: Duration, cpu: impl FnMut() -> Duration) -> Result<f64> {
        let mut waits = request(WAIT, None);
        waits.context.deadline = Instant::now() + lasting;
        let (share, answer) = used(cpu, self.channel.call(waits)).await;
        answer.map(|_| share)
    }
}

async fn used<T>(mut cpu: impl FnMut() -> Duration, meanwhile: impl Future<Output = T>) -> (f64, T) {
    let (before, began) = (cpu(), Instant::now());
    let done = meanwhile.await;
    ((cpu() - before).as_secs_f64() / began.elapsed().as_secs_f64(), done)
}

fn request(route: &'static str, segment: Option<&Bytes>) -> Request {
    let mut context = CallContext::within(WAIT_TIMEOUT);
    context.reply_bytes_max = REPLY_BYTES_MAX;
    let mut request = Request::post(context, route, HEAD);
    request.message.segments.extend(segment.cloned());
    request
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::base::cancel::CancelToken;

    use super::*;
    use crate::transport::Listener;
    use crate::transport::mem::InProcess;

    #[test]
    fn half_of_the_times_are_at_most_the_median() {
        let trips = RoundTrips::of((1..=200).rev().map(Duration::from_micros).collect());
        assert_eq!((trips.p50, trips.p99, trips.calls), (Duration::from_micros(101), Duration::from_micros(199), 200));
        assert_eq!(RoundTrips::of(Vec::new()).p99, Duration::ZERO);
    }

    #[tokio::test]
    async fn every_figure_can_be_taken_of_a_connector() {
        let transport = InProcess::new().faithful();
        let mut listener = transport.listen("figures").unwrap();
        let endpoint = listener.endpoints()[0].clone();
        let serving = tokio::spawn(async move {
            listener.accept().await.unwrap().serve(Arc::new(answering()), CancelToken::new()).await
        });
        let figures = Figures::of(&transport, &endpoint).await.unwrap();
        let (short, segment) = (Duration::from_millis(5), Bytes::from(vec![7; 1 << 10]));
        assert!(figures.round_trips(Some(&segment), short).await.unwrap().calls > 0);
        assert!(figures.rate(8, short).await.unwrap() > 0.0);
        assert!(figures.bandwidth(&segment, 2, short).await.unwrap() > 0.0);
        let mut seconds = 0;
        let mut clock = move || {
            seconds += 1;
            Duration::from_secs(3_600 * seconds)
        };
        assert!(figures.idle(short, &mut clock).await.unwrap() > 1.0, "an hour of work in a few milliseconds");
        assert!(figures.waiting(short, clock).await.unwrap() > 1.0);
        serving.abort();
    }
}
