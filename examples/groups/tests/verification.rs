//! The examples of verification print what their descriptions say.

use std::process::Command;

fn lines(program: &str) -> Vec<String> {
    let output = Command::new(program).env_remove("RAY_ADDRESS").output().expect("the example is built with its test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text").lines().map(str::to_owned).collect()
}

#[test]
fn wrong_endless_crashing_and_harmful_solutions_have_reward_0_and_one_that_cannot_run_has_none() {
    let lines = lines(env!("CARGO_BIN_EXE_comp_coding"));
    let expected = [
        "right: reward 1",
        r#"wrong for a negative number: reward 0, test 2: printed "14\n" instead of "0\n""#,
        "runs for ever: reward 0, test 1: ended by the limit of CPU time",
        "crashes: reward 0, test 1: exit status: 1: ZeroDivisionError: ",
        "floods its output: reward 0, test 1: ended by the limit of output",
        "kills its parent: reward 0, test 1: signal: 9 (SIGKILL)",
        "stops its parent: reward 0, test 1: ended by the limit of wall time",
        "in a language that no rank has: no reward, Infrastructure: item 7: call judge.score of judges: ",
    ];
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(expected), "{lines:#?}");
    }
    assert!(lines.last().is_some_and(|line| line.starts_with("8 solutions in ")), "{lines:#?}");
}

#[test]
fn every_prompt_has_a_rollout_of_one_of_the_workers() {
    let lines = lines(env!("CARGO_BIN_EXE_rollout_workers"));
    assert_eq!(lines.len(), 3, "{lines:#?}");
    assert_eq!(lines[0], r#"the first answer is "241/45", with reward Ok(Some(1.0))"#);
    assert!(lines[1].starts_with("200 of 200 rollouts with rewards, mean 0.650, by node: "), "{lines:#?}");
}
