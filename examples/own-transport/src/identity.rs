//! The key that all processes of one cluster derive from a shared secret, and TLS with it.

use std::sync::Arc;

use gym_core::{Code, Error, Result};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::AlwaysResolvesClientRawPublicKeys;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, PeerIncompatible, SignatureScheme};

/// What stands before the seed in the PKCS #8 form of an Ed25519 key (RFC 8410).
const PKCS8_PREFIX: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
const PROTOCOL: &[u8] = b"gym-frames/1";

/// QUIC's configuration of both ends. Each end proves that it has the key of the secret.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) client: quinn::ClientConfig,
    pub(crate) server: quinn::ServerConfig,
}

impl Identity {
    pub(crate) fn of(secret: &str) -> Result<Self> {
        Self::derive(secret).map_err(|error| Error::not_started(Code::Internal, format!("derive the key: {error}")))
    }

    fn derive(secret: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let seed = ring::digest::digest(&ring::digest::SHA256, secret.as_bytes());
        let pkcs8 = [&PKCS8_PREFIX, seed.as_ref()].concat();
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8))?;
        let public = key.public_key().ok_or("the key has no public half")?.into_owned();
        let certified = Arc::new(CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key));
        let crypto = Arc::new(provider::default_provider());
        let verifier = Arc::new(SameKey { public, crypto: Arc::clone(&crypto) });
        let mut client = rustls::ClientConfig::builder_with_provider(Arc::clone(&crypto))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&verifier) as Arc<dyn ServerCertVerifier>)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&certified))));
        let mut server = rustls::ServerConfig::builder_with_provider(crypto)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)));
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Self {
            client: quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(client)?)),
            server: quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(server)?)),
        })
    }
}

/// Accepts peers that prove to have one key: ours.
#[derive(Debug)]
struct SameKey {
    public: SubjectPublicKeyInfoDer<'static>,
    crypto: Arc<CryptoProvider>,
}

impl SameKey {
    fn check(&self, presented: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let same = presented.as_ref() == self.public.as_ref();
        if same { Ok(()) } else { Err(CertificateError::UnknownIssuer.into()) }
    }

    fn check_signature(
        &self,
        message: &[u8],
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature_with_raw_key(
            message,
            &self.public,
            dss,
            &self.crypto.signature_verification_algorithms,
        )
    }
}

const NO_TLS12: rustls::Error = rustls::Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered);

impl ServerCertVerifier for SameKey {
    fn verify_server_cert(
        &self,
        presented: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(presented).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(NO_TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        _: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_signature(message, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for SameKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        presented: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(presented).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(NO_TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        _: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_signature(message, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
