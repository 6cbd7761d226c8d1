//! Translates the arguments: replaces NeMo Gym's commands by those of this program, and removes overrides before clap
//! parses the rest.
//!
//! | argument | translation |
//! |---|---|
//! | `rgym env start …`, `ng_run …` | `rgym run …` |
//! | `rgym eval run …`, `ng_e2e_collect_rollouts …` | `rgym collect --overwrite-by-default --serve …` |
//! | `rgym eval run --no-serve …`, `ng_collect_rollouts …` | `rgym collect --overwrite-by-default --no-serve …` |
//! | `rgym env status`, `ng_status` | `rgym status` |
//! | `rgym env validate …`, `ng_validate …` | `rgym config check …` |
//! | `rgym env resolve …`, `ng_dump_config …` | `rgym config show …` |
//!
//! An `ng_…` command is recognized as the name of the program (a link) and as the first argument (an alias).

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use gym_client::config::Overrides;

use crate::cli::exit::Failure;

/// NeMo Gym's old commands without prefix, and the new commands that replace them. Commands without a translation are
/// rejected.
const LEGACY_COMMANDS: [(&str, &[&str]); 24] = [
    ("run", &["env", "start"]),
    ("collect_rollouts", &["eval", "run", "--no-serve"]),
    ("e2e_collect_rollouts", &["eval", "run"]),
    ("status", &["env", "status"]),
    ("validate", &["env", "validate"]),
    ("dump_config", &["env", "resolve"]),
    ("version", &["--version"]),
    ("help", &["--help"]),
    ("test", &["env", "test"]),
    ("test_all", &["env", "test", "--all"]),
    ("dev_test", &["dev", "test"]),
    ("init_resources_server", &["env", "init"]),
    ("list_benchmarks", &["list", "benchmarks"]),
    ("prepare_benchmark", &["eval", "prepare"]),
    ("aggregate_rollouts", &["eval", "aggregate"]),
    ("reward_profile", &["eval", "profile"]),
    ("materialize_prompts", &["dataset", "render"]),
    ("prepare_data", &["dataset", "collate"]),
    ("upload_dataset_to_gitlab", &["dataset", "upload", "--storage", "gitlab"]),
    ("download_dataset_from_gitlab", &["dataset", "download", "--storage", "gitlab"]),
    ("upload_dataset_to_hf", &["dataset", "upload"]),
    ("download_dataset_from_hf", &["dataset", "download"]),
    ("gitlab_to_hf_dataset", &["dataset", "migrate"]),
    ("pip_list", &["env", "packages"]),
];

/// First words of NeMo Gym's commands that are not commands of this program.
const COMMAND_GROUPS: [&str; 6] = ["env", "eval", "list", "search", "dataset", "dev"];

/// The translated arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct TranslatedArguments {
    /// The arguments for clap, starting with the program's name.
    pub(in crate::cli) arguments: Vec<OsString>,
    /// The overrides: `+key=value` and the other forms.
    pub(in crate::cli) overrides: Vec<String>,
}

/// Returns the `ng_…` names that have a command in this program.
pub(in crate::cli) fn aliases() -> impl Iterator<Item = String> {
    let ours = LEGACY_COMMANDS.iter().filter(|(_, words)| command(words).is_some() || words[0].starts_with('-'));
    ours.map(|(name, _)| format!("ng_{name}"))
}

/// Translates `argv`. `valued` contains the options that take a value, so that `--input a=b.jsonl` is not read as an
/// override.
pub(in crate::cli) fn translate(
    argv: impl IntoIterator<Item = OsString>,
    valued: &BTreeSet<String>,
) -> Result<TranslatedArguments, Failure> {
    let mut argv = argv.into_iter();
    let called = argv.next().unwrap_or_else(|| OsString::from("rgym"));
    let mut rest: Vec<OsString> = argv.collect();
    let name = Path::new(&called).file_name().unwrap_or(&called).to_owned();
    let mut program = name.clone();
    let old = match legacy_name(&name) {
        Some(old) => {
            program = OsString::from("rgym");
            Some(old)
        }
        None => rest.first().and_then(|first| legacy_name(first)).inspect(|_| {
            rest.remove(0);
        }),
    };
    if let Some(old) = old {
        let words =
            LEGACY_COMMANDS.iter().find(|(name, _)| *name == old).map(|(_, words)| *words).ok_or_else(|| {
                let known: Vec<String> = aliases().collect();
                Failure::Usage(format!("unknown command `ng_{old}`\n  fix: use one of {}", known.join(", ")))
            })?;
        rest.splice(0..0, words.iter().map(OsString::from));
    }

    let mut typed = TranslatedArguments { arguments: vec![program], overrides: Vec::new() };
    let mut positionals = Vec::new();
    let mut rest = rest.into_iter();
    while let Some(argument) = rest.next() {
        let Some(text) = argument.to_str() else {
            positionals.push(typed.arguments.len());
            typed.arguments.push(argument);
            continue;
        };
        if text == "--" {
            typed.arguments.push(argument);
            typed.arguments.extend(rest);
            break;
        }
        // `results/lr=1e-5.jsonl` is a file where there is one.
        let is_file = || !text.starts_with(['+', '~']) && Path::new(text).exists();
        if Overrides::looks_like_one(text) && !is_file() {
            typed.overrides.push(text.to_owned());
        } else if valued.contains(text) {
            typed.arguments.push(argument);
            typed.arguments.extend(rest.next());
        } else {
            if !text.starts_with('-') {
                positionals.push(typed.arguments.len());
            }
            typed.arguments.push(argument);
        }
    }
    translate_group(&mut typed.arguments, &positionals)?;
    Ok(typed)
}

/// Returns `ng_run` or `nemo_gym_run` without the prefix.
fn legacy_name(name: &OsStr) -> Option<String> {
    let name = name.to_str()?;
    name.strip_prefix("ng_").or_else(|| name.strip_prefix("nemo_gym_")).map(str::to_owned)
}

/// Returns this program's command for a command of NeMo Gym.
fn command(words: &[&str]) -> Option<&'static [&'static str]> {
    match words {
        ["env", "start", ..] => Some(&["run"]),
        ["env", "status", ..] => Some(&["status"]),
        ["env", "validate", ..] => Some(&["config", "check"]),
        ["env", "resolve", ..] => Some(&["config", "show"]),
        ["eval", "run", ..] => Some(&["collect"]),
        _ => None,
    }
}

fn translate_group(arguments: &mut Vec<OsString>, positionals: &[usize]) -> Result<(), Failure> {
    let word = |at: usize| positionals.get(at).and_then(|at| arguments[*at].to_str());
    let Some(group) = word(0).filter(|group| COMMAND_GROUPS.contains(group)) else { return Ok(()) };
    let action = word(1).unwrap_or_default();
    let Some(ours) = command(&[group, action]) else {
        let typed = format!("{group} {action}");
        return Err(Failure::Usage(format!(
            "`{}` is not a command of this program\n  fix: use `env start`, `env status`, `env validate`, `env resolve` or \
             `eval run`, or run it with NeMo Gym's own `gym {0}`",
            typed.trim_end()
        )));
    };
    let mut words: Vec<OsString> = ours.iter().map(OsString::from).collect();
    let asks_for_help = arguments.iter().any(|argument| argument == "--help" || argument == "-h");
    if ours == ["collect"] && !asks_for_help {
        // As in NeMo Gym, which removes the files of an earlier collection.
        words.push(OsString::from("--overwrite-by-default"));
        if !arguments.iter().any(|argument| argument == "--no-serve") {
            words.push(OsString::from("--serve"));
        }
    }
    let (group, action) = (positionals[0], positionals[1]);
    arguments.remove(action);
    arguments.splice(group..=group, words);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(argv: &[&str]) -> Result<TranslatedArguments, Failure> {
        let valued = crate::cli::args::options::valued_options();
        translate(argv.iter().map(OsString::from), &valued)
    }

    fn both(argv: &[&str]) -> (Vec<String>, Vec<String>) {
        let typed = translated(argv).unwrap();
        (typed.arguments.iter().map(|text| text.to_str().unwrap().to_owned()).collect(), typed.overrides)
    }

    fn refused(argv: &[&str]) -> String {
        match translated(argv).unwrap_err() {
            Failure::Usage(text) => text,
            other => panic!("not a usage error: {other:?}"),
        }
    }

    #[test]
    fn the_old_names_are_the_new_words_as_a_link_and_as_a_first_argument() {
        for (theirs, ours) in [
            (&["ng_run", "+config_paths=[config.yaml]"][..], &["rgym", "run", "+config_paths=[config.yaml]"][..]),
            (&["/usr/local/bin/ng_run", "--head-only"], &["rgym", "run", "--head-only"]),
            (
                &["ng_run", "--worker", "--head-url=http://coordinator:11000"],
                &["rgym", "run", "--worker", "--head-url=http://coordinator:11000"],
            ),
            (&["nemo_gym_status"], &["rgym", "status"]),
            (&["ng_dump_config", "+config_paths=[a.yaml]"], &["rgym", "config", "show", "+config_paths=[a.yaml]"]),
            (&["ng_validate", "+config_paths=[a.yaml]"], &["rgym", "config", "check", "+config_paths=[a.yaml]"]),
            (&["ng_version"], &["rgym", "--version"]),
            (&["ng_help"], &["rgym", "--help"]),
        ] {
            assert_eq!(both(theirs), both(ours), "{theirs:?}");
            let name = theirs[0].rsplit('/').next().unwrap();
            let as_argument = [&["rgym", name][..], &theirs[1..]].concat();
            assert_eq!(both(&as_argument), both(ours), "{as_argument:?}");
        }
    }

    #[test]
    fn the_groups_of_the_newer_command_line_are_understood() {
        for (theirs, ours) in [
            (&["rgym", "env", "start", "--config", "a.yaml"][..], &["rgym", "run", "--config", "a.yaml"][..]),
            (&["rgym", "-v", "env", "status", "--json"], &["rgym", "-v", "status", "--json"]),
            (&["rgym", "env", "validate", "--config", "a.yaml"], &["rgym", "config", "check", "--config", "a.yaml"]),
            (&["rgym", "env", "resolve"], &["rgym", "config", "show"]),
            (
                &["rgym", "eval", "run", "--no-serve", "-a", "x"],
                &["rgym", "collect", "--overwrite-by-default", "--no-serve", "-a", "x"],
            ),
            (
                &["rgym", "eval", "run", "--agent", "x"],
                &["rgym", "collect", "--overwrite-by-default", "--serve", "--agent", "x"],
            ),
            (
                &["rgym", "--threads", "2", "eval", "run"],
                &["rgym", "--threads", "2", "collect", "--overwrite-by-default", "--serve"],
            ),
            (&["ng_collect_rollouts"], &["rgym", "collect", "--overwrite-by-default", "--no-serve"]),
            (&["rgym", "eval", "run", "--help"], &["rgym", "collect", "--help"]),
        ] {
            assert_eq!(both(theirs), both(ours), "{theirs:?}");
        }
    }

    #[test]
    fn overrides_are_found_anywhere_but_not_among_the_values_of_options() {
        let (arguments, overrides) = both(&[
            "rgym",
            "+a=1",
            "collect",
            "--input",
            "x=y.jsonl",
            "++b.c={d: 1}",
            "--output=o=p.jsonl",
            "~e",
            "f=[1, 2]",
            "\"+g=h\"",
            "--",
            "+i=j",
        ]);
        assert_eq!(arguments, ["rgym", "collect", "--input", "x=y.jsonl", "--output=o=p.jsonl", "--", "+i=j"]);
        assert_eq!(overrides, ["+a=1", "++b.c={d: 1}", "~e", "f=[1, 2]", "\"+g=h\""]);
    }

    #[test]
    fn a_file_whose_name_has_an_equals_sign_is_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("lr=1e-5.jsonl");
        let file = file.to_str().unwrap();
        assert_eq!(both(&["rgym", "view", file]).1, [file], "there is no such file yet");
        std::fs::write(file, "").unwrap();
        assert_eq!(
            both(&["rgym", "view", file, "a=1"]),
            (vec!["rgym".into(), "view".into(), file.into()], vec!["a=1".into()])
        );
    }

    #[test]
    fn a_command_that_only_nemo_gym_has_is_refused_with_its_name() {
        assert!(refused(&["rgym", "env", "init", "--all"]).contains("`env init` is not a command"));
        assert!(refused(&["rgym", "eval"]).contains("`eval` is not a command"));
        assert!(refused(&["ng_prepare_data", "+mode=x"]).contains("gym dataset collate"));
        assert!(refused(&["ng_rnu"]).contains("fix: use one of ng_run, ng_collect_rollouts"));
    }

    #[test]
    fn a_program_of_another_name_keeps_it() {
        assert_eq!(both(&["target/debug/my-gym", "run"]).0, ["my-gym", "run"]);
    }
}
