//! Cases about collections: the servers that they use, failures, and earlier results.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use crate::fixture::{Started, TASKS, TestFolder, ended_with, open_gate, row, said_until};

pub(crate) fn collect_uses_the_servers_that_run() {
    let folder = TestFolder::new();
    folder.tasks((0..20).map(|number| row("01234", number)));
    let started = folder.start(&[]);
    let (out, error) = ended_with(
        &folder.run(&[
            "ng_collect_rollouts",
            "+agent_name=digit_agent",
            "+input_jsonl_fpath=tasks.jsonl",
            "+output_jsonl_fpath=out/rollouts.jsonl",
            "+num_repeats=3",
            "+num_repeats_add_seed=true",
            "+num_samples_in_parallel=8",
            "+limit=10",
            &folder.port(),
        ]),
        0,
    );
    assert!(out.contains("30 of 30 rollouts are recorded"), "{out}{error}");
    assert!(out.contains("digit_agent") && out.contains("out/rollouts.jsonl"), "{out}");
    let rollouts = folder.rollouts();
    assert_eq!(rollouts.len(), 30);
    assert!(rollouts.iter().any(|row| row["reward"] == 1.0) && rollouts.iter().any(|row| row["reward"] == 0.0));
    assert!(folder.file("out/rollouts_aggregate_metrics.json").is_file(), "{out}{error}");

    let unknown = ["collect", "-a", "digit_agnet", "-i", "tasks.jsonl", "-o", "o.jsonl", "--head-url", &folder.head()];
    let (_, error) = ended_with(&folder.run(&unknown), 2);
    assert!(error.contains("digit_agent"), "{error}");
    let broken = folder.file("broken.jsonl");
    std::fs::write(&broken, "{}\n{\"a\": \n").unwrap();
    let broken = ["collect", "-a", "digit_agent", "-i", "broken.jsonl", "-o", "o.jsonl", "--head-url", &folder.head()];
    let (_, error) = ended_with(&folder.run(&broken), 2);
    assert!(error.contains("broken.jsonl"), "{error}");
    assert_eq!(started.interrupt(), Some(0));
}

pub(crate) fn collect_brings_its_own_servers() {
    let folder = TestFolder::new();
    folder.tasks((0..10).map(|number| row("0123456789", number)));
    let port = folder.port();
    let arguments = [&["eval", "run", "--config", "gym.yaml", &port], &TASKS[..]].concat();
    let (out, error) = ended_with(&folder.run(&[&arguments[..], &["--progress", "plain"]].concat()), 0);
    assert!(out.contains("10 of 10 rollouts are recorded"), "{out}{error}");
    assert!(folder.rollouts().iter().all(|row| row["reward"] == 1.0));
    assert!(out.contains("transports: mem "), "{out}");
    assert!(error.contains(&format!("started 4 servers for this collection, head {}", folder.head())), "{error}");
    let (out, _) = ended_with(&folder.run(&[&arguments[..], &["--resume"]].concat()), 0);
    assert!(out.contains("(10 of them by earlier runs)"), "{out}");
    assert_eq!(folder.rollouts().len(), 10);
}

/// What a collection refuses: the rows, the options, and the error.
pub(crate) fn mistakes_in_rows_and_options_are_found_before_the_first_rollout() {
    let folder = TestFolder::new();
    let row_with = |params: &str| format!("{{\"responses_create_params\": {params}, \"digits\": \"0\"}}\n");
    let good = row_with(r#"{"input": "x"}"#);
    let second = |params: &str| format!("{good}{}", row_with(params));
    for (rows, options, starts, error) in [
        (
            second(r#"{"messages": []}"#),
            &[][..],
            false,
            "tasks.jsonl, line 2: responses_create_params.messages: unknown key; write `input`",
        ),
        (
            second(r#"{"input": "x", "temprature": 1}"#),
            &[],
            false,
            "line 2: responses_create_params.temprature: unknown key; did you mean `temperature`?",
        ),
        (
            second(r#"{"input": [{"role": "usr", "content": "x"}]}"#),
            &[],
            false,
            "input[0].role: \"usr\" is no role; did you mean `user`?",
        ),
        (
            second(r#"{"input": "x", "stop": "."}"#),
            &[],
            false,
            "line 2: responses_create_params.stop: unknown key; the Responses API has",
        ),
        (
            second(r#"{"input": "x", "temperature": "hot"}"#),
            &[],
            false,
            "line 2: responses_create_params.temperature is a string: \"hot\"; write a number, such as 0.7",
        ),
        (
            second(r#"{"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}"#),
            &[],
            false,
            "line 2: responses_create_params.tools[0] has the form of chat completions; move name",
        ),
        (
            second(r#"{"input": []}"#),
            &[],
            false,
            "line 2: responses_create_params.input is an empty list; add a message",
        ),
        (
            "{\"response_create_params\": {\"input\": \"x\"}, \"digits\": \"0\"}\n".to_owned(),
            &[],
            false,
            "line 1: responses_create_params is missing; rename `response_create_params`, which is misspelled",
        ),
        (
            "digits,question\n0,x\n".to_owned(),
            &[],
            false,
            "the input is a table of comma-separated values (digits, question)",
        ),
        (
            "{\"responses_create_params\": {\"input\": \"x\"}, \"digits\": 7}\n".to_owned(),
            &[],
            true,
            "line 1: resources server `digit`: the row does not fit the task",
        ),
        (
            second(r#"{"input": "x", "temperature": -5}"#),
            &[],
            false,
            "line 2: responses_create_params.temperature is a number: -5; write 0 or more, such as 0.7",
        ),
        (
            second(r#"{"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}"#),
            &[],
            false,
            "line 2: responses_create_params.input[0].content[0].type is \"text\"; write `input_text`",
        ),
        (good.clone(), &["--temperature", "-1"], false, "'-1' for '--temperature <X>': write 0 or more"),
        (good.clone(), &["--top-p", "3"], false, "'3' for '--top-p <X>': write a number from 0 to 1"),
        (
            good.clone(),
            &["--max-output-tokens", "-1"],
            false,
            "'-1' for '--max-output-tokens <N>': write a whole number of at least 1",
        ),
        (
            good.clone(),
            &["++responses_create_params.temperature=-5"],
            false,
            "responses_create_params.temperature: the value is a number: -5\n  fix: write 0 or more",
        ),
        (good.clone(), &["--num-repeats", "0"], false, "num_repeats: must be at least 1, got 0; use 1 or more"),
        (good.clone(), &["+num_repeats={digit_agent: 0}"], false, "num_repeats.digit_agent: must be at least 1, got 0"),
        (good.clone(), &["--input", "task.jsonl"], false, "task.jsonl: cannot read the input: No such file"),
        (String::new(), &[], false, "tasks.jsonl: the file is empty"),
        ("\n\n".to_owned(), &[], false, "line 1: the line is blank"),
        (
            format!("[{}]\n", good.trim()),
            &[],
            false,
            "line 1: the line is a JSON array; write one JSON object on each line",
        ),
        ("{\n  \"a\": 1\n}\n".to_owned(), &[], false, "line 1: the object goes on in the next line"),
        (
            good.clone(),
            &["--agent", "digit_agnet"],
            false,
            "there is no agent `digit_agnet`; did you mean `digit_agent`?",
        ),
    ] {
        std::fs::write(folder.file("tasks.jsonl"), &rows).unwrap();
        let mut command = vec!["collect", "--config", "gym.yaml", "--progress", "none", "-o", "out/rollouts.jsonl"];
        for default in [["--input", "tasks.jsonl"], ["--agent", "digit_agent"]] {
            if !options.contains(&default[0]) {
                command.extend(default);
            }
        }
        command.extend(options);
        let (out, said) = ended_with(&folder.run(&command), 2);
        assert!(said.contains(error) && out.is_empty(), "{rows}: '{error}' is not in:\n{said}{out}");
        assert_eq!(said.contains("started 4 servers"), starts, "{rows}: {said}");
        assert!(!folder.file("out/rollouts_failures.jsonl").exists(), "{rows}: nothing was tried");
    }
}

pub(crate) fn collect_takes_a_free_port_for_its_own_head() {
    let folder = TestFolder::new();
    folder.tasks([row("0123456789", 0)]);
    let (_, error) = ended_with(&folder.collect(&["--config", "gym.yaml"]).output().unwrap(), 0);
    let head =
        error.lines().find_map(|line| line.strip_prefix("started 4 servers for this collection, head ")).unwrap();
    let (head, page) = head.split_once("; its page is ").unwrap();
    assert_eq!(page, format!("{head}/ui"));
    let port: u16 = head.rsplit_once(':').unwrap().1.parse().unwrap();
    assert!((10_001..=20_000).contains(&port) && port != 11_000, "a port of the range, and not that of `run`: {head}");
}

pub(crate) fn a_failed_rollout_ends_with_3() {
    let folder = TestFolder::new();
    let mut rows: Vec<_> = (0..3).map(|number| row("0123456789", number)).collect();
    // The verifier has an error for this task.
    rows[1] = row("", 1);
    folder.tasks(rows);
    let mut collect = folder.collect(&["--config", "gym.yaml", &folder.port(), "--attempts", "1"]);
    let (out, error) = ended_with(&collect.output().unwrap(), 3);
    assert!(out.contains("2 of 3 rollouts are recorded, 1 failed") && out.contains("verifier_error"), "{out}");
    assert!(error.contains("out/rollouts_failures.jsonl") && error.contains("--resume"), "{error}");
    for words in [
        "1 x verifier_error in digit/verify; the first: task 1, repeat 0",
        "POST digit/verify",
        "the task has no digits to choose from",
    ] {
        assert!(out.contains(words), "{words}: {out}");
    }
    assert!(!out.contains('\\'), "an error in readable form: {out}");
}

pub(crate) fn a_collection_in_which_all_fails_alike_stops_and_says_how_to_go_on() {
    let folder = TestFolder::new();
    folder.tasks((0..50).map(|number| row("", number)));
    let port = folder.port();
    let collect = |options: &[&str]| {
        let options = [&["--config", "gym.yaml", "--concurrency", "2", "--attempts", "1", &port], options].concat();
        ended_with(&folder.collect(&options).output().unwrap(), 3)
    };
    let failures = || std::fs::read_to_string(folder.file("out/rollouts_failures.jsonl")).unwrap().lines().count();
    let (out, error) = collect(&[]);
    let recorded = failures();
    assert!((32..=33).contains(&recorded), "{recorded}: {out}");
    for words in
        [&format!("stopped because {recorded} rollouts failed, all with the same cause"), "--resume --fail-fast 0"]
    {
        assert!(error.contains(words), "{error}");
    }
    let (out, _) = collect(&["--resume", "--fail-fast", "0"]);
    assert!(out.contains("0 of 50 rollouts are recorded, 50 failed"), "{out}");
    assert_eq!(failures(), 50);
    let (_, error) = collect(&["--overwrite", "--fail-fast", "3"]);
    assert!(error.contains("stopped because") && (3..=5).contains(&failures()), "{error}");
}

pub(crate) fn a_stopped_collection_goes_on_where_it_was() {
    let folder = TestFolder::new();
    let gate = folder.gate();
    let mut rows: Vec<_> = (0..6).map(|number| row("0123456789", number)).collect();
    for row in &mut rows[3..] {
        row["wait_for"] = serde_json::json!(gate);
    }
    folder.tasks(rows);
    let port = folder.port();
    let collect = || folder.collect(&["--config", "gym.yaml", "--stop-grace", "0.2", "--progress", "plain", &port]);
    // An event says that its row is on the disk.
    let mut first = collect();
    first.args(["--events", "/dev/stdout"]);
    let child = first.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut started = Started { child, said: Vec::new() };
    let mut events = BufReader::new(started.child.stdout.take().unwrap()).lines();
    (0..3).for_each(|_| drop(said_until(&mut events, r#""event":"finished""#)));
    started.signal(rustix::process::Signal::INT);
    assert_eq!(started.child.wait().unwrap().code(), Some(3));
    let mut said = String::new();
    started.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("stopping: ") && said.contains("rollouts in flight may take up to 200ms"), "{said}");
    assert!(said.contains("stopped with 3 rollouts incomplete") && said.contains("--resume"), "{said}");

    let _open = open_gate(&gate);
    let (out, _) = ended_with(&collect().arg("--resume").output().unwrap(), 0);
    assert!(out.contains("6 of 6 rollouts are recorded (3 of them by earlier runs)"), "{out}");
    assert_eq!(folder.rollouts().len(), 6);
}

pub(crate) fn results_and_inputs_are_replaced_only_if_asked() {
    let folder = TestFolder::new();
    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let port = folder.port();
    let served = ["--config", "gym.yaml", &port];
    ended_with(&folder.collect(&served).output().unwrap(), 0);
    let recorded = folder.contents();

    let (_, error) = ended_with(&folder.collect(&[&served[..], &["--limit", "1"]].concat()).output().unwrap(), 2);
    for words in ["out/rollouts.jsonl exists", "--resume", "--overwrite"] {
        assert!(error.contains(words), "{error}");
    }
    std::fs::hard_link(folder.file("tasks.jsonl"), folder.file("link.jsonl")).unwrap();
    std::fs::copy(folder.file("tasks.jsonl"), folder.file("own_materialized_inputs.jsonl")).unwrap();
    for (input, output) in
        [("tasks.jsonl", "tasks.jsonl"), ("tasks.jsonl", "link.jsonl"), ("own_materialized_inputs.jsonl", "own.jsonl")]
    {
        let line = ["collect", "-a", "digit_agent", "-i", input, "-o", output, "--overwrite"];
        let (_, error) = ended_with(&folder.run(&[&line[..], &served].concat()), 2);
        assert!(error.contains("are the same file") && error.contains(input), "{error}");
        assert_eq!(std::fs::read(folder.file(input)).unwrap(), recorded["tasks.jsonl"]);
    }
    for file in ["link.jsonl", "own_materialized_inputs.jsonl"] {
        std::fs::remove_file(folder.file(file)).unwrap();
    }
    // What no collection has written, and what another one needs.
    std::fs::copy(folder.file("tasks.jsonl"), folder.file("other.jsonl")).unwrap();
    let shared = "out/rollouts.json: out/rollouts.jsonl is an output whose other files, such as out/rollouts_materialized_inputs.jsonl";
    for existing in ["--overwrite", "--resume"] {
        for (output, events, expected) in [
            (
                "other.jsonl",
                "events.jsonl",
                "other.jsonl: this file is no output of a collection: its first line has no",
            ),
            (
                "new.jsonl",
                "other.jsonl",
                "other.jsonl: this file is no events file of a collection (--events): its first",
            ),
            ("out/rollouts.json", "events.jsonl", shared),
        ] {
            let line =
                ["collect", "-a", "digit_agent", "-i", "tasks.jsonl", "-o", output, "--events", events, existing];
            let (_, error) = ended_with(&folder.run(&[&line[..], &served].concat()), 2);
            assert!(error.contains(expected) && error.contains("fix: name another"), "{error}");
        }
    }
    std::fs::remove_file(folder.file("other.jsonl")).unwrap();
    assert!(folder.contents() == recorded, "a rejected collection changed a file");

    let said = "out/rollouts.jsonl: this run replaces the results of an earlier one";
    let (_, error) = ended_with(&folder.run(&[&["eval", "run", "--limit", "2"], &TASKS[..], &served].concat()), 0);
    assert!(error.contains(said), "{error}");
    assert_eq!(folder.rollouts().len(), 2);
    let overwriting = folder.collect(&[&served[..], &["--limit", "1", "--overwrite"]].concat()).output().unwrap();
    assert!(ended_with(&overwriting, 0).1.contains(said));
    assert_eq!(folder.rollouts().len(), 1);
}

pub(crate) fn a_resumed_collection_may_grow_but_not_change() {
    let folder = TestFolder::new();
    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let port = folder.port();
    let resumed = |options: &[&str], status: i32| {
        let options = [&["--config", "gym.yaml", &port], options].concat();
        ended_with(&folder.collect(&options).arg("--resume").output().unwrap(), status)
    };
    // There is nothing to resume yet.
    resumed(&["--limit", "3"], 0);
    let (out, _) = resumed(&["--num-repeats", "2", "--concurrency", "1", "--attempts", "1"], 0);
    assert!(out.contains("10 of 10 rollouts are recorded (3 of them by earlier runs)"), "{out}");
    assert_eq!(folder.rollouts().len(), 10);
    let recorded = folder.contents();

    let all = &["--num-repeats", "2"][..];
    for (options, changed) in [
        (
            &[all, &["--limit", "3"]].concat()[..],
            "fewer tasks: not requested any more are 4 rows, first in line 7: task 3",
        ),
        (&[], "fewer repeats: not requested any more are 5 rows"),
        (
            &[all, &["--temperature", "0.5"]].concat(),
            "responses_create_params.temperature: was absent, is 0.5 (10 rows",
        ),
        (&[all, &["--add-seed"]].concat(), "responses_create_params.metadata: was absent, is {\"extra_body\""),
    ] {
        let (_, error) = resumed(options, 2);
        assert!(error.contains(changed) && error.contains("out/rollouts_materialized_inputs.jsonl"), "{error}");
    }
    assert!(folder.contents() == recorded, "a rejected collection changed a file");
    folder.tasks((0..5).map(|number| row("0123456789", number + 7)));
    let (_, error) = resumed(all, 2);
    assert!(error.contains("task 0, repeat 0"), "{error}");

    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let (out, _) = resumed(&[all, &["--concurrency", "3", "--interleave-repeats"]].concat(), 0);
    assert!(out.contains("10 of 10 rollouts are recorded (10 of them by earlier runs)"), "{out}");
    assert!(folder.contents()["out/rollouts.jsonl"] == recorded["out/rollouts.jsonl"], "a row was added or changed");
}
