//! The HTTP transport of the gym SDK: hyper server and pooled client behind the Connector and Listener seam
#![forbid(unsafe_code)]

use gym_core::*;
/// placeholder until the transport lands
#[derive(Debug, Default)]
pub struct HttpConnector {}
#[async_trait::async_trait]
impl Connector for HttpConnector {
    fn scheme(&self) -> &'static str {
        "http"
    }
    async fn connect(&self, _: &CallContext, _: &Endpoint, _: &ConnectOptions) -> Result<Channel> {
        unreachable!()
    }
}
