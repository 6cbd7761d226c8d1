//! Worker groups over real ranks.

mod turns;
