#!/usr/bin/env python3
"""`rgym run` and `rgym collect`, acted by NeMo Gym's own command line: for `suite.py --self-check` only.

With it the suite runs Python against Python through the same steps, which proves the suite and not the Rust side.
"""

import os
import sys


def main():
    gym = os.path.join(os.path.dirname(sys.executable), "gym")
    command, words = sys.argv[1], sys.argv[2:]
    if command == "run":
        at = words.index("--python")
        del words[at : at + 2]
        new = [gym, "env", "start", *words, "+skip_venv_if_present=true", f"+uv_venv_dir={os.environ['GYM_PEER_VENVS']}"]
    elif command == "collect":
        at = words.index("--head-url")
        host, port = words[at + 1].removeprefix("http://").split(":")
        del words[at : at + 2]
        new = [gym, "eval", "run", "--no-serve", *words, f"+head_server.host={host}", f"+head_server.port={port}"]
    else:
        sys.exit(f"stand_in.py: no command {command!r}")
    os.execv(gym, new)


if __name__ == "__main__":
    main()
