//! Network input: bodies, message heads, clients.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep, timeout};

use super::ground::{BODY_BYTES_MAX, SILENCE_MAX, WAIT_TIMEOUT, connect, read_answer, request};
use super::{Case, Got};

fn body(
    kind: &'static str,
    name: &'static str,
    path: &'static str,
    body: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case::new(kind, name, "HTTP 422", says, move |ground| {
        Box::pin(async move { ground.post("math", path, body).await.got() })
    })
}

fn bytes(
    kind: &'static str,
    name: &'static str,
    sent: &'static [u8],
    outcome: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case::new(kind, name, outcome, says, move |ground| {
        Box::pin(async move { ground.send(ground.address("math"), sent).await.got() })
    })
}

/// Sends some bytes, and then stays silent.
fn silent(name: &'static str, sent: &'static str, outcome: &'static str, says: &'static [&'static str]) -> Case {
    Case::new("slow client", name, outcome, says, move |ground| {
        Box::pin(async move {
            let began = Instant::now();
            let mut stream = connect(ground.address("math")).await;
            stream.write_all(sent.as_bytes()).await.unwrap();
            let answer = read_answer(&mut stream).await;
            assert!(began.elapsed() >= SILENCE_MAX, "{:?}", began.elapsed());
            if answer.status == 0 {
                return Got::new("closed", "the connection is closed after head_timeout");
            }
            answer.got()
        })
    })
}

fn context(
    kind: &'static str,
    name: &'static str,
    header: (&'static str, &'static str),
    outcome: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case::new(kind, name, outcome, says, move |ground| {
        Box::pin(async move {
            let bytes = request("POST", "/v1/responses", &[header], r#"{"input": "x"}"#);
            ground.send(ground.address("m_wait"), &bytes).await.got()
        })
    })
}

/// Sends a session cookie that the server did not create; the server replaces it with its own.
fn cookie(name: &'static str, value: fn() -> String) -> Case {
    Case::new("bad cookie", name, "HTTP 200", &["set-cookie: math___math="], move |ground| {
        Box::pin(async move {
            let value = value();
            let bytes = request("POST", "/seed_session", &[("cookie", &value)], ground.solved());
            let answer = ground.send(ground.address("math"), &bytes).await;
            assert!(!answer.head.contains(&value), "{answer:?}");
            Got::new(format!("HTTP {}", answer.status), answer.head)
        })
    })
}

pub(crate) fn cases() -> Vec<Case> {
    const JSON: &str = "invalid body";
    const HUGE: &str = "huge body";
    const GARBAGE: &str = "garbage on the port";
    const ROUTE: &str = "unknown route or method";
    let mut cases = vec![
        body(JSON, "not JSON", "/verify", "{\"a\": nope}", &["json_invalid", r#""loc":["body","#]),
        body(JSON, "empty", "/verify", "", &["missing", r#"["body"]"#]),
        body(JSON, "a list", "/verify", "[1]", &["model_attributes_type", r#"["body"]"#]),
        body(JSON, "no keys", "/verify", "{}", &["missing", "responses_create_params", r#"["body","response"]"#]),
        body(
            JSON,
            "response is a number",
            "/verify",
            r#"{"responses_create_params": {}, "response": 5}"#,
            &["model_attributes_type", r#"["body","response"]"#],
        ),
        body(JSON, "a tool's arguments are a list", "/calculator", "[1]", &["model_attributes_type"]),
        body(JSON, "an unterminated number", "/verify", "{\"a\": 1e}", &["json_invalid"]),
        Case::new(HUGE, "more bytes than the limit", "HTTP 413", &["request_bytes_max = 1048576", "raise it"], |ground| {
            Box::pin(async move { ground.post("math", "/verify", &"x".repeat(BODY_BYTES_MAX + 1)).await.got() })
        }),
        bytes(
            HUGE,
            "announced, and the client waits",
            b"POST /verify HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 99999999999\r\n\r\n",
            "HTTP 413",
            &["request_bytes_max = 1048576"],
        ),
        bytes(
            HUGE,
            "announced but not sent",
            b"POST /verify HTTP/1.1\r\nhost: a\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n",
            "HTTP 413",
            &["request_bytes_max = 1048576"],
        ),
        Case::new(HUGE, "in chunks without a length", "HTTP 413", &["request_bytes_max = 1048576"], |ground| {
            Box::pin(async move {
                let mut bytes =
                    b"POST /verify HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
                for _ in 0..=BODY_BYTES_MAX / 65_536 {
                    bytes.extend_from_slice(b"10000\r\n");
                    bytes.extend_from_slice(&[b'x'; 65_536]);
                    bytes.extend_from_slice(b"\r\n");
                }
                bytes.extend_from_slice(b"0\r\n\r\n");
                ground.send(ground.address("math"), &bytes).await.got()
            })
        }),
        Case::new(HUGE, "a header section of 2 MiB", "HTTP 431", &[], |ground| {
            Box::pin(async move {
                let value = "x".repeat(2 << 20);
                let bytes = request("POST", "/verify", &[("x-long", &value)], "{}");
                ground.send(ground.address("math"), &bytes).await.got()
            })
        }),
        silent("half a header section", "POST /verify HT", "closed", &["head_timeout"]),
        silent(
            "half a body",
            "POST /verify HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 100\r\n\r\n{",
            "HTTP 504",
            &["no byte of the body came within body_timeout"],
        ),
        Case::new("slow client", "one byte of the header section at a time", "closed", &["head_timeout"], |ground| {
            Box::pin(async move {
                let mut stream = connect(ground.address("math")).await;
                let drip = async {
                    loop {
                        if stream.write_all(b"a").await.is_err() {
                            return;
                        }
                        sleep(Duration::from_millis(20)).await;
                    }
                };
                match timeout(WAIT_TIMEOUT, drip).await {
                    Ok(()) => Got::new("closed", "the connection is closed after head_timeout"),
                    Err(_) => Got::new("open", "the connection is still open"),
                }
            })
        }),
        bytes(GARBAGE, "a line of text", b"hello?\r\n\r\n", "HTTP 400", &[]),
        bytes(GARBAGE, "a TLS handshake", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "HTTP 400", &[]),
        bytes(
            GARBAGE,
            "a chunk without a length",
            b"POST /verify HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
            "HTTP 400",
            &["the body is not what its headers say"],
        ),
        bytes(
            GARBAGE,
            "a length that is not a number",
            b"POST /verify HTTP/1.1\r\nhost: a\r\ncontent-length: many\r\n\r\n{}",
            "HTTP 400",
            &[],
        ),
        bytes(
            GARBAGE,
            "an invalid frame",
            b"POST /verify HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/x-gym-frame\r\ncontent-length: 5\r\n\r\nframe",
            "HTTP 400",
            &["frame"],
        ),
        bytes(
            ROUTE,
            "an unknown route",
            b"GET /verfy HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
            "HTTP 404",
            &[r#"{"detail":"Not Found"}"#],
        ),
        bytes(
            ROUTE,
            "an unknown tool",
            b"POST /abacus HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
            "HTTP 404",
            &[r#"{"detail":"Not Found"}"#],
        ),
        bytes(
            ROUTE,
            "the wrong method",
            b"GET /verify HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
            "HTTP 405",
            &[r#"{"detail":"Method Not Allowed"}"#],
        ),
        bytes(
            ROUTE,
            "an unknown method",
            b"BREW /verify HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
            "HTTP 405",
            &["method BREW is not served"],
        ),
        cookie("a session of another server", || "warehouse___warehouse=0123456789abcdef".into()),
        cookie("no cookie at all", || "=;;; \u{1F36A}".into()),
        cookie("a session id of 4 KiB", || format!("math___math={}", "x".repeat(4_096))),
        context(
            "bad deadline",
            "a deadline that is not a number",
            ("x-gym-timeout-ms", "soon"),
            "HTTP 422",
            &["x-gym-timeout-ms", "must be a whole number"],
        ),
        context("bad deadline", "a deadline that has passed", ("x-gym-timeout-ms", "0"), "HTTP 504", &["deadline"]),
        context("bad deadline", "a deadline before the upstream responds", ("x-gym-timeout-ms", "200"), "HTTP 504", &["hang/v1/responses"]),
    ];
    cases.push(Case::new("client that disconnects", "in the middle of a rollout", "cancelled", &[], |ground| {
        Box::pin(async move {
            let mut stream = connect(ground.address("a_wait")).await;
            let row = r#"{"responses_create_params": {"input": "x"}, "expected_answer": "4"}"#;
            stream.write_all(&request("POST", "/run", &[], row)).await.unwrap();
            let open = |wanted: usize| async move {
                while ground.upstream.open("hang") != wanted {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(WAIT_TIMEOUT, open(1)).await.expect("the model is asked");
            drop(stream);
            timeout(WAIT_TIMEOUT, open(0)).await.expect("the model is asked no longer");
            Got::new("cancelled", "the model's call ends with the caller, before the agent's ten seconds are over")
        })
    }));
    cases.push(Case::new(
        "client that disconnects",
        "in the middle of a body",
        "HTTP 400",
        &["the body is not what its headers say"],
        |ground| {
            Box::pin(async move {
                let mut stream = connect(ground.address("math")).await;
                stream.write_all(b"POST /verify HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{").await.unwrap();
                stream.shutdown().await.unwrap();
                read_answer(&mut stream).await.got()
            })
        },
    ));
    cases
}
