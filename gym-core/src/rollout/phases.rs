//! The phases of an episode, with their time.

use std::fmt;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::time::Instant;

/// Maximum calls that are written one by one: 32 turns with a tool call each, about 1 kB in a header.
const SPANS_MAX: usize = 64;
/// Usual bytes of the text of an episode with a few turns.
const TEXT_BYTES: usize = 128;
/// Maximum bytes of a text: each call has a phase and two numbers of 20 digits.
const TEXT_BYTES_MAX: usize = (SPANS_MAX + 4) * 52;

/// A phase of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Phase {
    /// The environment begins the episode.
    Seed,
    /// The model generates a response.
    Model,
    /// A tool or the environment takes its turn.
    Tool,
    /// The verifier scores the episode.
    Verify,
}

impl Phase {
    /// All phases, in the order of declaration.
    pub const ALL: [Self; 4] = [Self::Seed, Self::Model, Self::Tool, Self::Verify];

    /// Returns the name, as it is in rows: `model`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Seed => "seed",
            Self::Model => "model",
            Self::Tool => "tool",
            Self::Verify => "verify",
        }
    }

    fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.as_str() == name)
    }
}

/// One call of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseSpan {
    /// The purpose of the call.
    pub phase: Phase,
    /// Microseconds from the begin of the episode to the call.
    pub start_us: u64,
    /// Microseconds of the call.
    pub took_us: u64,
}

/// The calls of an episode in the order in which they ended. The sum of a phase is exact for any number of calls: after 64, one more span
/// for each phase has what the others took.
///
/// As JSON: a list of the calls, each with its phase and, in microseconds, its start and its duration:
/// `[{"phase":"seed","start_us":0,"took_us":310},{"phase":"model","start_us":402,"took_us":1200345}]`. As text, in metadata: `seed 0+310, model
/// 402+1200345`. It is kept as text, because each rollout pays for it, and only displays read it.
#[derive(Clone, Debug, Default)]
pub struct Phases {
    text: String,
    spans: usize,
    /// The spans that are not in the text.
    later: Vec<PhaseSpan>,
}

impl Phases {
    /// Adds a call that began at `call`, in an episode that began at `episode`, and has just ended.
    pub fn add(&mut self, phase: Phase, episode: Instant, call: Instant) {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let start_us = micros(call.saturating_duration_since(episode));
        self.push(PhaseSpan { phase, start_us, took_us: micros(call.elapsed()) });
    }

    pub(super) fn push(&mut self, span: PhaseSpan) {
        if self.spans < SPANS_MAX {
            if self.text.is_empty() {
                self.text.reserve(TEXT_BYTES);
            }
            self.spans += 1;
            span.write(&mut self.text);
            return;
        }
        match self.later.iter_mut().find(|later| later.phase == span.phase) {
            Some(later) => later.took_us = later.took_us.saturating_add(span.took_us),
            None => self.later.push(span),
        }
    }

    /// Returns `true` without calls.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Returns the calls.
    pub fn spans(&self) -> impl Iterator<Item = PhaseSpan> {
        self.text.split(", ").filter_map(PhaseSpan::parse).chain(self.later.iter().copied())
    }

    /// Returns the time of all calls of a phase.
    #[must_use]
    pub fn total(&self, phase: Phase) -> Duration {
        let of_phase = self.spans().filter(|span| span.phase == phase);
        Duration::from_micros(of_phase.fold(0, |sum, span| sum.saturating_add(span.took_us)))
    }

    /// Appends the text.
    pub(super) fn write(&self, text: &mut String) {
        text.push_str(&self.text);
        self.later.iter().for_each(|span| span.write(text));
    }

    /// Appends the JSON.
    pub(super) fn write_json(&self, text: &mut String) {
        let mut number = itoa::Buffer::new();
        text.push('[');
        for (at, span) in self.spans().enumerate() {
            text.push_str(if at == 0 { "{\"phase\":\"" } else { ",{\"phase\":\"" });
            text.push_str(span.phase.as_str());
            text.push_str("\",\"start_us\":");
            text.push_str(number.format(span.start_us));
            text.push_str(",\"took_us\":");
            text.push_str(number.format(span.took_us));
            text.push('}');
        }
        text.push(']');
    }

    /// Takes a text; `None` if it is too long or has characters that no such text has.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let usual = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b' ' | b',' | b'+');
        (text.len() <= TEXT_BYTES_MAX && text.bytes().all(usual)).then(|| Self {
            text: text.to_owned(),
            // Nothing is added to the record of another process.
            spans: SPANS_MAX,
            later: Vec::new(),
        })
    }
}

impl PhaseSpan {
    /// Appends the text, after a comma if it is not the first one.
    fn write(&self, text: &mut String) {
        let mut number = itoa::Buffer::new();
        text.push_str(if text.is_empty() { "" } else { ", " });
        text.push_str(self.phase.as_str());
        text.push(' ');
        text.push_str(number.format(self.start_us));
        text.push('+');
        text.push_str(number.format(self.took_us));
    }

    fn parse(text: &str) -> Option<Self> {
        let (phase, times) = text.split_once(' ')?;
        let (start, took) = times.split_once('+')?;
        Some(Self { phase: Phase::of(phase)?, start_us: start.parse().ok()?, took_us: took.parse().ok()? })
    }
}

impl PartialEq for Phases {
    fn eq(&self, other: &Self) -> bool {
        self.spans().eq(other.spans())
    }
}

impl Eq for Phases {}

impl fmt::Display for Phases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.write(&mut text);
        f.write_str(&text)
    }
}

impl Serialize for Phases {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.spans())
    }
}

/// Reads the list, and the text that rows of earlier versions have in its place.
impl<'de> Deserialize<'de> for Phases {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Spans(Vec<PhaseSpan>),
        }
        let refused = || D::Error::custom("this is no list of the calls of an episode");
        match Written::deserialize(deserializer)? {
            Written::Text(text) => Self::from_text(&text).ok_or_else(refused),
            Written::Spans(spans) if spans.len() > SPANS_MAX + Phase::ALL.len() => Err(refused()),
            Written::Spans(spans) => {
                let mut phases = Self::default();
                spans.iter().for_each(|span| span.write(&mut phases.text));
                phases.spans = SPANS_MAX;
                Ok(phases)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_sum_of_a_phase_is_exact_for_any_number_of_calls() {
        let (mut phases, episode) = (Phases::default(), Instant::now());
        for turn in 0..500_u64 {
            for (phase, millis) in [(Phase::Model, 3), (Phase::Tool, 1 + turn % 2)] {
                let call = Instant::now();
                tokio::time::advance(Duration::from_millis(millis)).await;
                phases.add(phase, episode, call);
            }
        }
        let verify = Instant::now();
        tokio::time::advance(Duration::from_micros(7)).await;
        phases.add(Phase::Verify, episode, verify);
        // One more for the model, for tools, and for the verifier.
        assert_eq!(phases.spans().count(), SPANS_MAX + 3);
        assert_eq!(phases.spans().nth(2).unwrap(), PhaseSpan { phase: Phase::Model, start_us: 4_000, took_us: 3_000 });
        assert_eq!(
            (phases.total(Phase::Model), phases.total(Phase::Tool)),
            (Duration::from_millis(1_500), Duration::from_millis(750))
        );
        assert_eq!(
            (phases.total(Phase::Verify), phases.total(Phase::Seed)),
            (Duration::from_micros(7), Duration::ZERO)
        );
        let mut json = String::new();
        phases.write_json(&mut json);
        assert_eq!(json, serde_json::to_string(&phases).unwrap());
        assert_eq!(serde_json::from_str::<Phases>(&json).unwrap(), phases);
        assert_eq!(Phases::from_text(&phases.to_string()), Some(phases));
    }

    #[test]
    fn phases_are_read_from_the_list_and_from_the_text_of_earlier_rows() {
        let list = r#"[{"phase":"seed","start_us":0,"took_us":310},{"phase":"model","start_us":402,"took_us":1200}]"#;
        let text = "seed 0+310, model 402+1200";
        for json in [list.to_owned(), format!("{text:?}")] {
            assert_eq!(serde_json::from_str::<Phases>(&json).unwrap().to_string(), text);
        }
        let many = format!("[{}]", vec![r#"{"phase":"seed","start_us":0,"took_us":1}"#; 69].join(","));
        for json in ["3", "[1]", r#"[{"phase":"nap","start_us":0,"took_us":1}]"#, "\"<b>\"", &many] {
            assert!(serde_json::from_str::<Phases>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn what_is_no_call_is_skipped_and_what_is_no_text_of_calls_is_refused() {
        for text in ["model", "model 1", "nap 1+2", "model 1+x", ", ", "model +"] {
            assert_eq!(Phases::from_text(text).unwrap().spans().count(), 0, "{text}");
        }
        let long = "model 1+2, ".repeat(TEXT_BYTES_MAX);
        for text in ["model -1+2", "<b>", "model 1+2\n", "\"", &long] {
            assert!(Phases::from_text(text).is_none(), "{text}");
        }
        let text = "seed 0+310, model 402+1200345, verify 1200801+95";
        let phases = Phases::from_text(text).unwrap();
        assert_eq!((phases.to_string().as_str(), phases.spans().count()), (text, 3));
    }
}
