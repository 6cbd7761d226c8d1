//! Measures the cost of a batch for its own process: sharding, padding, picking and concatenating, by the CPU time of the thread.

use std::hint::black_box;

use anyhow::Result;
use bytes::Bytes;
use gym_benches::report::{Aim, figure};
use gym_group::{Batch, DType, Padding, Ragged, Tensor, Uneven};
use rustix::time::{ClockId, clock_gettime};

/// Runs of each figure; the median is printed.
const RUNS: usize = 9;

fn main() -> Result<()> {
    let gib = Batch::empty().with("x", Tensor::new(DType::U8, [8_192, 1 << 17], Bytes::from(vec![1; 1 << 30]))?)?;
    run("shard_1GiB_in_8", "us", 1e6, Some(Aim::AtMost(5_000.0)), || gib.shard(8, Uneven::Refuse));
    run("encode_1GiB", "us", 1e6, None, || Ok(gib.encode()));
    let tenth = gib.slice(0..819)?;
    run("select_reversed_100MiB", "ms", 1e3, None, || tenth.select(&(0..819).rev().collect::<Vec<_>>()));
    run("copy_100MiB", "ms", 1e3, None, || Ok(tenth.column("x")?.dense()?.bytes().to_vec()));

    let rows: Vec<Vec<i64>> = (0..2_048).map(|row| vec![row; 2_048 + 3 * row as usize]).collect();
    let padded = rows.len() * rows[rows.len() - 1].len() * 8;
    println!("# padding 2,048 rows of 2,048 to 8,189 tokens to {} MiB", padded >> 20);
    run("from_rows", "ms", 1e3, None, || Batch::from_rows("ids", &rows, Padding::right(0)));
    let ragged = Ragged::from_rows(&rows);
    run("ragged_pad", "ms", 1e3, None, || ragged.pad(Padding::right(0)));
    run("fill_as_many_bytes", "ms", 1e3, None, || Ok(vec![1_u8; padded]));
    Ok(())
}

/// Prints the CPU time of one call, in `per_second` parts of a second.
fn run<T>(name: &str, unit: &str, per_second: f64, aim: Option<Aim>, of: impl Fn() -> gym_core::Result<T>) {
    let once = |_| {
        let begin = clock_gettime(ClockId::ThreadCPUTime);
        let made = black_box(of());
        let spent = clock_gettime(ClockId::ThreadCPUTime) - begin;
        assert!(made.is_ok(), "{name}: {:?}", made.err());
        (spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9) * per_second
    };
    figure(name, unit, &(0..RUNS).map(once).collect::<Vec<_>>(), &[], aim);
}
