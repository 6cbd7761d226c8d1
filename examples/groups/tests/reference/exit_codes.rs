//! The page on exit codes.

use gym_server::cli::EXIT_CODES;

use crate::page::{Page, code, sources, workspace};

/// The codes of processes that the SDK starts: the file and the constant with the code, the process, and the meaning.
const CHILDREN: [(&str, &str, &str, &str); 6] = [
    (
        "gym-client/group/src/provision/local/worker.rs",
        "START_FAILED",
        "a rank's process",
        "The worker could not be created, or could not stop in order. After SIGINT or SIGTERM, a rank ends with 0.",
    ),
    (
        "gym-client/group/src/provision/nodes/agent/program.rs",
        "START_FAILED",
        "a node agent that Ray started",
        "The agent could not start. When its last controller has released it, or after SIGINT or SIGTERM, it ends with 0.",
    ),
    (
        "gym-client/group/src/provision/nodes/agent/program.rs",
        "NO_CONTROLLER",
        "a node agent that Ray started",
        "No controller came, or the last one was silent for its lease.",
    ),
    (
        "gym-client/src/launch/process/shim.rs",
        "ABANDONED",
        "a Python server or a rank, before its program runs",
        "The process that started it has ended, or cancelled the start.",
    ),
    (
        "gym-client/src/launch/process/shim.rs",
        "EXEC_FAILED",
        "a Python server or a rank, before its program runs",
        "The program cannot be executed, as in a shell.",
    ),
    (
        "gym-transport-rdma/src/nccl/engine.rs",
        "ABORT_HANGS",
        "a rank with `communication_backend: nccl`",
        "NCCL did not abort a communicator within 5 s, so what the rank has on its GPU cannot be taken back.",
    ),
];

/// Files of the libraries that end a process themselves. What answers a question and the watchdog are for this SDK only: no program of a user
/// sees their codes.
const END_A_PROCESS: [&str; 6] = [
    "gym-client/group/src/provision/nodes/agent/program.rs",
    "gym-client/src/launch/process/shim.rs",
    "gym-client/src/launch/process/watchdog.rs",
    "gym-client/src/transport/inquiry/mod.rs",
    "gym-client/src/transport/inquiry/self_test.rs",
    "gym-transport-rdma/src/nccl/engine.rs",
];

#[test]
fn the_page_on_exit_codes_is_the_generated_one() {
    let mut page = Page::new(
        "exit-codes.md",
        "Exit codes",
        "The exit codes of `rgym`, of every program whose `main` is `cli::main(servers)`, and of the processes that they start.",
    );
    page.section("Commands", "A program that a signal kills has the shell's code 128 plus the number of the signal.");
    let row = |row: &gym_server::cli::ExitMeaning| {
        [row.code.to_string(), row.meaning.to_owned(), row.cases.to_owned(), row.of_doctor.to_owned()]
    };
    page.table(["code", "meaning", "cases", "`rgym doctor`"], EXIT_CODES.iter().map(row));
    page.section("Processes that the SDK starts", "Errors and logs name these codes when such a process ends.");
    page.table(
        ["code", "process", "meaning"],
        CHILDREN.map(|(file, constant, process, meaning)| {
            let text = std::fs::read_to_string(workspace().join(file)).unwrap();
            let value = text.split_once(&format!("const {constant}: i32 = ")).unwrap_or_else(|| panic!("{constant}")).1;
            let value = value.split(';').next().unwrap_or_default();
            [code(value), process.to_owned(), meaning.to_owned()]
        }),
    );
    page.finish();
}

#[test]
fn the_readme_and_the_sources_have_the_codes_of_the_table() {
    let page = std::fs::read_to_string(workspace().join("docs/commands.md")).unwrap();
    let listed: Vec<String> = EXIT_CODES.iter().map(|row| format!("{} {}", row.code, row.meaning)).collect();
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains(&format!("Exit codes: {}", listed.join(", "))),
        "docs/commands.md lacks: {}",
        listed.join(", ")
    );
    let mut found: Vec<String> = Vec::new();
    for (file, text) in sources() {
        // A number in the place of a constant would not be in the table.
        for (at, _) in text.match_indices("ExitCode::from(") {
            let next = text[at + "ExitCode::from(".len()..].trim_start().chars().next();
            assert!(!next.is_some_and(|c| c.is_ascii_digit()), "{file}: use a constant of cli/exit.rs");
        }
        if file.starts_with("gym-") && file.contains("/src/") && text.contains("process::exit(") {
            found.push(file);
        }
    }
    assert_eq!(found, END_A_PROCESS, "files that end a process; describe their codes in CHILDREN");
}
