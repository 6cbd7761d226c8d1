//! TLS between processes that share a secret: all of them derive one key from the secret, and trust only that key.

use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::RootCertStore;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;

/// The server name in the certificate.
pub(crate) const NAME: &str = "gym";
/// The bytes before the seed in the PKCS #8 form of an Ed25519 key (RFC 8410).
const PKCS8_PREFIX: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
const PROTOCOL: &[u8] = b"gym-frames/1";

/// The TLS configuration of both ends. Each end proves that it has the key.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) client: quinn::ClientConfig,
    pub(crate) server: quinn::ServerConfig,
}

impl Identity {
    pub(crate) fn of(secret: &str) -> anyhow::Result<Self> {
        let seed = ring::digest::digest(&ring::digest::SHA256, secret.as_bytes());
        let pkcs8 = PrivatePkcs8KeyDer::from([&PKCS8_PREFIX, seed.as_ref()].concat());
        let pair = rcgen::KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8, &rcgen::PKCS_ED25519)?;
        // The certificate has the same bytes in every process, because Ed25519 signs without randomness.
        let certificate = rcgen::CertificateParams::new(vec![NAME.to_owned()])?.self_signed(&pair)?.der().clone();
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone())?;
        let (roots, crypto) = (Arc::new(roots), Arc::new(rustls::crypto::ring::default_provider()));
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&crypto)).build()?;
        let mut client = rustls::ClientConfig::builder_with_provider(Arc::clone(&crypto))
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate.clone()], pkcs8.clone_key().into())?;
        let mut server = rustls::ServerConfig::builder_with_provider(crypto)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![certificate], pkcs8.into())?;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Self {
            client: quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(client)?)),
            server: quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(server)?)),
        })
    }
}
