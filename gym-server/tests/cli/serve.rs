//! Cases about programs that serve: they announce themselves, and stop on a signal.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::Stdio;

use crate::fixture::{CONFIG, SERVICES, Started, TASKS, TestFolder, ended_with, get, row, said_until, until};

pub(crate) fn run_announces_serves_and_stops_in_order() {
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let folder = TestFolder::new();
        let mut started = folder.start(&[]);
        let ready = started.said.last().unwrap();
        assert_eq!(*ready, format!("ready: 4 servers, head {}", folder.head()));
        for name in ["head_server"].into_iter().chain(SERVICES) {
            assert!(started.said.iter().any(|line| line.split_whitespace().next() == Some(name)), "{:?}", started.said);
        }
        let health = get(folder.head_port, "/health");
        assert!(health.starts_with("HTTP/1.1 200") && health.contains(r#"{"status":"ok"}"#), "{health}");

        folder.status_until(|status| {
            let servers = status["servers"].as_array().unwrap();
            assert_eq!(servers.len(), 4);
            servers.iter().all(|server| server["healthy"] == true && server["in_flight"] == 0)
        });
        folder.says_in_the_end(&["ng_status", &folder.port()], "4 of 4 servers healthy");

        started.signal(signal);
        assert_eq!(started.child.wait().unwrap().code(), Some(0));
        assert!(TcpStream::connect(("127.0.0.1", folder.head_port)).is_err(), "the head has gone");
    }
}

/// A Ray cluster that does not respond hides nothing of the rest.
pub(crate) fn status_and_workers_show_the_ray_cluster_of_the_configuration() {
    let folder = TestFolder::new();
    let _started = folder.start(&[]);
    for (command, rest) in [("status", "4 of 4 servers healthy"), ("workers", "no worker has joined")] {
        let port = folder.port();
        let mut command = folder.command(&[command, &port]);
        command.env("RAY_ADDRESS", "http://127.0.0.1:1");
        let text = until(|| {
            let (text, _) = ended_with(&command.output().unwrap(), 0);
            if text.contains(rest) { Ok(text) } else { Err(text) }
        });
        let ray = "Ray at http://127.0.0.1:1, address http://127.0.0.1:1 (RAY_ADDRESS): ";
        assert!(text.contains(ray) && text.contains("does not respond") && text.contains("fix: "), "{text}");
        let (text, _) = ended_with(&command.env_remove("RAY_ADDRESS").output().unwrap(), 0);
        assert!(!text.contains("Ray"), "{text}");
    }
}

/// Each server in a file of its own: the head knows the rest.
pub(crate) fn a_check_asks_the_head_for_servers_that_no_file_defines() {
    let folder = TestFolder::new();
    let (_, agent) = CONFIG.split_once("digit_agent:").unwrap();
    std::fs::write(folder.file("agent.yaml"), format!("digit_agent:{agent}")).unwrap();
    let head = folder.head();
    let check = ["config", "check", "agent.yaml", "--head-url", &head];
    let (_, error) = ended_with(&folder.run(&check), 2);
    assert!(error.contains("names 'digit' of resources_servers, which no file defines"), "{error}");
    assert!(
        error.contains(&format!(
            "name that file too, or the head server that knows it with --head-url ({head} does not"
        )),
        "{error}"
    );

    let _started = folder.start(&[]);
    let (out, _) = ended_with(&folder.run(&check), 0);
    assert!(
        out.contains(&format!("digit, policy_model: not in these files, known to the head server {head}")),
        "{out}"
    );
    assert!(out.contains("ok: 2 servers from 1 file"), "{out}");
    std::fs::write(folder.file("agent.yaml"), format!("digit_agent:{agent}").replace("name: digit", "name: digot"))
        .unwrap();
    let (_, error) = ended_with(&folder.run(&check), 2);
    assert!(error.contains("did you mean 'digit'?") && error.contains("has no such server either"), "{error}");
}

/// An agent that waits for replies, on an environment with tools.
pub(crate) fn an_agent_that_cannot_play_the_environment_is_told_before_anything_starts() {
    let folder = TestFolder::new();
    folder.tasks([row("0", 0)]);
    std::fs::write(folder.file("gym.yaml"), CONFIG.replace("simple_agent", "gymnasium_agent")).unwrap();
    for command in [&["config", "check", "gym.yaml"][..], &[&["collect", "--config", "gym.yaml"], &TASKS[..]].concat()]
    {
        let (_, error) = ended_with(&folder.run(command), 2);
        let expected = "gym.yaml:14: digit_agent.responses_api_agents.gymnasium_agent.resources_server: 'digit' is an environment that has tools";
        assert!(
            error.contains(expected) && error.contains("fix: write simple_agent in the place of gymnasium_agent"),
            "{error}"
        );
    }
}

pub(crate) fn a_second_signal_stops_at_once() {
    let folder = TestFolder::new();
    let port = folder.port();
    let mut run = folder.command(&["run", "--config", "gym.yaml", &port, "--stop-grace", "600"]);
    let child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut started = Started { child, said: Vec::new() };
    let mut out = BufReader::new(started.child.stdout.take().unwrap()).lines();
    said_until(&mut out, "ready: ");
    let mut hanging = row("", 0);
    // It stays closed.
    hanging["wait_for"] = serde_json::json!(folder.gate());
    folder.tasks([hanging]);
    let mut collect = folder.collect(&["--head-url", &folder.head()]);
    let _collector = Started { child: collect.stderr(Stdio::null()).spawn().unwrap(), said: Vec::new() };
    folder.status_until(|status| {
        let servers = status["servers"].as_array().unwrap();
        servers.iter().any(|server| server["name"] == "digit" && server["in_flight"] == 1)
    });
    started.signal(rustix::process::Signal::INT);
    let mut error = BufReader::new(started.child.stderr.take().unwrap()).lines();
    said_until(&mut error, "repeat the signal to stop at once");
    started.signal(rustix::process::Signal::INT);
    assert_eq!(started.child.wait().unwrap().code(), Some(1));
}

pub(crate) fn servers_are_reached_at_an_ipv6_address() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        println!("NOT RUN: this machine has no IPv6");
        return;
    }
    let folder = TestFolder::new();
    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let started = folder.start(&["++default_host=::1", "++head_server.host=\"[::1]\""]);
    let head = format!("http://[::1]:{}", folder.head_port);
    assert!(started.said.last().unwrap().ends_with(&format!("head {head}")), "{:?}", started.said);
    assert!(
        started.said.iter().any(|line| line.contains("http://[::1]:") && line.contains("digit")),
        "{:?}",
        started.said
    );
    ended_with(&folder.collect(&["--head-url", &head]).output().unwrap(), 0);
    assert_eq!(folder.rollouts().len(), 5);
    assert_eq!(started.interrupt(), Some(0));
}

pub(crate) fn services_run_in_processes_of_their_own() {
    let folder = TestFolder::new();
    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let head = folder.start(&["--serve", "head_server"]);
    assert_eq!(*head.said.last().unwrap(), format!("ready: 0 servers, head {}", folder.head()));
    let services = folder.start_services(&[]);
    assert!(services.iter().all(|service| service.said.last().unwrap().starts_with("ready: 1 servers, head ")));
    ended_with(&folder.collected(&[]), 0);
    assert_eq!(folder.rollouts().len(), 5);
    for service in services {
        assert_eq!(service.interrupt(), Some(0));
    }
    let (out, _) = ended_with(&folder.run(&["status", "--head-url", &folder.head()]), 0);
    assert!(out.contains("0 of 0 servers healthy"), "who stops lets go of its lease: {out}");
    assert_eq!(head.interrupt(), Some(0));
}
