//! Prints one line for each figure: the SDK's value, the peer's, their ratio with its spread, and the aim.

use crate::measure::median;
use crate::options::Options;

/// The aim of a figure.
#[derive(Clone, Copy, Debug)]
pub enum Aim {
    /// At most this value.
    AtMost(f64),
    /// At least this value.
    AtLeast(f64),
}

impl Aim {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }
}

/// Prints a figure: the median of the SDK's runs, the peer's median, and the ratio of the two run by run.
pub fn figure(name: &str, unit: &str, ours: &[f64], peer: &[f64], aim: Option<Aim>) {
    let value = median(ours);
    let mut line = format!("{name} ours={}{unit}", number(value));
    if !peer.is_empty() {
        // The unit determines the direction of the ratio: higher rates are better, and lower costs are better.
        let ratios: Vec<f64> =
            ours.iter().zip(peer).map(|(ours, peer)| if unit == "/s" { ours / peer } else { peer / ours }).collect();
        let (least, most) =
            ratios.iter().fold((f64::INFINITY, 0_f64), |(least, most), ratio| (least.min(*ratio), most.max(*ratio)));
        let ratio = median(&ratios);
        line += &format!(" peer={}{unit} ratio={ratio:.1} [{least:.1}..{most:.1}]", number(median(peer)));
    }
    if let Some(aim) = aim {
        let (sign, bound) = match aim {
            Aim::AtMost(bound) => ("<=", bound),
            Aim::AtLeast(bound) => (">=", bound),
        };
        line += &format!(" aim{sign}{}{unit} {}", number(bound), if aim.is_met(value) { "met" } else { "MISSED" });
    }
    println!("{line}");
}

/// What a figure is compared with.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'p> {
    /// Its name, with its version if it is a program.
    pub name: &'p str,
    /// Its figures, round by round.
    pub values: &'p [f64],
}

/// Prints a cost beside that of a peer, as a line or as a JSON object. The ratio is ours to the peer's, round by round: below 1 is cheaper.
pub fn compared(options: &Options, name: &str, unit: &str, ours: &[f64], peer: &Peer<'_>) {
    let ratios: Vec<f64> = ours.iter().zip(peer.values).map(|(ours, peer)| ours / peer).collect();
    let (value, of_peer, ratio) = (median(ours), median(peer.values), median(&ratios));
    if options.json {
        let line = serde_json::json!({
            "figure": name, "unit": unit, "ours": value, "peer": of_peer, "ratio": ratio, "peer_name": peer.name,
        });
        println!("{line}");
    } else {
        let (least, most) =
            ratios.iter().fold((f64::INFINITY, 0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
        let (value, of_peer) = (number(value), number(of_peer));
        println!(
            "{name} ours={value}{unit} peer={of_peer}{unit} ours/peer={ratio:.2} [{least:.2}..{most:.2}] ({})",
            peer.name
        );
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
