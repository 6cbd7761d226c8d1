//! Conformance tests of fleet health and failure classes.

use std::io;
use std::time::Duration;

use gym_core::group::RankState;
use gym_core::registry::Picker;
use gym_core::{Code, Error, Execution};
use proptest::prelude::*;

use super::*;

const OK: HealthEvent = HealthEvent::Probed { ok: true };
const FAIL: HealthEvent = HealthEvent::Probed { ok: false };
const REQUEST_OK: HealthEvent = HealthEvent::Requested { ok: true };
const REQUEST_FAILED: HealthEvent = HealthEvent::Requested { ok: false };

fn fleet(replicas: usize, policy: HealthPolicy) -> Fleet {
    Fleet::new(replicas, policy).unwrap()
}

/// Returns the state of the first of four replicas after these events.
fn after(policy: HealthPolicy, events: &[HealthEvent]) -> (RankState, Fleet) {
    let mut fleet = fleet(4, policy);
    for event in events {
        fleet.note(0, *event);
    }
    (fleet.replicas()[0].health.state, fleet)
}

#[test]
fn c198_a_failed_probe_makes_suspect_and_a_suspect_serves() {
    let (state, fleet) = after(HealthPolicy::default(), &[FAIL]);
    assert_eq!((state, fleet.serving()), (RankState::Suspect, vec![0, 1, 2, 3]));
    assert_eq!(fleet.epoch(), 0);
}

#[test]
fn c199_three_failed_probes_make_dead() {
    let mut fleet = fleet(4, HealthPolicy::default());
    (0..3).for_each(|_| fleet.note(1, FAIL));
    assert_eq!((fleet.replicas()[1].health.state, fleet.serving(), fleet.epoch()), (RankState::Dead, vec![0, 2, 3], 1));
}

#[test]
fn c200_two_successes_make_a_suspect_healthy_and_one_does_not() {
    assert_eq!(after(HealthPolicy::default(), &[FAIL, OK]).0, RankState::Suspect);
    assert_eq!(after(HealthPolicy::default(), &[FAIL, OK, OK]).0, RankState::Healthy);
}

#[test]
fn c201_a_failure_begins_the_successes_anew() {
    let policy = HealthPolicy { unhealthy_after: 5, healthy_after: 3, ..HealthPolicy::default() };
    assert_eq!(after(policy, &[FAIL, OK, OK, FAIL, OK, OK]).0, RankState::Suspect);
}

#[test]
fn c202_the_dead_stay_dead_however_well_they_answer() {
    let mut events = vec![FAIL; 3];
    events.extend([OK; 10]);
    assert_eq!(after(HealthPolicy::default(), &events).0, RankState::Dead);
}

#[test]
fn c203_a_restarted_replica_serves_only_after_its_refit() {
    let mut events = vec![FAIL, FAIL, FAIL, HealthEvent::RestartBegun];
    assert_eq!(after(HealthPolicy::default(), &events).0, RankState::Restarting);
    events.push(HealthEvent::Loaded);
    let (state, fleet) = after(HealthPolicy::default(), &events);
    assert_eq!((state, fleet.serving()), (RankState::Stale, vec![1, 2, 3]));
    events.push(HealthEvent::Refit(42));
    let (state, fleet) = after(HealthPolicy::default(), &events);
    assert_eq!((state, fleet.replicas()[0].health.weight_version, fleet.epoch()), (RankState::Healthy, Some(42), 2));
}

#[test]
fn c204_a_restart_beyond_the_budget_retires_for_good() {
    let policy = HealthPolicy { restarts_max: 2, ..HealthPolicy::default() };
    let mut events = vec![HealthEvent::RestartBegun; 3];
    assert_eq!(after(policy, &events).0, RankState::Retired);
    events.extend([
        OK,
        FAIL,
        REQUEST_OK,
        REQUEST_FAILED,
        HealthEvent::RestartBegun,
        HealthEvent::Loaded,
        HealthEvent::Refit(1),
    ]);
    assert_eq!(after(policy, &events).0, RankState::Retired);
}

#[test]
fn c205_fewer_replicas_than_must_serve_are_an_error() {
    let mut fleet = fleet(2, HealthPolicy { restarts_max: 0, serving_min: 2, ..HealthPolicy::default() });
    assert!(fleet.check_exhausted().is_ok());
    fleet.note(0, HealthEvent::RestartBegun);
    let error = fleet.check_exhausted().unwrap_err();
    assert!(error.to_string().contains("1 of 2 replicas have restarts left, at least 2 must serve"), "{error}");
}

#[test]
fn c206_requests_go_to_the_least_busy() {
    let mut fleet = fleet(3, HealthPolicy::default());
    let picker = Picker::default();
    let mut chosen: Vec<usize> = (0..6).map(|_| fleet.acquire(&picker, |_, _| true).unwrap()).collect();
    chosen.sort_unstable();
    assert_eq!(chosen, [0, 0, 1, 1, 2, 2]);
}

#[test]
fn c207_a_busy_replica_is_passed_over_and_counts_do_not_go_below_zero() {
    let mut fleet = fleet(2, HealthPolicy::default());
    fleet.replicas[0].in_flight = 5;
    assert_eq!(fleet.acquire(&Picker::default(), |_, _| true).unwrap(), 1);
    fleet.release(1);
    fleet.release(1);
    assert_eq!(fleet.replicas()[1].in_flight, 0);
}

#[test]
fn c208_with_all_dead_the_request_may_be_sent_again() {
    let mut fleet = fleet(2, HealthPolicy { unhealthy_after: 1, ..HealthPolicy::default() });
    (0..2).for_each(|index| fleet.note(index, FAIL));
    assert!(fleet.acquire(&Picker::default(), |_, _| true).unwrap_err().may_resend(false));
}

#[test]
fn c209_limits_and_fleets_of_zero_are_refused() {
    let default = HealthPolicy::default();
    for policy in [
        HealthPolicy { unhealthy_after: 0, ..default },
        HealthPolicy { healthy_after: 0, ..default },
        HealthPolicy { serving_min: 0, ..default },
    ] {
        assert_eq!(Fleet::new(2, policy).unwrap_err().code(), Code::InvalidArgument);
    }
    assert_eq!(Fleet::new(0, default).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn c210_failing_requests_count_while_probes_succeed() {
    let policy = HealthPolicy { unhealthy_after: 2, ..HealthPolicy::default() };
    assert_eq!(after(policy, &[REQUEST_FAILED, OK, OK, OK, REQUEST_FAILED]).0, RankState::Dead);
    assert_eq!(after(policy, &[REQUEST_FAILED, OK, REQUEST_OK, REQUEST_FAILED]).0, RankState::Suspect);
}

#[test]
fn c211_the_fleets_failures_are_told_from_the_datas() {
    use FailureOrigin::{Data, Infrastructure};
    for (code, origin) in [
        (Code::Unavailable, Infrastructure),
        (Code::DeadlineExceeded, Infrastructure),
        (Code::ResourceExhausted, Infrastructure),
        (Code::InvalidArgument, Data),
        (Code::NotFound, Data),
        (Code::FailedPrecondition, Data),
        (Code::Internal, Data),
    ] {
        assert_eq!(FailureOrigin::of(&Error::new(code, Execution::Unknown, "x")), origin, "{code:?}");
    }
    assert_eq!(FailureOrigin::of(&io::Error::from(io::ErrorKind::ConnectionRefused)), Infrastructure);
    assert_eq!(FailureOrigin::of(&io::Error::from(io::ErrorKind::InvalidData)), Data);
    assert_eq!(FailureOrigin::of(&"x".parse::<u32>().unwrap_err()), Data);
}

#[test]
fn c212_statuses_have_an_origin() {
    let of = |statuses: &[u16], origin| statuses.iter().all(|status| FailureOrigin::of_status(*status) == origin);
    assert!(of(&[500, 502, 503, 504, 520, 408, 429], FailureOrigin::Infrastructure));
    assert!(of(&[400, 401, 403, 404, 413, 422], FailureOrigin::Data));
}

#[test]
fn c213_causes_are_searched_eight_deep_and_what_is_said_first_wins() {
    let refused = || Error::unknown(Code::Unavailable, "refused");
    let wrapped = |depth| (0..depth).fold(refused(), |cause, _| Error::internal("wrapper").caused_by(cause));
    assert_eq!(FailureOrigin::of(&wrapped(1)), FailureOrigin::Infrastructure);
    assert_eq!(FailureOrigin::of(&Error::invalid("bad row").caused_by(refused())), FailureOrigin::Data);
    assert_eq!(FailureOrigin::of(&wrapped(7)), FailureOrigin::Infrastructure);
    assert_eq!(FailureOrigin::of(&wrapped(8)), FailureOrigin::Data);
}

#[test]
fn c214_the_fleets_failures_are_waited_out_and_end() {
    let seconds = Duration::from_secs;
    let budgets = RetryBudgets {
        infrastructure_attempts: 6,
        backoff_min: seconds(1),
        backoff_max: seconds(4),
        ..RetryBudgets::default()
    };
    let mut budget = RetryBudget::new(budgets);
    for (after, attempt) in [(1, 2), (2, 3), (4, 4), (4, 5), (4, 6)] {
        let again = Disposition::Again { after: seconds(after), attempt };
        assert_eq!(budget.failed(FailureOrigin::Infrastructure), again);
    }
    let end = budget.failed(FailureOrigin::Infrastructure);
    assert_eq!(end, Disposition::Exhausted(FailureOrigin::Infrastructure));
}

#[test]
fn c215_each_attempt_has_a_number_of_its_own() {
    let mut budget = RetryBudget::new(RetryBudgets { infrastructure_attempts: 3, ..RetryBudgets::default() });
    let next = [FailureOrigin::Infrastructure, FailureOrigin::Data].map(|origin| budget.failed(origin));
    assert!(matches!(next, [Disposition::Again { attempt: 2, .. }, Disposition::Again { attempt: 3, .. }]));
}

#[test]
fn c216_the_datas_failures_are_tried_twice_without_a_pause() {
    let mut budget = RetryBudget::new(RetryBudgets::default());
    let again = Disposition::Again { after: Duration::ZERO, attempt: 2 };
    assert_eq!(budget.failed(FailureOrigin::Data), again);
    assert_eq!(budget.failed(FailureOrigin::Data), Disposition::Exhausted(FailureOrigin::Data));
    let original = Skips::new(0).skip(Error::invalid("row 3 is bad")).unwrap_err();
    assert!(original.code() == Code::InvalidArgument && original.to_string().contains("row 3 is bad"));
}

#[test]
fn c217_the_third_skip_of_two_names_the_budget() {
    let mut skips = Skips::new(2);
    assert!((0..2).all(|_| skips.skip(Error::invalid("bad")).is_ok()));
    let error = skips.skip(Error::invalid("bad")).unwrap_err();
    assert!(error.to_string().contains("the budget of 2 skipped prompts is spent"), "{error}");
}

#[test]
fn a_granted_restart_is_taken_from_the_budget_once() {
    let policy = HealthPolicy { restarts_max: 1, ..HealthPolicy::default() };
    let mut health = RankHealth::starting();
    for event in [HealthEvent::Ready, HealthEvent::Ended, HealthEvent::RestartGranted, HealthEvent::RestartGranted] {
        health.note(event, &policy);
    }
    assert_eq!((health.state(), health.restarts(), health.restart_granted()), (RankState::Dead, 1, true));
    health.note(HealthEvent::RestartBegun, &policy);
    assert_eq!((health.state(), health.restarts(), health.restart_granted()), (RankState::Restarting, 1, false));
    health.note(HealthEvent::RestartGranted, &policy);
    assert_eq!((health.state(), health.restarts()), (RankState::Retired, 1));
}

#[test]
fn a_replaced_replica_is_healthy_and_keeps_its_requests() {
    let mut fleet = fleet(1, HealthPolicy::default());
    fleet.acquire(&Picker::default(), |_, _| true).unwrap();
    (0..3).for_each(|_| fleet.note(0, REQUEST_FAILED));
    assert_eq!(fleet.serving(), Vec::<usize>::new());
    fleet.replace(0);
    assert_eq!((fleet.serving(), fleet.epoch(), fleet.replicas()[0].in_flight), (vec![0], 2, 1));
}

proptest! {
    #[test]
    fn a_rank_that_ended_serves_only_after_a_restart(events in proptest::collection::vec(0_usize..9, 0..60)) {
        let policy = HealthPolicy { restarts_max: 3, ..HealthPolicy::default() };
        let mut health = RankHealth::starting();
        let mut restarted = true;
        for event in events {
            let event = [
                OK,
                FAIL,
                REQUEST_FAILED,
                HealthEvent::Ended,
                HealthEvent::RestartGranted,
                HealthEvent::RestartBegun,
                HealthEvent::Loaded,
                HealthEvent::Refit(7),
                HealthEvent::Ready,
            ][event];
            health.note(event, &policy);
            restarted |= event == HealthEvent::RestartBegun;
            restarted &= event != HealthEvent::Ended;
            prop_assert!(restarted || !health.serves());
            prop_assert!(health.restarts() <= 3);
        }
        health.note(HealthEvent::Stopped, &policy);
        health.note(HealthEvent::Ready, &policy);
        prop_assert_eq!(health.state(), RankState::Stopped);
    }

    #[test]
    fn nothing_leads_from_not_serving_to_serving_but_a_refit(events in proptest::collection::vec(0..7, 0..60)) {
        let mut fleet = fleet(1, HealthPolicy { restarts_max: 3, ..HealthPolicy::default() });
        for event in events {
            let event = match event {
                0 => OK,
                1 | 2 => FAIL,
                3 => REQUEST_FAILED,
                4 => HealthEvent::RestartBegun,
                5 => HealthEvent::Loaded,
                _ => HealthEvent::Refit(7),
            };
            let before = fleet.replicas()[0].health.clone();
            fleet.note(0, event);
            let now = &fleet.replicas()[0].health;
            if !before.serves() && now.serves() {
                prop_assert_eq!(before.state, RankState::Stale);
                prop_assert_eq!(event, HealthEvent::Refit(7));
            }
            prop_assert!(before.state != RankState::Retired || now.state == RankState::Retired);
            prop_assert!(now.restarts <= 3);
        }
    }
}
