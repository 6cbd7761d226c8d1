//! Composes many files into one configuration: finds and merges them, applies inheritance, and puts an environment
//! server in front of every agent.

pub(crate) mod agents;
mod directives;
pub(crate) mod files;
pub(crate) mod merge;

pub(crate) use directives::{COPY, INHERIT};

use crate::config::problem::Problem;
use crate::config::resolve::interpolation::VariableLookup;
use crate::config::yaml::node::Node;

/// Runs every directive of the tree, and updates environment servers whose agents were moved by inheritance.
pub(crate) fn inherit(root: &mut Node, environment: &VariableLookup<'_>) -> Result<(), Vec<Problem>> {
    let moves = agents::agent_moves(root);
    directives::run(root, environment)?;
    agents::follow_moves(root, moves, environment)
}
