use proptest::prelude::*;

use super::*;

fn key(number: u64) -> AffinityKey {
    AffinityKey::of_number(number)
}

fn prompt(number: u64) -> Option<AffinityKey> {
    Some(AffinityKey::of_prompt([&number.to_le_bytes()[..]]))
}

fn loads(pending: &[usize]) -> Vec<Load> {
    pending.iter().enumerate().map(|(index, pending)| Load { index, pending: *pending }).collect()
}

fn at(open: &[Load], index: usize) -> &Load {
    open.iter().find(|load| load.index == index).unwrap()
}

proptest! {
    #[test]
    fn the_bound_holds_after_each_choice(
        spread in 0.0..2.0_f64,
        slack in 0..8_usize,
        steps in proptest::collection::vec((0..40_u64, 0..6_u64, any::<u16>(), 1..8_usize), 1..300),
    ) {
        let options = AffinityOptions { spread, slack, keys_max: 32 };
        let affinity = Affinity::new(options);
        let mut pending = [0_usize; 8];
        for (session, task, away, ends) in steps {
            let open: Vec<_> = loads(&pending).into_iter().filter(|load| away >> load.index & 1 == 0).collect();
            let Some(chosen) = affinity.pick(Some(key(session)), || prompt(task), &open) else {
                prop_assert!(open.is_empty());
                continue;
            };
            let total = open.iter().map(|load| load.pending).sum();
            prop_assert!(at(&open, chosen).pending < options.bound(total, open.len()) || open.len() == 1);
            prop_assert!(affinity.keys() <= 32);
            pending[chosen] += 1;
            // Some calls end.
            if ends > 3 {
                pending[ends] = pending[ends].saturating_sub(2);
            }
        }
    }

    #[test]
    fn a_session_moves_only_when_its_replica_is_above_the_bound(
        calls in proptest::collection::vec((0..50_u64, proptest::collection::vec(0..12_usize, 6)), 1..300),
    ) {
        let affinity = Affinity::default();
        let mut homes = HashMap::new();
        for (session, pending) in calls {
            let chosen = affinity.pick(Some(key(session)), || prompt(session), &loads(&pending)).unwrap();
            let bound = AffinityOptions::default().bound(pending.iter().sum(), 6);
            if let Some(home) = homes.insert(session, chosen) {
                prop_assert_eq!(chosen == home, pending[home] < bound, "{} of {:?}, bound {}", home, pending, bound);
            }
        }
        prop_assert_eq!(affinity.counts().lost, 0);
    }

    #[test]
    fn a_replica_that_leaves_moves_only_its_own_sessions(sessions in 1..200_u64, gone in 0..6_usize) {
        let affinity = Affinity::default();
        let all = loads(&[0; 6]);
        let homes: Vec<_> = (0..sessions).map(|one| affinity.pick(Some(key(one)), || None, &all).unwrap()).collect();
        let rest: Vec<_> = all.iter().copied().filter(|load| load.index != gone).collect();
        for (one, home) in (0..sessions).zip(&homes) {
            let chosen = affinity.pick(Some(key(one)), || None, &rest).unwrap();
            prop_assert!(chosen != gone && (chosen == *home || *home == gone));
            // The move is final: it stays there when the replica is back.
            prop_assert_eq!(affinity.pick(Some(key(one)), || None, &all), Some(chosen));
        }
        let lost = homes.iter().filter(|home| **home == gone).count();
        prop_assert_eq!(affinity.counts().lost, lost as u64);
    }
}

#[test]
fn the_sessions_of_a_replica_that_leaves_spread_over_all_others() {
    let affinity = Affinity::default();
    let all = loads(&[0; 6]);
    let of_first: Vec<_> = (0..3_000).filter(|one| affinity.pick(Some(key(*one)), || None, &all) == Some(0)).collect();
    let mut moved = [0; 6];
    of_first.iter().for_each(|one| moved[affinity.pick(Some(key(*one)), || None, &all[1..]).unwrap()] += 1);
    for count in &moved[1..] {
        assert!((of_first.len() / 10..of_first.len() * 3 / 10).contains(count), "{moved:?} of {}", of_first.len());
    }
}

#[test]
fn only_the_sessions_above_the_bound_move_and_they_do_not_return() {
    let affinity = Affinity::new(AffinityOptions { spread: 0.5, slack: 0, ..AffinityOptions::default() });
    let home = affinity.pick(Some(key(1)), || None, &loads(&[0; 3])).unwrap();
    let with = |pending| loads(&[0, 1, 2].map(|index| if index == home { pending } else { 4 }));
    // The bound is 7: one and a half times the mean of 13 calls, rounded up.
    assert_eq!(affinity.pick(Some(key(1)), || None, &with(6)), Some(home));
    let moved = affinity.pick(Some(key(1)), || None, &with(9)).unwrap();
    assert_ne!(moved, home);
    assert_eq!(affinity.pick(Some(key(1)), || None, &with(0)), Some(moved));
    assert_eq!(
        affinity.counts(),
        AffinityCounts { hits: 2, sheds: 1, lost: 0, placed: 1, skew: affinity.counts().skew }
    );
}

#[test]
fn the_attempts_at_a_prompt_share_a_replica_and_what_exceeds_it_shares_the_next() {
    let affinity = Affinity::default();
    let mut pending = vec![20; 12];
    for session in 0..30 {
        let chosen = affinity.pick(Some(key(session)), || prompt(1), &loads(&pending)).unwrap();
        pending[chosen] += 1;
    }
    let bound = AffinityOptions::default().bound(20 * 12 + 29, 12);
    assert!(pending.iter().all(|calls| *calls <= bound), "{pending:?}, bound {bound}");
    // Three replicas have room for ten more each. The bound rises with the calls, so the fourth may have got one meanwhile.
    assert!((3..=4).contains(&pending.iter().filter(|calls| **calls > 20).count()), "{pending:?}, bound {bound}");
    assert_eq!(affinity.counts().placed, 1);
}

#[test]
fn an_idle_replica_gets_at_most_twice_its_share_of_new_sessions() {
    let affinity = Affinity::new(AffinityOptions { spread: 1.0, ..AffinityOptions::default() });
    let mut pending = vec![20; 12];
    pending[7] = 0;
    let open = loads(&pending);
    let to_idle = (0..12_000).filter(|one| affinity.pick(Some(key(*one)), || prompt(*one), &open) == Some(7)).count();
    assert!((1_700..2_300).contains(&to_idle), "{to_idle} of 12,000, a twelfth is 1,000");
}

#[test]
fn memory_is_bounded_and_a_key_in_use_is_not_forgotten() {
    let affinity = Affinity::new(AffinityOptions { keys_max: 100, ..AffinityOptions::default() });
    let open = loads(&[0; 12]);
    let home = affinity.pick(Some(key(0)), || None, &open);
    for other in 1..10_000 {
        assert!(affinity.pick(Some(key(other)), || None, &open).is_some());
        assert!(affinity.keys() <= 100);
        if other % 20 == 0 {
            assert_eq!(affinity.pick(Some(key(0)), || None, &open), home);
        }
    }
    assert_eq!(affinity.counts().hits, 499);
}

#[test]
fn with_one_replica_nothing_is_read_and_nothing_is_remembered() {
    let affinity = Affinity::default();
    let chosen = affinity.pick(Some(key(1)), || unreachable!("the prompt is not needed"), &loads(&[9]));
    assert_eq!((chosen, affinity.keys(), affinity.counts()), (Some(0), 0, AffinityCounts::default()));
}

#[test]
fn options_without_sense_still_leave_a_replica_with_room() {
    for spread in [f64::NAN, f64::NEG_INFINITY, -1.0, f64::INFINITY] {
        let affinity = Affinity::new(AffinityOptions { spread, slack: 0, keys_max: 0 });
        assert!(affinity.pick(Some(key(1)), || prompt(1), &loads(&[3, 3, 3])).is_some(), "{spread}");
    }
}

#[test]
fn a_conversation_keeps_its_prompt_s_key_and_other_prompts_have_others() {
    let of = |text: &str| AffinityKey::of_request(&RawObject::parse(text.to_owned()).unwrap());
    let first = of(
        r#"{"instructions":"s","input":[{"role":"developer","content":"d"},{"role":"user","content":"2+2?"}],"seed":1}"#,
    );
    let later = of(
        r#"{"instructions":"s","input":[{"role":"developer","content":"d"},{"role":"user","content":"2+2?"},{"type":"function_call"},{"role":"user","content":"x"}],"seed":2}"#,
    );
    assert!(first.is_some());
    assert_eq!(first, later);
    let others = [
        r#"{"instructions":"t","input":[{"role":"developer","content":"d"},{"role":"user","content":"2+2?"}]}"#,
        r#"{"instructions":"s","input":[{"role":"developer","content":"e"},{"role":"user","content":"2+2?"}]}"#,
        r#"{"instructions":"s","input":[{"role":"developer","content":"d"},{"role":"user","content":"2+3?"}]}"#,
        r#"{"input":"2+2?"}"#,
        r#"{"messages":[{"role":"user","content":"2+2?"}]}"#,
        r#"{"messages":[{"content":7}, 3]}"#,
    ];
    let keys: std::collections::HashSet<_> = others.iter().map(|text| of(text).unwrap()).chain(first).collect();
    assert_eq!(keys.len(), others.len() + 1);
    for none in ["{}", r#"{"input":[]}"#, r#"{"input":7}"#, r#"{"messages":{"a":1}}"#] {
        assert_eq!(of(none), None, "{none}");
    }
}
