//! Statistics of a rollouts file.
