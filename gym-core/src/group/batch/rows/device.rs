//! Devices of batches. Only host memory is supported: weights move between devices by collectives, batches between hosts.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::Batch;

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

impl Batch {
    /// Returns the device of the batch.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::Cpu
    }

    /// Moves the batch to a device. The returned batch shares the memory, because every batch is in host memory already.
    ///
    /// # Errors
    /// `Unimplemented` for every device except [`Device::Cpu`].
    pub fn to_device(&self, device: Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(self.clone()),
            Device::Cuda(_) => Err(Error::not_started(
                Code::Unimplemented,
                format!("batches lie in host memory, not on {device}; upload the tensors in the worker"),
            )),
        }
    }

    /// Like [`Self::to_device`], in place.
    ///
    /// # Errors
    /// The errors of [`Self::to_device`]; the batch is then unchanged.
    pub fn to_device_mut(&mut self, device: Device) -> Result<()> {
        *self = self.to_device(device)?;
        Ok(())
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

impl From<Device> for String {
    fn from(device: Device) -> Self {
        device.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::batch::tests::every_kind;

    #[test]
    fn the_host_shares_and_other_devices_say_that_they_are_not_offered() {
        let mut batch = every_kind(2);
        let same = batch.to_device(Device::Cpu).unwrap();
        assert_eq!(same.encode().1[0].as_ptr(), batch.encode().1[0].as_ptr());
        let error = batch.to_device_mut(Device::Cuda(1)).unwrap_err();
        assert!(error.code() == Code::Unimplemented && error.message().contains("cuda:1"), "{error}");
        assert_eq!((batch.device(), &batch), (Device::Cpu, &same));
    }

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
