//! Compares the bindings with the header: size, alignment and offsets of every structure that this crate uses.

use std::fmt::Write;
use std::mem::{align_of, offset_of, size_of};
use std::path::Path;
use std::process::Command;

use super::ucp::*;

/// Output of the header of 1.13 with gcc on 64-bit Linux: `structure size align`, and `structure.field offset`.
const GOLDEN: &str = include_str!("layout.txt");

macro_rules! layout {
    ($($structure:ident { $($field:tt),* })*) => {{
        let mut text = String::new();
        $(
            writeln!(text, "{} {} {}", stringify!($structure), size_of::<$structure>(), align_of::<$structure>()).unwrap();
            $(writeln!(text, "{}.{} {}", stringify!($structure), stringify!($field), offset_of!($structure, $field)).unwrap();)*
        )*
        text
    }};
}

fn ours() -> String {
    layout! {
        ucp_params_t { field_mask, features, request_size, request_init, request_cleanup, tag_sender_mask, mt_workers_shared, estimated_num_eps, estimated_num_ppn, name }
        ucp_worker_params_t { field_mask, thread_mode, cpu_mask, events, user_data, event_fd, flags, name, am_alignment, client_id }
        ucp_worker_attr_t { field_mask, thread_mode, address_flags, address, address_length, max_am_header, name, max_debug_string }
        ucp_listener_params_t { field_mask, sockaddr, accept_handler, conn_handler }
        ucp_listener_attr_t { field_mask, sockaddr }
        ucp_listener_conn_handler_t { cb, arg }
        ucp_conn_request_attr_t { field_mask, client_address, client_id }
        ucp_ep_params_t { field_mask, address, err_mode, err_handler, user_data, flags, sockaddr, conn_request, name, local_sockaddr }
        ucp_err_handler_t { cb, arg }
        ucp_ep_attr_t { field_mask, name, local_sockaddr, remote_sockaddr }
        ucp_am_handler_param_t { field_mask, id, flags, cb, arg }
        ucp_am_recv_param_t { recv_attr, reply_ep }
        ucp_request_param_t { op_attr_mask, flags, request, cb, datatype, user_data, reply_buffer, memory_type, recv_info, memh }
        ucp_mem_map_params_t { field_mask, address, length, flags, prot, memory_type }
        ucs_sock_addr_t { addr, addrlen }
        ucs_status_t { }
    }
}

#[test]
fn the_structures_are_as_long_as_they_were_when_compared_with_the_header() {
    assert_eq!(
        ours(),
        GOLDEN,
        "after a change on purpose: this is the new src/sys/layout.txt, if the header test passes"
    );
}

/// Compiles a C program that prints the same table. Needs the headers of UCX 1.13 and a C compiler.
#[test]
fn the_header_of_this_machine_gives_the_same_table() {
    let header = Path::new("/usr/include/ucp/api/ucp.h");
    let version = std::fs::read_to_string("/usr/include/ucp/api/ucp_version.h").unwrap_or_default();
    if !version.contains("UCP_VERSION(1, 13)") {
        assert!(std::env::var_os("GYM_UCX_HEADERS_REQUIRED").is_none(), "no UCX 1.13 at {}", header.display());
        eprintln!("NOT RUN: no headers of UCX 1.13 (Debian 12: apt-get install libucx-dev)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&source, c_program()).unwrap();
    let compiled =
        Command::new("cc").arg(&source).arg("-o").arg(&program).output().expect("a C compiler (apt-get install gcc)");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&program).output().unwrap().stdout;
    assert_eq!(String::from_utf8(printed).unwrap(), GOLDEN);
}

fn c_program() -> String {
    let mut program =
        "#include <stdio.h>\n#include <stddef.h>\n#include <ucp/api/ucp.h>\nint main(void) {\n".to_owned();
    for line in GOLDEN.lines() {
        let name = line.split(' ').next().unwrap();
        let (format, values) = match name.split_once('.') {
            Some((structure, field)) => ("%zu", format!("offsetof({structure}, {field})")),
            None => ("%zu %zu", format!("sizeof({name}), _Alignof({name})")),
        };
        writeln!(program, "printf(\"{name} {format}\\n\", {values});").unwrap();
    }
    program + "return 0; }\n"
}
