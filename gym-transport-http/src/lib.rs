//! The HTTP transport of the gym SDK: hyper server and pooled client behind the Connector and Listener seam
#![forbid(unsafe_code)]
