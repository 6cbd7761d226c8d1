//! `kill -9` of workers at random moments, half of them during a call that only the kill ends: every call ends in time with the right result or
//! the right error, restarts stay in their budget, no process is left over, no life is taken for another.
//!
//! `GYM_WORKER_KILLS` says how often (20 unless set; the long run has 200), `GYM_KILL_SEED` where the seeds begin. One line is
//! printed for each kill.

use std::collections::BTreeSet;
use std::time::Duration;

use gym_core::{CallContext, Execution, Incarnation};
use gym_group::{RankState, WorkerGroup, WorkerGroupExt};
use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};

use super::types::{Breed, Job, Work};
use super::{LONG, alive, group, options, pid, signal, status, stop, until};

const RANKS: u32 = 3;
/// The duration of every second call. The kill comes in this time, but on a busy machine such a call may have ended before.
const CALL: Duration = Duration::from_millis(60);
/// The duration of the others: they run when the kill comes.
const ENDLESS_TIMEOUT: Duration = Duration::from_secs(3_600);

pub(crate) async fn workers_killed_during_calls_leave_no_doubt() {
    let number =
        |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"));
    let (kills, first_seed) = (number("GYM_WORKER_KILLS", 20), number("GYM_KILL_SEED", 1));
    let budget = u32::try_from(kills).expect("fits");
    let group = group(RANKS, options().restarting(budget)).await;
    let mut ever: BTreeSet<i32> = (0..RANKS).map(|rank| pid(&group, rank)).collect();
    let mut lives = [1_u64; RANKS as usize];
    let mut during = 0;
    println!("kill  seed  phase   rank  call came to  ended after kill  serving after kill");
    for kill in 0..kills {
        let seed = first_seed + kill;
        let mut random = fastrand::Rng::with_seed(seed);
        let rank = random.u32(0..RANKS);
        // One in ten with no call under way.
        let idle = random.u8(0..10) == 0;
        ever.extend(
            group
                .call(Breed, ())
                .deadline(LONG)
                .await
                .expect("all ranks serve")
                .into_values()
                .iter()
                .map(|pid| i32::try_from(*pid).expect("fits")),
        );
        let endless = seed.is_multiple_of(2);
        let time = if endless { ENDLESS_TIMEOUT } else { CALL };
        let job = Job { ms: u64::try_from(time.as_millis()).expect("fits"), tells: true };
        let call = group.call(Work, job).deadline(LONG);
        let running = if idle { None } else { Some(tokio::spawn(call.start().await.expect("handed over"))) };
        sleep(CALL.mul_f64(random.f64() * 0.9)).await;
        let phase = match &running {
            Some(call) if !call.is_finished() => "during",
            Some(_) => "after",
            None => "idle",
        };
        assert!(idle || !endless || phase == "during", "seed {seed}: only the kill ends the call, and it is {phase}");
        during += u64::from(phase == "during");
        let killed = Instant::now();
        signal(pid(&group, rank), Signal::KILL);
        let mut came_to = "-";
        let mut ended = Duration::ZERO;
        if let Some(call) = running {
            let outcome = timeout(LONG, call).await.expect("within its deadline").expect("no panic");
            ended = killed.elapsed();
            came_to = match outcome {
                Ok(gathered) => {
                    assert!(!endless, "seed {seed}: a rank of the call was killed");
                    assert_eq!(gathered.into_values(), lives, "seed {seed}: the lives that were called answer");
                    "result"
                }
                Err(error) => {
                    let first = error.first().unwrap_or_else(|| panic!("seed {seed}: {error:?}"));
                    assert_eq!(first.rank, rank, "seed {seed}: {error:?}");
                    assert_eq!(first.incarnation, Incarnation(lives[rank as usize]), "seed {seed}");
                    assert_ne!(first.execution(), Execution::NotStarted, "seed {seed}: it was handed over: {error:?}");
                    "error"
                }
            };
        }
        lives[rank as usize] += 1;
        let life = Incarnation(lives[rank as usize]);
        group.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts");
        until("it serves again", || {
            let now = status(&group, rank);
            (now.incarnation, now.state) == (life, RankState::Healthy)
        })
        .await;
        ever.insert(pid(&group, rank));
        let serving = killed.elapsed();
        println!(
            "{:>4}  {seed:>4}  {phase:<6}  {rank:>4}  {came_to:>12}  {:>12} ms  {:>15} ms",
            kill + 1,
            ended.as_millis(),
            serving.as_millis()
        );
    }
    println!("{during} of {kills} kills while a call ran");
    let used: u32 = group.worker_status().iter().map(|rank| rank.restarts_used).sum();
    assert_eq!(used, budget, "one restart for each kill");
    assert!(group.view().borrow().members().iter().all(|member| member.state == RankState::Healthy));
    stop(&group).await;
    until("no process is left", || !ever.iter().any(|pid| alive(*pid))).await;
}
