//! The format of an event file: records with checksums (TFRecord), and in each one an `Event` message of protobuf.
//!
//! By hand, because the messages have six fields, and the crates that write them bring more code than that: `tensorboard-rs` has `image`
//! 0.23 and `protobuf` 2, `tboard` has `prost`.

use std::time::Duration;

/// Appends the record that begins each file.
pub(super) fn version(time: Duration, into: &mut Vec<u8>) {
    let mut event = wall_time(time);
    // Event.file_version = 3
    bytes(3, b"brain.Event:2", &mut event);
    record(&event, into);
}

/// Appends the scalars of one step: each has a tag and a value.
pub(super) fn scalars(time: Duration, step: u64, scalars: &[(String, f64)], into: &mut Vec<u8>) {
    let mut summary = Vec::new();
    for (tag, value) in scalars {
        let mut scalar = Vec::new();
        // Summary.Value.tag = 1, simple_value = 2 (float)
        bytes(1, tag.as_bytes(), &mut scalar);
        key(2, FIXED_32, &mut scalar);
        #[allow(clippy::cast_possible_truncation, reason = "the format has single precision")]
        scalar.extend_from_slice(&(*value as f32).to_le_bytes());
        // Summary.value = 1
        bytes(1, &scalar, &mut summary);
    }
    let mut event = wall_time(time);
    // Event.step = 2 (int64), summary = 5
    key(2, VARINT, &mut event);
    varint(step, &mut event);
    bytes(5, &summary, &mut event);
    record(&event, into);
}

const VARINT: u8 = 0;
const FIXED_64: u8 = 1;
const LENGTH: u8 = 2;
const FIXED_32: u8 = 5;

/// Begins an `Event` with its wall_time = 1 (double).
fn wall_time(time: Duration) -> Vec<u8> {
    let mut event = Vec::new();
    key(1, FIXED_64, &mut event);
    event.extend_from_slice(&time.as_secs_f64().to_le_bytes());
    event
}

fn key(field: u8, wire_type: u8, into: &mut Vec<u8>) {
    into.push(field << 3 | wire_type);
}

fn bytes(field: u8, bytes: &[u8], into: &mut Vec<u8>) {
    key(field, LENGTH, into);
    varint(bytes.len() as u64, into);
    into.extend_from_slice(bytes);
}

fn varint(mut value: u64, into: &mut Vec<u8>) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

/// Appends a record: the length and its checksum, the data and its checksum.
fn record(data: &[u8], into: &mut Vec<u8>) {
    let length = (data.len() as u64).to_le_bytes();
    into.extend_from_slice(&length);
    into.extend_from_slice(&masked_crc(&length).to_le_bytes());
    into.extend_from_slice(data);
    into.extend_from_slice(&masked_crc(data).to_le_bytes());
}

/// Returns TFRecord's checksum, which is masked because the data may contain checksums itself.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_records_are_those_of_tensorboards_own_writer() {
        // tensorboard 2.21.0: EventFileWriter with these two events, at wall_time 1.5.
        let mut file = Vec::new();
        version(Duration::from_millis(1_500), &mut file);
        scalars(Duration::from_millis(1_500), 300, &[("reward/mean".into(), 0.5), ("ä".into(), -1e9)], &mut file);
        let hex: String = file.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            concat!(
                "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c",
                "2d000000000000003c418afb09000000000000f83f10ac022a1f0a120a0b7265776172642f6d65616e15",
                "0000003f0a090a02c3a415286b6ece4c59fd36"
            )
        );
    }
}
