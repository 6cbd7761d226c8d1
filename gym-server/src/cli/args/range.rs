//! A range of rewards, as an option names it, and the ranges of options for a request.

/// A range of rewards, both ends included: `1`, `0.5..`, `..0.5` or `0..0.5`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::cli) struct RewardRange {
    min: f64,
    max: f64,
}

impl RewardRange {
    /// Returns `true` if a reward is in the range.
    pub(in crate::cli) fn contains(self, reward: f64) -> bool {
        (self.min..=self.max).contains(&reward)
    }
}

impl std::str::FromStr for RewardRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str, open: f64| match text.trim() {
            "" => Ok(open),
            text => text.parse::<f64>().ok().filter(|number| !number.is_nan()).ok_or_else(|| {
                format!("{text:?} is not a number; write a reward such as 1, or a range such as 0..0.5, 0.5.. or ..0.5")
            }),
        };
        match text.split_once("..") {
            Some((min, max)) => Ok(Self { min: number(min, f64::NEG_INFINITY)?, max: number(max, f64::INFINITY)? }),
            None => {
                let exact = number(text, f64::NAN)?;
                if exact.is_nan() { Err("the reward is empty".to_owned()) } else { Ok(Self { min: exact, max: exact }) }
            }
        }
    }
}

/// Reads the temperature of a request. vLLM has no highest one.
pub(super) fn temperature(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..f64::INFINITY).contains(number));
    number.ok_or_else(|| "write 0 or more, such as 0.7".to_owned())
}

/// Reads the probability mass of nucleus sampling.
pub(super) fn top_p(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "write a number from 0 to 1, such as 0.95".to_owned())
}

/// Reads the limit of the tokens of a response.
pub(super) fn output_tokens(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|tokens| *tokens > 0).ok_or_else(|| "write a whole number of at least 1".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_rewards_has_four_forms() {
        for (text, inside, outside) in [
            ("1", &[1.0][..], &[0.999, 1.001][..]),
            ("0..0.5", &[0.0, 0.5], &[-0.1, 0.6]),
            ("0.5..", &[0.5, 9.0], &[0.4]),
            ("..-1", &[-1.0, -9.0], &[0.0]),
        ] {
            let range: RewardRange = text.parse().unwrap();
            assert!(inside.iter().all(|reward| range.contains(*reward)), "{text}");
            assert!(!outside.iter().any(|reward| range.contains(*reward)), "{text}");
        }
        for text in ["", "high", "nan", "0..x"] {
            assert!(text.parse::<RewardRange>().is_err(), "{text}");
        }
    }
}
