//! Ranks in processes, one of which is killed. The processes are this test program: they run the test
//! `a_rank_in_a_process` alone.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio, exit};
use std::sync::Arc;

use rustix::process::{Signal, getpid, kill_process};

use super::{At, SIZES, all_operations, barriers_of_all_operations, far};
use crate::{Failure, FdOffer, Segment, SegmentCommunicator, fetch};

const WORLD_SIZE: usize = 3;
/// Tells a process its rank: name of the socket, position, and when it dies.
const RANK: &str = "GYM_SEGMENT_TEST_RANK";
const FINISHED: i32 = 40;
const ABORTED: i32 = 41;

/// When a rank is killed, at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kill {
    Before,
    /// By another thread, when the rank has told that it comes.
    During,
    After,
}

impl Kill {
    const ALL: [Self; 3] = [Self::Before, Self::During, Self::After];
}

fn die() {
    kill_process(getpid(), Signal::KILL).expect("a process can kill itself");
}

/// Nothing by itself: the other tests start it.
#[test]
fn a_rank_in_a_process() {
    let Ok(told) = std::env::var(RANK) else { return };
    let told: Vec<&str> = told.split(' ').collect();
    let segment = Arc::new(Segment::open(fetch(told[0], far()).unwrap(), WORLD_SIZE).unwrap());
    let position: usize = told[1].parse().unwrap();
    let mut rank = SegmentCommunicator::join(&segment, position).unwrap();
    if let [kill, barrier] = told[2..] {
        let kill = Kill::ALL.into_iter().find(|known| format!("{known:?}") == kill).unwrap();
        let barrier: u64 = barrier.parse().unwrap();
        rank.probe = Some(Box::new(move |at, number| match kill {
            _ if number != barrier => {}
            Kill::Before if at == At::Before => die(),
            Kill::After if at == At::After => die(),
            Kill::During if at == At::Before => {
                let segment = Arc::clone(&segment);
                std::thread::spawn(move || {
                    while segment.progress()[position] <= barrier {
                        std::thread::yield_now();
                    }
                    die();
                });
            }
            // It got through before the other thread had a core.
            Kill::During => die(),
            _ => {}
        }));
    }
    exit(match all_operations(&mut rank, far()) {
        Ok(()) => FINISHED,
        Err(Failure::Aborted) => ABORTED,
        Err(other) => panic!("{other}"),
    });
}

fn start(offer: &FdOffer, position: usize, kill: Option<(Kill, u64)>) -> Child {
    let kill = kill.map_or_else(String::new, |(kill, barrier)| format!(" {kill:?} {barrier}"));
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::processes::a_rank_in_a_process", "--nocapture"])
        .env(RANK, format!("{} {position}{kill}", offer.name()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Runs all operations in processes, of which one is killed. Returns how the others ended.
fn play(kill: Option<(Kill, u64)>) -> Vec<ExitStatus> {
    let segment = Arc::new(Segment::create(WORLD_SIZE, SIZES).unwrap());
    let offer = FdOffer::new(&segment).unwrap();
    let killed = kill.map(|(_, barrier)| barrier as usize % WORLD_SIZE);
    let mut ranks: Vec<Child> =
        (0..WORLD_SIZE).map(|position| start(&offer, position, kill.filter(|_| killed == Some(position)))).collect();
    offer.serve(WORLD_SIZE, far()).unwrap();
    if let Some(killed) = killed {
        let status = ranks.remove(killed).wait().unwrap();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{kill:?}");
        // As somebody does who sees its connection close.
        segment.abort();
    }
    ranks.into_iter().map(|mut rank| rank.wait().unwrap()).collect()
}

#[test]
fn processes_work_together() {
    assert!(play(None).iter().all(|status| status.code() == Some(FINISHED)));
}

fn kills(kill: Kill) {
    let barriers = barriers_of_all_operations(WORLD_SIZE);
    for barrier in 0..barriers {
        let ends: Vec<Option<i32>> = play(Some((kill, barrier))).iter().map(ExitStatus::code).collect();
        // Whoever dies at the last barrier may have opened it: for all others, then, or for none.
        let may_finish = barrier + 1 == barriers && kill != Kill::Before;
        let fine = ends == [Some(ABORTED); WORLD_SIZE - 1] || may_finish && ends == [Some(FINISHED); WORLD_SIZE - 1];
        assert!(fine, "{kill:?} at {barrier}: {ends:?}");
    }
}

#[test]
fn a_rank_that_is_killed_before_any_barrier_ends_the_others() {
    kills(Kill::Before);
}

#[test]
fn a_rank_that_is_killed_in_any_barrier_ends_the_others() {
    kills(Kill::During);
}

#[test]
fn a_rank_that_is_killed_after_any_barrier_ends_the_others() {
    kills(Kill::After);
}
