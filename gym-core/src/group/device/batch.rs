//! A batch whose tensors are on a device.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::{Device, Tensor};
use crate::group::batch::{Batch, Column};
use crate::group::collective::{Buffer, Memory};
use crate::group::device::tensor::{DeviceTensor, TensorSpec};

/// Named columns with the same number of rows, in order: tensors on one device, and in host memory what is no dense tensor. Cheap to clone; clones share
/// the memory.
///
/// On [`Device::Cpu`] it shares the memory of the [`Batch`], so a program that takes its device from a setting has one path.
///
/// ```
/// # use gym_core::group::collective::Buffer;
/// # use gym_core::group::{Batch, Tensor};
/// # fn all_reduce(buffer: Buffer) -> Buffer { buffer }
/// # fn example(device: &str) -> gym_core::Result<()> {
/// let batch = Batch::empty().with("gradient", Tensor::from_vec([2], vec![1.0_f32, 2.0])?)?;
/// let mut placed = batch.to_device(device)?; // "cpu", "cuda" or "cuda:3"
/// let buffer = placed.lend("gradient")?;
/// let result = all_reduce(buffer); // a communicator's operation, which always returns the buffer
/// placed.restore("gradient", result).map_err(|(_buffer, error)| error)?;
/// assert_eq!(placed.cpu()?, batch);
/// # Ok(()) }
/// # example("cpu").unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct DeviceBatch {
    device: Device,
    /// The batch without its columns: metadata and micro-batches.
    frame: Batch,
    columns: Vec<(Arc<str>, Place)>,
}

/// Where a column is.
#[derive(Clone, Debug)]
enum Place {
    Host(Column),
    Device(DeviceTensor),
    /// Its memory is in an operation.
    Lent(TensorSpec),
}

impl Place {
    fn rows(&self) -> usize {
        match self {
            Self::Host(column) => column.rows(),
            Self::Device(tensor) => tensor.spec.rows(),
            Self::Lent(spec) => spec.rows(),
        }
    }

    /// Returns what is left of the column, and its memory.
    fn lend(self) -> (Self, Result<Buffer>) {
        match self {
            Self::Device(tensor) => {
                let spec = tensor.spec.clone();
                match tensor.into_buffer() {
                    Ok(buffer) => (Self::Lent(spec), Ok(buffer)),
                    Err((tensor, error)) => (Self::Device(tensor), Err(error)),
                }
            }
            Self::Host(Column::Dense(tensor)) => (Self::Lent(TensorSpec::of(&tensor)), Ok(Buffer::from_tensor(tensor))),
            Self::Host(column) => {
                let error = in_host(&column);
                (Self::Host(column), Err(error))
            }
            Self::Lent(spec) => (Self::Lent(spec), Err(is_lent())),
        }
    }
}

impl Batch {
    /// Returns the device of the batch, which is the host. A batch on another device is a [`DeviceBatch`].
    #[must_use]
    pub fn device(&self) -> Device {
        Device::Cpu
    }

    /// Returns the batch with all tensors on a device: `"cpu"`, `"cuda"`, `"cuda:3"`, or a [`Device`]. The device provider that the program has registered
    /// copies them, and that blocks; on the CPU they share the memory. Ragged, JSON and packed columns stay in host memory.
    /// [`DeviceBatch::cpu`] is the way back.
    ///
    /// # Errors
    /// `InvalidArgument` if the text is no device, `FailedPrecondition` if no device provider is registered, and those of
    /// [`DeviceProvider::upload`](crate::group::DeviceProvider::upload), with the column.
    pub fn to_device<D: TryInto<Device>>(&self, device: D) -> Result<DeviceBatch>
    where
        Error: From<D::Error>,
    {
        let mut frame = self.clone();
        self.names().for_each(|name| drop(frame.remove(name)));
        let columns = self.columns().map(|(name, column)| (name.into(), Place::Host(column.clone()))).collect();
        DeviceBatch { device: Device::Cpu, frame, columns }.to_device(device)
    }
}

impl DeviceBatch {
    /// Returns the device of the tensors.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the number of rows; 0 without columns.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.columns.first().map_or(0, |(_, place)| place.rows())
    }

    /// Returns the names of all columns, in order.
    #[must_use]
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.columns.iter().map(|(name, _)| name.as_ref())
    }

    /// Returns the metadata of the batch.
    #[must_use]
    pub fn metadata(&self) -> &Map<String, Value> {
        self.frame.metadata()
    }

    /// Returns a column that is in host memory.
    ///
    /// # Errors
    /// `NotFound`, with the known names; `InvalidArgument` if the column is on a device; `FailedPrecondition` if it is lent.
    pub fn column(&self, name: &str) -> Result<&Column> {
        match &self.columns[self.position(name)?].1 {
            Place::Host(column) => Ok(column),
            Place::Device(tensor) => {
                let why = format!(
                    "it is on {}, and the host cannot read it; take the batch to the host first with cpu()",
                    tensor.device()
                );
                Err(Error::invalid(why))
            }
            Place::Lent(_) => Err(is_lent()),
        }
        .map_err(|error| about(error, "read", name))
    }

    /// Returns a tensor that is on the device.
    ///
    /// # Errors
    /// `NotFound`, with the known names; `InvalidArgument` if the column is in host memory; `FailedPrecondition` if it is lent.
    pub fn tensor(&self, name: &str) -> Result<&DeviceTensor> {
        match &self.columns[self.position(name)?].1 {
            Place::Device(tensor) => Ok(tensor),
            Place::Host(column) => Err(in_host(column)),
            Place::Lent(_) => Err(is_lent()),
        }
        .map_err(|error| about(error, "tensor", name))
    }

    /// Adds a tensor of the device at the end, such as one of another library, or replaces the column of that name at its position.
    ///
    /// # Errors
    /// `InvalidArgument` if the tensor is on another device, is a scalar, has another number of rows than the other columns, or has more than 2²⁰ rows of no
    /// bytes.
    pub fn insert(&mut self, name: impl Into<Arc<str>>, tensor: DeviceTensor) -> Result<()> {
        let name = name.into();
        let insert = |error| about(error, "insert", &name);
        if tensor.device() != self.device {
            let why = format!("the tensor is on {}, and the batch on {}", tensor.device(), self.device);
            return Err(insert(Error::invalid(why)));
        }
        if tensor.shape().is_empty() {
            return Err(insert(Error::invalid("the tensor is a scalar; dimension 0 must count the rows")));
        }
        if tensor.memory().bytes() == 0 {
            // The limit is that of the batch which this one becomes.
            Batch::empty().with(Arc::clone(&name), Tensor::zeros(tensor.dtype(), tensor.shape())?)?;
        }
        let position = self.columns.iter().position(|(known, _)| *known == name);
        let others = self.columns.iter().enumerate().find(|(at, _)| Some(*at) != position);
        let (rows, found) = (others.map(|(_, (_, place))| place.rows()), tensor.spec.rows());
        if let Some(rows) = rows.filter(|rows| *rows != found) {
            return Err(insert(Error::invalid(format!("the tensor has {found} rows, and the batch {rows}"))));
        }
        match position {
            Some(position) => self.columns[position].1 = Place::Device(tensor),
            None => self.columns.push((name, Place::Device(tensor))),
        }
        Ok(())
    }

    /// Removes a tensor of the device; the order of the others stays.
    ///
    /// # Errors
    /// Those of [`Self::tensor`].
    pub fn remove(&mut self, name: &str) -> Result<DeviceTensor> {
        let tensor = self.tensor(name)?.clone();
        self.columns.remove(self.position(name)?);
        Ok(tensor)
    }

    /// Takes the memory of a tensor as the buffer of a collective operation. Name, shape and padding side stay in the batch, and [`Self::restore`] gives them
    /// the result. Memory that another batch shares is copied, and that blocks.
    ///
    /// # Errors
    /// `NotFound`, with the known names; `InvalidArgument` if the column is no tensor; `FailedPrecondition` if it is lent; those of
    /// [`DeviceTensor::into_buffer`]. The batch is then unchanged.
    pub fn lend(&mut self, name: &str) -> Result<Buffer> {
        let position = self.position(name)?;
        let (known, place) = self.columns.remove(position);
        let (left, buffer) = place.lend();
        self.columns.insert(position, (known, left));
        buffer.map_err(|error| about(error, "lend", name))
    }

    /// Gives a lent tensor its memory: the buffer that was lent, or that of the same operation's result.
    ///
    /// # Errors
    /// The buffer, with `NotFound` or `FailedPrecondition` if no such column is lent, or with `InvalidArgument` if the buffer has another element type, another
    /// number of bytes, or is on another device. The column stays lent.
    pub fn restore(&mut self, name: &str, buffer: Buffer) -> Result<(), (Buffer, Error)> {
        match self.fits(name, &buffer) {
            Ok((position, spec)) => {
                self.columns[position].1 = match buffer.memory {
                    Memory::Device(memory) => Place::Device(DeviceTensor::of_checked(spec, memory)),
                    host => {
                        let tensor = Buffer::new(spec.dtype, host).into_tensor(spec.shape);
                        let tensor = tensor.expect("the bytes are those of the shape").with_side(spec.side);
                        Place::Host(Column::Dense(tensor))
                    }
                };
                Ok(())
            }
            Err(error) => Err((buffer, about(error, "restore", name))),
        }
    }

    /// Returns the position of a lent column that the buffer fits.
    fn fits(&self, name: &str, buffer: &Buffer) -> Result<(usize, TensorSpec)> {
        let position = self.position(name)?;
        let Place::Lent(spec) = &self.columns[position].1 else {
            return Err(Error::not_started(Code::FailedPrecondition, "the column is not lent"));
        };
        let device = match &buffer.memory {
            Memory::Device(memory) => memory.device(),
            Memory::Host(_) | Memory::Shared(_) => Device::Cpu,
        };
        if device != self.device {
            return Err(Error::invalid(format!("the buffer is on {device}, and the batch on {}", self.device)));
        }
        if buffer.dtype != spec.dtype {
            return Err(Error::invalid(format!("the buffer has {}, and the column {}", buffer.dtype, spec.dtype)));
        }
        spec.check(buffer.bytes())?;
        Ok((position, spec.clone()))
    }

    /// Returns the batch with all tensors on another device, as [`Batch::to_device`] does. The device provider copies them, and that blocks; on their own
    /// device they share the memory. This batch stays as it is.
    ///
    /// # Errors
    /// Those of [`Batch::to_device`] and of [`Self::cpu`].
    pub fn to_device<D: TryInto<Device>>(&self, device: D) -> Result<Self>
    where
        Error: From<D::Error>,
    {
        let device = device.try_into()?;
        if device == self.device {
            return Ok(self.clone());
        }
        let moved = |place: &Place| match place {
            Place::Host(Column::Dense(tensor)) => Ok(Place::Device(DeviceTensor::upload(tensor, device)?)),
            Place::Host(column) => Ok(Place::Host(column.clone())),
            Place::Device(tensor) if device == Device::Cpu => Ok(Place::Host(Column::Dense(tensor.cpu()?))),
            Place::Device(tensor) => Ok(Place::Device(tensor.to_device(device)?)),
            Place::Lent(_) => Err(is_lent()),
        };
        let columns = self.columns.iter().map(|(name, place)| {
            let place = moved(place).map_err(|error| error.about(format!("move column {name:?} to {device}")))?;
            Ok((Arc::clone(name), place))
        });
        Ok(Self { device, frame: self.frame.clone(), columns: columns.collect::<Result<_>>()? })
    }

    /// Returns the batch in host memory, as PyTorch's `cpu()` does. The device provider copies the tensors, and that blocks; from the CPU they share the
    /// memory. This batch stays as it is.
    ///
    /// # Errors
    /// `FailedPrecondition` if a column is lent or if no device provider is registered, and those of
    /// [`DeviceProvider::download`](crate::group::DeviceProvider::download), with the column.
    pub fn cpu(&self) -> Result<Batch> {
        let host = self.to_device(Device::Cpu)?;
        let mut batch = host.frame;
        for (name, place) in host.columns {
            let Place::Host(column) = place else {
                return Err(about(is_lent(), "read", &name));
            };
            batch.insert(name, column)?;
        }
        Ok(batch)
    }

    fn position(&self, name: &str) -> Result<usize> {
        self.columns.iter().position(|(known, _)| known.as_ref() == name).ok_or_else(|| {
            let names: Vec<_> = self.names().collect();
            Error::not_started(Code::NotFound, format!("no column {name:?}; there are {names:?}"))
        })
    }
}

fn is_lent() -> Error {
    let why = "its memory is lent to an operation; give it back with restore()";
    Error::not_started(Code::FailedPrecondition, why)
}

fn in_host(column: &Column) -> Error {
    Error::invalid(format!("a {} column is in host memory", column.kind()))
}

fn about(error: Error, what: &str, name: &str) -> Error {
    error.about(format!("{what} column {name:?}"))
}
