//! Gives gym-server the checksum of the SDK's sources, by which the members of a cluster know their build.
//!
//! It reads the other crates of the checkout, and so it is not in the package, whose version says the same.

#[path = "src/head/sources.rs"]
mod sources;

use std::path::Path;

fn main() -> std::io::Result<()> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the checkout");
    println!("cargo:rerun-if-changed=build.rs");
    for folder in sources::folders(crates) {
        println!("cargo:rerun-if-changed={}", folder.display());
    }
    let version = env!("CARGO_PKG_VERSION");
    println!("cargo:rustc-env=GYM_SOURCES=gym-server {version} {:016x}", sources::checksum(crates)?);
    Ok(())
}
