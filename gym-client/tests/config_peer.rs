//! Against NeMo Gym itself: only when `GYM_PEER_PYTHON` names an interpreter that has `nemo-gym` 0.7.0.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use gym_client::config::{ConfigLoader, GymConfig, Mistake, Overrides};
use serde_json::{Value, json};

fn peer() -> Option<PathBuf> {
    let python = std::env::var_os("GYM_PEER_PYTHON").map(PathBuf::from);
    if python.is_none() {
        println!("NOT RUN: GYM_PEER_PYTHON names no interpreter");
    }
    python
}

fn ask(python: &Path, cwd: &Path, command: &str, requests: &[Value]) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/python/config_oracle.py");
    let mut child = Command::new(python)
        .arg(script)
        .arg(command)
        .current_dir(cwd)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    let answers: Vec<Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), requests.len(), "the oracle answered each request");
    answers
}

fn installed(python: &Path) -> PathBuf {
    let code = "import pathlib, nemo_gym; print(pathlib.Path(nemo_gym.__file__).parent.parent)";
    let output = Command::new(python).args(["-c", code]).output().unwrap();
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

fn load(cwd: &Path, roots: &Path, args: &[String]) -> Result<GymConfig, String> {
    let overrides = Overrides::parse(args).map_err(|error| error.to_string())?;
    ConfigLoader::new(cwd).installed_dirs([roots]).load(&[] as &[&str], &overrides).map_err(|error| error.to_string())
}

fn comparable(value: &Value) -> Value {
    let mut value = value.clone();
    for key in ["head_server_deps", "python_version"] {
        value.as_object_mut().unwrap().remove(key);
    }
    value
}

/// Every YAML below the shipped folders' `configs`, by its path from the installed folder.
fn shipped(roots: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let folders = [
        "resources_servers",
        "responses_api_agents",
        "responses_api_models",
        "environment_servers",
        "environments",
        "benchmarks",
    ];
    let mut pending: Vec<PathBuf> = folders.iter().map(|folder| roots.join(folder)).collect();
    while let Some(folder) = pending.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let inside = path.parent().and_then(Path::file_name).is_some_and(|name| name == "configs");
            if path.is_dir() {
                pending.push(path);
            } else if path.extension().is_some_and(|ending| ending == "yaml")
                && (inside || path.file_name().is_some_and(|name| name == "config.yaml"))
            {
                found.push(path.strip_prefix(roots).unwrap().display().to_string());
            }
        }
    }
    found.sort();
    found
}

/// The files are read in so many cases: NeMo Gym's loader takes a third of a second for each.
const PARTS: usize = 4;

#[test]
fn shipped_configurations_are_read_as_nemo_gym_reads_them_1_of_4() {
    shipped_configurations_are_read_alike(0);
}

#[test]
fn shipped_configurations_are_read_as_nemo_gym_reads_them_2_of_4() {
    shipped_configurations_are_read_alike(1);
}

#[test]
fn shipped_configurations_are_read_as_nemo_gym_reads_them_3_of_4() {
    shipped_configurations_are_read_alike(2);
}

#[test]
fn shipped_configurations_are_read_as_nemo_gym_reads_them_4_of_4() {
    shipped_configurations_are_read_alike(3);
}

fn shipped_configurations_are_read_alike(part: usize) {
    let Some(python) = peer() else { return };
    let roots = installed(&python);
    let cwd = tempfile::tempdir().unwrap();
    let cwd_path = cwd.path().canonicalize().unwrap();
    let policy = ["+policy_base_url=http://127.0.0.1:8000/v1", "+policy_api_key=dummy", "+policy_model_name=m"];
    let model = "responses_api_models/openai_model/configs/openai_model.yaml";
    let files = shipped(&roots);
    assert!(files.len() > 100, "only {} shipped files found", files.len());
    let mut runs: Vec<Vec<String>> = Vec::new();
    for file in files.iter().skip(part).step_by(PARTS) {
        let list = format!("+config_paths=[{file},{model}]");
        runs.push(std::iter::once(list).chain(policy.iter().map(|text| (*text).to_owned())).collect());
    }
    let requests: Vec<Value> = runs.iter().map(|args| json!({"cwd": cwd_path, "args": args})).collect();
    let answers = ask(&python, &cwd_path, "resolve", &requests);
    let mut read = 0;
    let mut wrong = Vec::new();
    for (args, theirs) in runs.iter().zip(&answers) {
        let ours = load(&cwd_path, &roots, args);
        match (&ours, theirs.get("merged")) {
            (Ok(config), Some(theirs)) if comparable(&config.merged) == comparable(theirs) => read += 1,
            (Err(_), None) => {}
            // Theirs resolved the whole mapping for us here; when they run it, they resolve what a server asks for.
            (Ok(config), None) if config.warnings.iter().any(|warning| warning.mistake == Mistake::Interpolation) => {}
            (Ok(config), Some(theirs)) => {
                let (ours, theirs) = (comparable(&config.merged), comparable(theirs));
                let keys: std::collections::BTreeSet<_> =
                    ours.as_object().unwrap().keys().chain(theirs.as_object().unwrap().keys()).collect();
                let differing: Vec<String> = keys
                    .into_iter()
                    .filter(|key| ours.get(*key) != theirs.get(*key))
                    .map(|key| format!("{key}: ours {:?} theirs {:?}", ours.get(key), theirs.get(key)))
                    .collect();
                wrong.push(format!("{}: {}", args[0], differing.join("; ")));
            }
            (Ok(_), None) => wrong.push(format!("{}: they say {theirs}, we read it", args[0])),
            (Err(error), Some(_)) => wrong.push(format!("{}: they read it, we say {error}", args[0])),
        }
    }
    println!("{read} of {} combinations read equal, the others refused by both", runs.len());
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), runs.len(), wrong.join("\n"));
    for name in ["example_single_tool_call", "example_multi_step", "example_session_state_mgmt"] {
        assert!(files.iter().any(|file| file.contains(name)), "{name} is among the files");
    }
}

#[test]
fn the_global_yaml_is_read_back_equal_by_omegaconf() {
    let Some(python) = peer() else { return };
    let text = r##"
awkward: {"1": text, 1.5: f, 2: i, true: b, "a: b": c, "yes": "no", e: "", n: null, "~": "~", "null": "null"}
strings: ["1e5", "010", "11:30", "2024-01-02", "=", "<<", "- a", " a ", "é\u2028\t\n\x85", "#", "&a", "*a", "'", "\"", "\\", "@x", "%", "${oc.env:HOME}", "y", "0x1F", "1_000", ".5", "!t", "a #b", "[", "{", "?"]
numbers: [1e-7, 1e300, 0.1, -0.0, 1e16, 123456789012345678, 18446744073709551615, 1.0]
empty: {l: [], m: {}, n: [[], {}, [[1]]]}
policy_model: {responses_api_models: {openai_model: {entrypoint: app.py, openai_api_key: k, url: "${strings[1]}"}}}
my_agent: {responses_api_agents: {simple_agent: {entrypoint: app.py, model_server: {type: responses_api_models, name: policy_model}}}}
"##;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("main.yaml"), text).unwrap();
    let overrides = Overrides::parse(["+config_paths=[main.yaml]"]).unwrap();
    let mut next = 15_000;
    let mut loader = ConfigLoader::new(folder.path()).pick_port(move |_| {
        next += 1;
        Some(next)
    });
    let config = loader.load(&[] as &[&str], &overrides).unwrap();
    let answer = &ask(&python, folder.path(), "load-yaml", &[json!(config.to_global_yaml())])[0];
    let theirs = &answer["resolved"];
    assert_eq!(theirs, &config.merged);
    assert_eq!(theirs["policy_model"]["responses_api_models"]["openai_model"]["port"], 15_001);
    assert_eq!(theirs["my_environment_server"]["environment_servers"]["legacy_agent"]["port"], 15_003);
    assert_eq!(theirs["head_server"], json!({"host": "127.0.0.1", "port": 11_000}));
    assert_eq!(answer["raw"]["strings"][17], "${oc.env:HOME}");
}
