//! One configuration of many files: found, merged, inherited from, and with an environment server before every agent.

pub(crate) mod agents;
mod directives;
pub(crate) mod files;
pub(crate) mod merge;

use crate::config::problem::Problem;
use crate::config::resolve::interpolation::VariableLookup;
use crate::config::yaml::node::Node;

/// Runs every directive of the tree, and points environment servers at the agents that inheritance moved.
pub(crate) fn inherit(root: &mut Node, environment: &VariableLookup<'_>) -> Result<(), Vec<Problem>> {
    let moves = agents::agent_moves(root);
    directives::run(root, environment)?;
    agents::follow_moves(root, moves, environment)
}
