//! Tests a model endpoint over https: requests succeed if its certificate is trusted, and fail with the reason if it is not.
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
const ANSWER: &str = r#"{"output":[],"n":1E5}"#;
const PATIENCE: Duration = Duration::from_secs(30);

/// Accepts one connection after another, and answers one request on each if it carries the key.
async fn serve(listener: TcpListener, acceptor: TlsAcceptor) {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        // A client that does not trust the certificate disconnects during the handshake.
        let Ok(mut stream) = acceptor.accept(stream).await else { continue };
        let mut request = Vec::new();
        while !request.ends_with(b"}") {
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

/// Sends one request and prints its response or error; runs in the other process.
async fn ask(endpoint: &str) {
    let mut config = OpenAiModelConfig::new(endpoint, "m");
    config.openai_api_key = Some(Secret::new(KEY));
    config.retry_backoff_ms = 1;
    let model = OpenAiModel::new(config, &World::real()).expect("https is built in");
    let body = RawObject::parse(r#"{"input":"x"}"#).expect("an object");
    match model.responses(&CallContext::within(PATIENCE), &SessionId::new("s"), &body).await {
        Ok(answer) => println!("answer {}", String::from_utf8_lossy(&answer.0.into_text())),
        Err(error) => println!("error {:?} {:?} {error}", error.code(), error.execution()),
    }
}

async fn asked(trusted: &Path, endpoint: String) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "an_https_endpoint_is_asked_if_it_is_trusted", "--nocapture"]);
    command.env(ROLE, endpoint).env("SSL_CERT_FILE", trusted).env_remove("SSL_CERT_DIR");
    let output = tokio::task::spawn_blocking(move || command.output());
    let output: Output =
        tokio::time::timeout(2 * PATIENCE, output).await.expect("in time").expect("it ran").expect("so");
    String::from_utf8(output.stdout).expect("text")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_https_endpoint_is_asked_if_it_is_trusted() {
    if let Ok(endpoint) = std::env::var(ROLE) {
        return ask(&endpoint).await;
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
    let (ours, others) = (here.join("localhost.pem"), here.join("other.pem"));
    let certificate = CertificateDer::from_pem_file(&ours).expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(here.join("localhost.key")).expect("its key");
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(vec![certificate], key))
        .expect("a TLS server");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("its address").port();
    tokio::spawn(serve(listener, TlsAcceptor::from(Arc::new(config))));

    let said = asked(&ours, format!("https://localhost:{port}/v1")).await;
    assert!(said.contains(&format!("answer {ANSWER}")), "{said}");

    // A certificate of another authority, and a certificate without this name: the client sends no part of the request or its key.
    let said = asked(&others, format!("https://localhost:{port}/v1")).await;
    assert!(said.contains("error Unavailable NotStarted") && said.contains("certificate"), "{said}");
    let said = asked(&ours, format!("https://127.0.0.1:{port}/v1")).await;
    assert!(said.contains("error Unavailable NotStarted") && said.contains("certificate"), "{said}");
    assert!(!said.contains(KEY), "{said}");
}
