//! One line for each figure: ours, the peer's, their ratio with its spread, and the aim.

use crate::measure::median;

/// What a figure is meant to reach.
#[derive(Clone, Copy, Debug)]
pub enum Aim {
    /// At most this.
    AtMost(f64),
    /// At least this.
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

/// Prints a figure: the median of the runs, the peer's, and ours against the peer's run by run.
pub fn figure(name: &str, unit: &str, ours: &[f64], peer: &[f64], aim: Option<Aim>) {
    let value = median(ours);
    let mut line = format!("{name} ours={}{unit}", number(value));
    if !peer.is_empty() {
        // The larger over the smaller way round is told by the unit: rates grow, costs shrink.
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
