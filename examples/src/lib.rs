//! Environments and programs built with the gym SDK as a user would build them.
//!
//! | module | purpose |
//! |---|---|
//! | [`math`] | word problems with a calculator, checked exactly |
//! | [`warehouse`] | orders executed step by step; the final state determines the reward |
//! | [`choice`] | questions with one right option |
//! | [`nemo`] | ports of five of NeMo Gym's own examples |
//! | [`tasks`] | writes the tasks of the three environments under `data` |
//! | [`policy`] | a script that replaces a model and plays the three environments |
//! | [`servers`] | all of them by implementation name, for a stack or the command line |
#![forbid(unsafe_code)]

pub mod choice;
pub mod math;
pub mod nemo;
pub mod policy;
pub mod servers;
pub mod tasks;
pub mod warehouse;
