//! Writes the tasks of the three environments to `examples/data`: `cargo run -p gym-examples --bin generate-tasks`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use gym_examples::tasks::{ENVIRONMENTS, jsonl};

fn main() -> Result<()> {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/data"));
    std::fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    for environment in ENVIRONMENTS {
        let lines = jsonl(environment).context("every environment has tasks")?;
        let path = folder.join(format!("{environment}.jsonl"));
        std::fs::write(&path, &lines).with_context(|| format!("write {}", path.display()))?;
        println!("{}: {} tasks", path.display(), lines.lines().count());
    }
    Ok(())
}
