//! Address of a peer worker, as the peer receives it.

use bytes::{BufMut, Bytes, BytesMut};

use crate::ucx::Worker;

/// A decoded address: `version u8 | process u32, little endian | UCX's address`.
pub(crate) struct Address {
    pub(crate) process: u32,
    pub(crate) worker: Bytes,
}

const ADDRESS_VERSION: u8 = 1;
const ADDRESS_PREFIX_BYTES: usize = 5;

impl Address {
    pub(crate) fn ours(worker: &Worker) -> Bytes {
        let mut bytes = BytesMut::with_capacity(ADDRESS_PREFIX_BYTES + worker.address().len());
        bytes.put_u8(ADDRESS_VERSION);
        bytes.put_u32_le(std::process::id());
        bytes.put_slice(worker.address());
        bytes.freeze()
    }

    pub(crate) fn read(bytes: &Bytes) -> Option<Self> {
        let (&[version, ref process @ ..], worker) = bytes.split_first_chunk::<ADDRESS_PREFIX_BYTES>()?;
        let there = version == ADDRESS_VERSION && !worker.is_empty();
        there.then(|| Self { process: u32::from_le_bytes(*process), worker: bytes.slice_ref(worker) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_was_written_and_rubbish_is_none() {
        let read = |bytes: &[u8]| Address::read(&Bytes::copy_from_slice(bytes));
        let address = read(&[1, 2, 1, 0, 0, 7, 8]).expect("an address");
        assert_eq!((address.process, &address.worker[..]), (0x102, &[7, 8][..]));
        for rubbish in [&[][..], &[1, 0, 0, 0, 0], &[0; 100], &[2, 2, 1, 0, 0, 7]] {
            assert!(read(rubbish).is_none(), "{rubbish:?}");
        }
    }
}
