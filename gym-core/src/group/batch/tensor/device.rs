//! Names of devices, as PyTorch spells them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::error::{Error, Result};

/// A device for tensors, with PyTorch's names: `cpu`, `cuda`, `cuda:3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// Host memory.
    #[default]
    Cpu,
    /// The memory of the GPU with this index.
    Cuda(u32),
}

impl Device {
    /// Returns the kind: `cpu` or `cuda`. The memory of a kind has one [`DeviceProvider`](crate::group::DeviceProvider).
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda(_) => "cuda",
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let cuda = match text {
            "cpu" => return Ok(Self::Cpu),
            "cuda" => Some(0),
            other => other.strip_prefix("cuda:").and_then(|index| index.parse().ok()),
        };
        cuda.map(Self::Cuda)
            .ok_or_else(|| Error::invalid(format!("{text:?} is no device; there are cpu, cuda and cuda:N")))
    }
}

impl TryFrom<String> for Device {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl TryFrom<&str> for Device {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self> {
        text.parse()
    }
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        device.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_spelled_as_pytorch_does() {
        for (text, device) in [("cpu", Device::Cpu), ("cuda", Device::Cuda(0)), ("cuda:3", Device::Cuda(3))] {
            assert_eq!(serde_json::from_value::<Device>(text.into()).unwrap(), device);
        }
        assert_eq!(serde_json::to_value(Device::Cuda(3)).unwrap(), "cuda:3");
        for text in ["gpu", "cuda:", "cuda:-1", "CPU"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
