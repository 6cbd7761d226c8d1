//! Connecting: a dashboard that refuses, is silent, is another server, or requires a token.

use std::ffi::OsStr;
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::{CallContext, Code, Error};
use gym_group::ray::{RayAddress, RayDashboard};
use tokio::net::TcpSocket;
use tokio::time::Instant;

use super::fake::{Answer, Fake, LONG, VERSION, no_room};
use super::process::{own_program, process};

fn cx() -> CallContext {
    CallContext::within(LONG)
}

async fn refused(cx: &CallContext, address: &RayAddress) -> Error {
    RayDashboard::connect(cx, address).await.map(|(_, version)| version).expect_err("there is no cluster")
}

/// Case 6.
#[tokio::test]
async fn a_dashboard_that_refuses_the_connection_is_named_with_the_fix() {
    // Bound, so that nobody else gets the port, and not listening.
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let url = format!("http://{}", socket.local_addr().expect("an address"));
    let address = RayAddress::parse(&url, "env.yaml:3").expect("an address");
    let error = refused(&cx(), &address).await;
    assert_eq!(error.code(), Code::Unavailable);
    let text = error.to_string();
    for part in [&*url, "env.yaml:3", "refused", "fix: ", "--dashboard-host=0.0.0.0", "ray_dashboard_address"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// Case 6: a machine that drops packets, or a port of something else.
#[tokio::test(start_paused = true)]
async fn a_silent_port_ends_with_the_deadline_of_the_caller_or_by_itself() {
    let fake = Fake::start().await;
    fake.before(|_| Some(Answer::Never));
    for (limit, expected) in [(0.3, 0.3..0.5), (3_600.0, 5.0..30.0)] {
        let begin = Instant::now();
        let error = refused(&CallContext::within(Duration::from_secs_f64(limit)), &fake.address()).await;
        let took = begin.elapsed().as_secs_f64();
        assert!(expected.contains(&took), "{took} s of {limit} s");
        assert_eq!(error.code(), Code::DeadlineExceeded);
        let text = error.to_string();
        assert!(text.contains(&fake.url()) && text.contains("--dashboard-host=0.0.0.0"), "{text}");
    }
}

#[tokio::test]
async fn another_server_is_not_taken_for_rays_dashboard() {
    let fake = Fake::start().await;
    for answer in [
        Answer::html(200, "<!doctype html>\n<html><body>It works!</body>\n</html>\n"),
        Answer::text(200, "{\"status\":\"ok\"}"),
        Answer::text(200, ""),
    ] {
        let given = answer.clone();
        fake.before(move |_| Some(given.clone()));
        let error = refused(&cx(), &fake.address()).await;
        assert_eq!(error.code(), Code::FailedPrecondition, "{answer:?}: {error}");
        let text = error.to_string();
        assert!(text.contains(&fake.url()) && text.contains("is not that of Ray's dashboard"), "{answer:?}: {text}");
    }
    assert_eq!(fake.lines(), [VERSION; 3], "such an answer is final");
}

/// A server without such a page is not Ray's dashboard either.
#[tokio::test]
async fn another_server_without_such_a_page_is_not_taken_for_rays_dashboard() {
    let fake = Fake::start().await;
    let page = "<html>\r\n<head><title>404 Not Found</title></head>\r\n<body>\r\n<h1>404 Not Found</h1>\r\n</body>\r\n</html>\r\n";
    fake.before(move |_| Some(Answer::html(404, page)));
    let text = refused(&cx(), &fake.address()).await.to_string();
    assert!(text.contains(&fake.url()) && text.contains("Ray's dashboard"), "{text}");
}

/// The other ports of a head speak gRPC, and Redis its own protocol.
#[tokio::test]
async fn a_port_that_speaks_no_http_is_not_taken_for_rays_dashboard() {
    let fake = Fake::start().await;
    for bytes in [&b"\0\0\x06\x04\0\0\0\0\0\0\x05\0\0@\0"[..], b"-ERR wrong number of arguments for 'get' command\r\n"]
    {
        fake.before(move |_| Some(Answer::Raw(bytes)));
        let text = refused(&cx(), &fake.address()).await.to_string();
        assert!(text.contains(&fake.url()) && text.contains("not HTTP") && text.contains("Ray's dashboard"), "{text}");
    }
}

/// Case 8.
#[tokio::test]
async fn another_version_of_the_interface_is_accepted() {
    let fake = Fake::start().await;
    fake.with(|cluster| cluster.version = "5");
    let (dashboard, version) = RayDashboard::connect(&cx(), &fake.address()).await.expect("goes on");
    assert_eq!((&*version.version, &*version.ray_version), ("5", "2.60.0"));
    assert_eq!(dashboard.address().dashboard(), fake.url());
    assert_eq!(dashboard.nodes(&cx()).await.expect("lists").len(), 4);
}

const TOKEN: &str = "0123456789abcdef-the-right-token";
const OTHER: &str = "fedcba9876543210-another-token";

/// Case 7.
#[tokio::test]
async fn a_missing_token_and_a_wrong_one_are_distinguished_and_no_token_is_shown() {
    let fake = Fake::start().await;
    fake.with(|cluster| cluster.token = Some(TOKEN));
    let said = process(&fake, &own_program(), &[]).await;
    assert!(said.contains("code FailedPrecondition") && said.contains("requires a token"), "{said}");
    for source in ["this process has none", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token", &*fake.url()]
    {
        assert!(said.contains(source), "{source} is not in: {said}");
    }
    let said = process(&fake, &own_program(), &[("RAY_AUTH_TOKEN", OTHER.as_ref())]).await;
    assert!(said.contains("code FailedPrecondition"), "{said}");
    assert!(said.contains("rejects the token from RAY_AUTH_TOKEN\n") && said.contains(&fake.url()), "{said}");
    assert!(!said.contains("requires a token") && !said.contains(OTHER) && !said.contains(&OTHER[..16]), "{said}");
    // Neither is repeated: the answer would be the same.
    let sent = fake.with(|cluster| cluster.requests.iter().map(|seen| seen.authorization.clone()).collect::<Vec<_>>());
    assert_eq!(sent, [None, Some(format!("Bearer {OTHER}"))]);
}

/// Case 7.
#[tokio::test]
async fn the_token_of_each_source_is_sent_with_every_request_and_is_in_no_job() {
    let fake = Fake::start().await;
    fake.with(|cluster| cluster.token = Some(TOKEN));
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("token");
    std::fs::write(&file, format!("{TOKEN}\n")).expect("writes");
    std::fs::create_dir(folder.path().join(".ray")).expect("a folder");
    std::fs::copy(&file, folder.path().join(".ray/auth_token")).expect("copies");
    fake.play(no_room);
    let sources = [
        [("RAY_AUTH_TOKEN", OsStr::new(TOKEN))],
        [("RAY_AUTH_TOKEN_PATH", file.as_os_str())],
        [("HOME", folder.path().as_os_str())],
    ];
    let program = own_program();
    for said in join_all(sources.iter().map(|source| process(&fake, &program, source))).await {
        assert!(said.contains("connected to RayVersion") && said.contains("RayDashboard"), "{said}");
        assert!(said.contains("there is no room"), "{said}");
        assert!(!said.contains(TOKEN) && !said.contains(&TOKEN[..16]), "{said}");
    }
    let requests = fake.with(|cluster| cluster.requests.clone());
    let expected = format!("Bearer {TOKEN}");
    for request in &requests {
        assert_eq!(request.authorization.as_ref(), Some(&expected), "{}", request.line);
        // Whoever may read the jobs of the cluster must not learn its token from them.
        assert!(!String::from_utf8_lossy(&request.body).contains(TOKEN), "{}", request.line);
    }
    assert_eq!(fake.jobs().len(), 3);
}

/// A proxy between the program and the cluster may drop the header.
#[tokio::test]
async fn a_token_that_did_not_arrive_is_not_called_missing() {
    let fake = Fake::start().await;
    fake.before(|_| Some(Answer::text(401, "Unauthorized: Missing authentication token")));
    let said = process(&fake, &own_program(), &[("RAY_AUTH_TOKEN", TOKEN.as_ref())]).await;
    assert!(said.contains("code FailedPrecondition") && said.contains(&fake.url()), "{said}");
    assert!(!said.contains("this process has none") && said.contains("token from RAY_AUTH_TOKEN"), "{said}");
    assert!(!said.contains(TOKEN), "{said}");
}

#[cfg(not(feature = "tls"))]
#[tokio::test]
async fn an_https_dashboard_without_tls_names_the_feature() {
    let address = RayAddress::parse("https://ray.example", "env.yaml:3").expect("an address");
    let error = refused(&cx(), &address).await;
    assert_eq!(error.code(), Code::Unimplemented);
    let text = error.to_string();
    for part in ["https://ray.example", "env.yaml:3", "fix: build it with the feature `tls` of gym-client"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}
