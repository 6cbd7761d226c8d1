//! Prints one line for each figure: the SDK's value, the peer's, their ratio with its spread, and the aim.

use crate::measure::median;

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

fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
