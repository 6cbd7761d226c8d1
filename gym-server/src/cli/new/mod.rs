//! `rgym new environment`: a crate, or a NeMo Gym environment in Python, that collects at once.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use crate::cli::args::options::NewEnvironmentArgs;
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};

/// The files of a crate. A path contains the name in the place of `{{name}}`, as the texts do.
const RUST: [(&str, &str); 9] = [
    ("Cargo.toml", include_str!("rust/Cargo.toml.template")),
    ("src/main.rs", include_str!("rust/main.rs.template")),
    ("src/environment.rs", include_str!("rust/environment.rs.template")),
    ("{{name}}.yaml", include_str!("rust/stack.yaml.template")),
    ("scripted.yaml", include_str!("rust/scripted.yaml.template")),
    ("endpoint.yaml", include_str!("rust/endpoint.yaml.template")),
    ("tasks.jsonl", include_str!("rust/tasks.jsonl.template")),
    ("README.md", include_str!("rust/README.md.template")),
    (".gitignore", include_str!("rust/gitignore.template")),
];

/// The files of a Python environment.
const PYTHON: [(&str, &str); 6] = [
    ("app.py", include_str!("python/app.py.template")),
    ("configs/{{name}}.yaml", include_str!("python/config.yaml.template")),
    ("configs/scripted.yaml", include_str!("python/scripted.yaml.template")),
    ("data/example.jsonl", include_str!("python/example.jsonl.template")),
    ("tests/test_app.py", include_str!("python/test_app.py.template")),
    ("README.md", include_str!("python/README.md.template")),
];

/// Words that Rust or cargo does not accept as the name of a package, and names that the crate's dependencies have.
const RESERVED: [&str; 48] = [
    "abstract",
    "as",
    "async",
    "await",
    "become",
    "box",
    "break",
    "const",
    "continue",
    "core",
    "crate",
    "do",
    "dyn",
    "else",
    "enum",
    "extern",
    "false",
    "final",
    "fn",
    "for",
    "gym_core",
    "gym_server",
    "if",
    "impl",
    "in",
    "let",
    "loop",
    "macro",
    "match",
    "mod",
    "move",
    "mut",
    "pub",
    "ref",
    "return",
    "self",
    "serde",
    "serde_json",
    "static",
    "std",
    "struct",
    "super",
    "test",
    "tokio",
    "trait",
    "true",
    "type",
    "use",
];

/// Runs `rgym new environment`.
pub(in crate::cli) fn environment(args: &NewEnvironmentArgs) -> Outcome {
    let name = checked(&args.name)?;
    let (folder, files): (PathBuf, &[(&str, &str)]) = match args.python {
        true => (args.folder.join("resources_servers").join(&name), &PYTHON),
        false => (args.folder.join(&name), &RUST),
    };
    let sdk = match args.python {
        true => None,
        false => Some(Sdk::find(args.sdk.as_deref(), &args.folder)?),
    };
    write(&folder, files, &name, sdk.as_ref())?;
    let next = match args.python {
        true => format!("it collects with the commands in {}", folder.join("README.md").display()),
        false => format!(
            "cd {}\n  cargo test\n  cargo run -- collect --config {name}.yaml --config scripted.yaml --agent {name}_agent --input tasks.jsonl \
             --output results/{name}.jsonl --num-repeats 8 --add-seed",
            folder.display()
        ),
    };
    console::print(&format!("created {} with {} files\n\n  {next}", folder.display(), files.len()));
    Ok(ExitCode::SUCCESS)
}

/// Returns the name as Rust, Python and YAML accept it.
fn checked(name: &str) -> Result<String, Failure> {
    let name = name.replace('-', "_");
    let valid = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if !valid || name.len() > 60 {
        return Err(Failure::Usage(format!(
            "{name:?} cannot be the name of an environment\n  fix: use at most 60 lower-case letters, digits and `_`, and begin with a letter"
        )));
    }
    if RESERVED.contains(&name.as_str()) {
        return Err(Failure::Usage(format!(
            "{name:?} is reserved\n  fix: choose another name, such as `{name}_environment`"
        )));
    }
    Ok(name)
}

fn write(folder: &Path, files: &[(&str, &str)], name: &str, sdk: Option<&Sdk>) -> Result<(), Failure> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| match error.kind() {
            io::ErrorKind::AlreadyExists => Failure::Usage(format!(
                "{path} exists already\n  fix: choose another name or --folder; nothing was changed"
            )),
            _ => Failure::Failed(format!(
                "create {path}: {error}\n  fix: choose a folder that this user can write, with --folder"
            )),
        }
    };
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent).map_err(failed(parent))?;
    }
    // Fails if the folder exists: nothing is replaced.
    fs::create_dir(folder).map_err(failed(folder))?;
    for (path, text) in files {
        let path = folder.join(filled(path, name, folder, sdk));
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed(parent))?;
        }
        fs::write(&path, filled(text, name, folder, sdk)).map_err(failed(&path))?;
    }
    Ok(())
}

fn filled(template: &str, name: &str, folder: &Path, sdk: Option<&Sdk>) -> String {
    let text = template.replace("{{name}}", name).replace("{{Name}}", &type_name(name));
    match sdk {
        Some(sdk) => PACKAGES
            .into_iter()
            .fold(text, |text, package| text.replace(&format!("{{{{{package}}}}}"), &sdk.dependency(package, folder))),
        None => text,
    }
}

/// `word_count` becomes `WordCount`.
fn type_name(name: &str) -> String {
    let word = |word: &str| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect::<String>()
    };
    name.split('_').map(word).collect()
}

/// The packages of the SDK that a crate depends on.
const PACKAGES: [&str; 2] = ["gym-core", "gym-server"];

/// A checkout of the SDK: an absolute path, without links.
#[derive(Debug)]
struct Sdk(PathBuf);

impl Sdk {
    /// Returns the checkout that the user names. Else the one around this program's file, the working directory or the folder of the crate,
    /// or one beside a folder around the latter two. The machine on which the program was built does not matter.
    fn find(named: Option<&Path>, folder: &Path) -> Result<Self, Failure> {
        if let Some(named) = named {
            return Self::at(named).ok_or_else(|| {
                Failure::Usage(format!(
                    "--sdk {}: there is no {} in this folder\n  fix: name the checkout of this SDK, the folder with gym-core and gym-server",
                    named.display(),
                    PACKAGES.map(|package| format!("{package}/Cargo.toml")).join(" and no ")
                ))
            });
        }
        let program = std::env::current_exe().ok();
        let standing = std::env::current_dir().ok();
        let near = [standing, existing(folder)];
        let around = program.as_deref().and_then(|program| fs::canonicalize(program).ok());
        let around = around.into_iter().chain(near.iter().flatten().cloned());
        let found = around.flat_map(|path| path.ancestors().find_map(Self::at)).next();
        found.or_else(|| near.iter().flatten().find_map(|path| path.ancestors().find_map(Self::beside))).ok_or_else(|| {
            Failure::Usage(
                "the crate depends on a checkout of this SDK, and there is none around this program or this folder\n  fix: add --sdk \
                 DIR, the folder with gym-core and gym-server; the crates are not published yet"
                    .to_owned(),
            )
        })
    }

    fn at(folder: &Path) -> Option<Self> {
        let has_all = PACKAGES.iter().all(|package| folder.join(package).join("Cargo.toml").is_file());
        has_all.then(|| fs::canonicalize(folder).ok().map(Self)).flatten()
    }

    /// Looks into the folders of a folder.
    fn beside(folder: &Path) -> Option<Self> {
        let entries = fs::read_dir(folder).ok()?.take(FOLDERS_MAX).filter_map(Result::ok);
        let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        folders.sort();
        folders.iter().find_map(|folder| Self::at(folder))
    }

    /// Returns the dependency of a crate in this folder on a package. The path is relative, so that both can be moved together and the crate
    /// names no folder of this machine's user.
    fn dependency(&self, package: &str, folder: &Path) -> String {
        let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        format!("{{ path = {:?} }}", relative(&folder, &self.0.join(package)).display().to_string())
    }
}

/// Folders of a folder that are looked into.
const FOLDERS_MAX: usize = 1_000;

/// Returns the absolute path of a folder, or of the first one around it that exists.
fn existing(folder: &Path) -> Option<PathBuf> {
    std::path::absolute(folder).ok()?.ancestors().find_map(|folder| fs::canonicalize(folder).ok())
}

/// Returns the path from a folder to another; both are absolute, without links.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let shared = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(shared).map(|_| Component::ParentDir);
    up.chain(to.components().skip(shared)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_checked() {
        for (name, made) in [("bank", "bank"), ("word-count", "word_count"), ("a2", "a2")] {
            assert_eq!(checked(name).unwrap(), made);
        }
        for name in ["", "Bank", "2a", "a b", "match", "../x", "é", "serde-json"] {
            let failure = checked(name).unwrap_err();
            assert!(failure.text().contains("fix:"), "{}", failure.text());
        }
        assert_eq!(type_name("word_count2"), "WordCount2");
    }

    #[test]
    fn the_crate_finds_the_sdk_by_a_relative_path() {
        for (from, to, expected) in [
            ("/home/u/tally", "/home/u/gym/gym-core", "../gym/gym-core"),
            ("/home/u/gym/tally", "/home/u/gym/gym-core", "../gym-core"),
            ("/tmp/tally", "/home/u/gym-core", "../../home/u/gym-core"),
        ] {
            assert_eq!(relative(Path::new(from), Path::new(to)), Path::new(expected));
        }
        let folder = tempfile::tempdir().unwrap();
        let dependency = of_this_checkout().dependency("gym-core", folder.path());
        let path = folder.path().join(dependency.split('"').nth(1).unwrap());
        assert!(path.join("Cargo.toml").is_file(), "{}", path.display());
    }

    fn of_this_checkout() -> Sdk {
        Sdk::at(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()).unwrap()
    }

    #[test]
    fn the_sdk_is_named_or_found_around_the_crate_or_beside_it() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for package in PACKAGES {
            fs::create_dir_all(at("gym").join(package)).unwrap();
            fs::write(at("gym").join(package).join("Cargo.toml"), "").unwrap();
        }
        fs::create_dir_all(at("work/deep")).unwrap();
        let sdk = fs::canonicalize(at("gym")).unwrap();
        assert_eq!(Sdk::find(Some(&at("gym")), Path::new("/")).unwrap().0, sdk);
        assert_eq!(Sdk::beside(root.path()).unwrap().0, sdk);
        assert_eq!(existing(&at("work/deep/not/yet")), fs::canonicalize(at("work/deep")).ok());
        let refused = Sdk::find(Some(&at("work")), &at("work")).unwrap_err();
        assert!(refused.text().contains("there is no gym-core/Cargo.toml") && refused.text().contains("fix:"));
    }

    #[test]
    fn every_place_of_a_template_is_filled() {
        let folder = tempfile::tempdir().unwrap();
        for (name, files) in [("word_count", &RUST[..]), ("other", &PYTHON[..])] {
            let folder = folder.path().join(name);
            write(&folder, files, name, Some(&of_this_checkout())).unwrap();
            for (path, _) in files {
                let text = fs::read_to_string(folder.join(filled(path, name, &folder, None))).unwrap();
                assert!(!text.contains("{{"), "{path}: {text}");
                assert!(!text.contains("path = \"/"), "{path}: {text}");
            }
            let again = write(&folder, files, name, None).unwrap_err();
            assert!(again.text().contains("exists already"), "{}", again.text());
        }
    }
}
