//! The `rgym` command line with the examples' environments in addition to the stock servers.

use std::process::ExitCode;

fn main() -> ExitCode {
    gym_server::cli::main(gym_examples::servers::servers())
}
