//! Gives gym-server the checksum of the SDK's sources, by which the members of a cluster know their build.

#[path = "src/head/sources.rs"]
mod sources;

use std::path::Path;

fn main() -> std::io::Result<()> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a package has a folder around it");
    println!("cargo:rerun-if-changed=build.rs");
    for folder in sources::folders(crates) {
        println!("cargo:rerun-if-changed={}", folder.display());
    }
    println!("cargo:rustc-env=GYM_SOURCES={:016x}", sources::checksum(crates)?);
    Ok(())
}
