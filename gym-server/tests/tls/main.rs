//! Tests a model endpoint and a dashboard of Ray over https: requests succeed if its certificate is trusted, and fail with the reason if it is not.
//!
//! The system determines the trusted certificates from the environment, so each case runs in its own process. The two certificates
//! for `localhost` are valid for a century and have no other use. Command: `openssl req -x509 -newkey ec -pkeyopt
//! ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=localhost -addext subjectAltName=DNS:localhost -addext
//! basicConstraints=critical,CA:FALSE -keyout localhost.key -out localhost.pem`.

#![cfg(feature = "tls")]

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use gym_core::{CallContext, ModelServer as _, RawObject, SessionId, World};
use gym_server::model::{OpenAiModel, OpenAiModelConfig, Secret};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The variable that makes a process send a request: contains the endpoint.
const ROLE: &str = "GYM_TLS_TEST_ENDPOINT";
const KEY: &str = "sk-only-over-tls";
const ANSWER: &str = r#"{"status":"completed","output":[],"n":1E5}"#;
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Accepts one connection after another, and answers one request on each if it carries the key.
async fn serve(listener: TcpListener, acceptor: TlsAcceptor) {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        // A client that does not trust the certificate disconnects during the handshake.
        let Ok(mut stream) = acceptor.accept(stream).await else { continue };
        let mut request = Vec::new();
        // A question about the endpoint, such as for its models, has no body.
        let end: &[u8] = b"\r\n\r\n";
        while !request.ends_with(if request.starts_with(b"GET ") { end } else { b"}" }) {
            if stream.read_buf(&mut request).await.expect("a request") == 0 {
                break;
            }
        }
        let authorized = String::from_utf8_lossy(&request).contains(&format!("authorization: Bearer {KEY}\r\n"));
        let status = if authorized { "200 OK" } else { "401 Unauthorized" };
        let length = ANSWER.len();
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{ANSWER}"
        );
        stream.write_all(answer.as_bytes()).await.expect("answered");
        stream.shutdown().await.expect("closed");
    }
}

/// Returns a TLS server with the certificate for `localhost`.
fn acceptor() -> TlsAcceptor {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
    let certificate = CertificateDer::from_pem_file(here.join("localhost.pem")).expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(here.join("localhost.key")).expect("its key");
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(vec![certificate], key))
        .expect("a TLS server");
    TlsAcceptor::from(Arc::new(config))
}

/// Sends one request and prints its response or error; runs in the other process.
async fn ask(endpoint: &str) {
    let mut config = OpenAiModelConfig::new(endpoint, "m");
    config.openai_api_key = Some(Secret::new(KEY));
    config.retry_backoff_ms = 1;
    let model = OpenAiModel::new(config, &World::real()).expect("https is built in");
    let body = RawObject::parse(r#"{"input":"x"}"#).expect("an object");
    match model.responses(&CallContext::within(WAIT_TIMEOUT), &SessionId::new("s"), &body).await {
        Ok(answer) => println!("answer {}", String::from_utf8_lossy(&answer.0.into_text())),
        Err(error) => println!("error {:?} {:?} {error}", error.code(), error.execution()),
    }
}

async fn asked(trusted: &Path, endpoint: String) -> String {
    asked_by("an_https_endpoint_is_asked_if_it_is_trusted", trusted, endpoint).await
}

async fn asked_by(case: &str, trusted: &Path, endpoint: String) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", case, "--nocapture"]);
    command.env("RAY_AUTH_TOKEN", KEY).env_remove("RAY_AUTH_MODE");
    command.env(ROLE, endpoint).env("SSL_CERT_FILE", trusted).env_remove("SSL_CERT_DIR");
    let output = tokio::task::spawn_blocking(move || command.output());
    let output: Output =
        tokio::time::timeout(WAIT_TIMEOUT, output).await.expect("in time").expect("it ran").expect("so");
    String::from_utf8(output.stdout).expect("text")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_https_endpoint_is_asked_if_it_is_trusted() {
    if let Ok(endpoint) = std::env::var(ROLE) {
        return ask(&endpoint).await;
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
    let (ours, others) = (here.join("localhost.pem"), here.join("other.pem"));
    let acceptor = acceptor();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("its address").port();
    tokio::spawn(serve(listener, acceptor));

    let said = asked(&ours, format!("https://localhost:{port}/v1")).await;
    assert!(said.contains(&format!("answer {ANSWER}")), "{said}");

    // A certificate of another authority, and a certificate without this name: the client sends no part of the request or its key.
    let said = asked(&others, format!("https://localhost:{port}/v1")).await;
    assert!(
        said.contains("error FailedPrecondition NotStarted") && said.contains("does not trust the certificate ("),
        "{said}"
    );
    let said = asked(&ours, format!("https://127.0.0.1:{port}/v1")).await;
    assert!(
        said.contains("error FailedPrecondition NotStarted") && said.contains("does not trust the certificate ("),
        "{said}"
    );
    assert!(!said.contains(KEY), "{said}");
}

/// Plays the dashboard of a Ray cluster with token authentication: one request on each connection.
#[cfg(feature = "ray")]
async fn serve_ray(listener: TcpListener, acceptor: TlsAcceptor) {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        let Ok(mut stream) = acceptor.accept(stream).await else { continue };
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") && !request.ends_with(b"{}") {
            if stream.read_buf(&mut request).await.expect("a request") == 0 {
                break;
            }
        }
        let request = String::from_utf8_lossy(&request).into_owned();
        let has = |header: &str| request.contains(&format!("\r\n{header}\r\n"));
        let line = request.lines().next().unwrap_or_default();
        let (status, body) = match line {
            _ if !has(&format!("authorization: Bearer {KEY}")) || !request.contains("user-agent: gym-client/") => {
                ("401 Unauthorized", "Unauthorized: Missing authentication token")
            }
            "GET /api/version HTTP/1.1" => ("200 OK", r#"{"version":"4","ray_version":"2.60.0"}"#),
            "POST /api/jobs/j1/stop HTTP/1.1" if has("content-type: application/json") && request.ends_with("{}") => {
                ("200 OK", r#"{"stopped":true}"#)
            }
            _ => ("404 Not Found", "404: Not Found"),
        };
        let length = body.len();
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
        stream.write_all(answer.as_bytes()).await.expect("answered");
        stream.shutdown().await.expect("closed");
    }
}

/// Connects to a dashboard, stops a job there, and prints the results; runs in the other process.
#[cfg(feature = "ray")]
async fn ask_ray(url: &str) {
    use gym_group::ray::{RayAddress, RayDashboard};

    let address = RayAddress::parse(url, "env.yaml:3").expect("an address");
    let cx = CallContext::within(WAIT_TIMEOUT);
    match RayDashboard::connect(&cx, &address).await {
        Ok((dashboard, version)) => {
            println!("connected to {version:?}; stopped {:?}", dashboard.stop(&cx, "j1").await.expect("stops"));
        }
        Err(error) => println!("error {:?} {error}", error.code()),
    }
}

#[cfg(feature = "ray")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_https_dashboard_of_ray_is_used_if_it_is_trusted() {
    if let Ok(url) = std::env::var(ROLE) {
        return ask_ray(&url).await;
    }
    let case = "an_https_dashboard_of_ray_is_used_if_it_is_trusted";
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
    let (ours, others) = (here.join("localhost.pem"), here.join("other.pem"));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("its address").port();
    tokio::spawn(serve_ray(listener, acceptor()));

    let said = asked_by(case, &ours, format!("https://localhost:{port}")).await;
    assert!(said.contains("2.60.0") && said.contains("stopped true"), "{said}");

    // Another authority, and a name that the certificate does not have.
    for (trusted, url) in [(&others, format!("https://localhost:{port}")), (&ours, format!("https://127.0.0.1:{port}"))]
    {
        let said = asked_by(case, trusted, url.clone()).await;
        assert!(said.contains("error FailedPrecondition connect to the Ray cluster at"), "{said}");
        assert!(said.contains(&url) && said.contains("env.yaml:3") && said.contains("SSL_CERT_FILE"), "{said}");
        assert!(!said.contains(KEY), "{said}");
    }
}
