//! The command line with the SDK's own servers. A program with servers of its own has the same one line in its `main`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    gym_server::cli::main(gym_server::Servers::stock())
}
