//! The command-line program `rgym` with the servers of the SDK. A program with its own servers has the same one-line `main`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    gym_server::cli::main(gym_server::Servers::stock())
}
