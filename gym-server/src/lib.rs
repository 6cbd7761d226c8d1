//! The answering side of the gym SDK: head server, role servers, the rgym command line
#![forbid(unsafe_code)]
