"""Stands in NeMo Gym's process table for a server that somebody else already runs at the instance's host and port.

`gym env start` must start something for each instance, and asks only whether the instance's address answers. Here that
is the Rust port; this process only waits to be told to go.
"""

import signal

signal.sigwait({signal.SIGINT, signal.SIGTERM})
