"""Processes of a test run: started in their own groups, waited for with deadlines, logged, and all gone at the end.

Every process carries a mark in its environment that its children inherit, so that even those that left their group (Ray
does that) are found and ended; processes of others are never touched.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

MARK = "GYM_PEER_RUN"
# Python servers draw theirs from 10001..20000, clients from 32768 up.
PORTS = range(20_001, 32_000)


class Failed(Exception):
    """A step of the suite that did not work; the text says which, and quotes the log."""


def free_port(taken=set()):
    """A port nobody listens on, never the same twice in one run."""
    for _ in range(1000):
        port = random.choice(PORTS)
        if port in taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                taken.add(port)
                return port
    raise Failed(f"no free port between {PORTS.start} and {PORTS.stop}")


def http_get(url, timeout=5):
    """Status and body; status 0 when there is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, ValueError):
        return 0, b""


def http_post(url, timeout=5):
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=timeout).read()


def wait_until(what, done, deadline_s, alive=None, every_s=0.1):
    """Waits for done() to be true; `alive` raises when waiting has become pointless."""
    end = time.monotonic() + deadline_s
    while not done():
        if alive is not None:
            alive()
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {deadline_s} s")
        time.sleep(every_s)


class Processes:
    """All processes of one run and the folder their logs are in."""

    def __init__(self, folder, environment=()):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, **dict(environment), MARK: self.mark}
        self.running = []
        # A shell that starts us in the background has us, and so our children, ignore SIGINT; undo that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self.terminated)

    def terminated(self, number, _frame):
        """Ends what runs first, so that no thread of ours waits for it any longer."""
        self.end_all()
        sys.exit(128 + number)

    def start(self, name, command, **environment):
        log = self.folder / f"{name}.log"
        with open(log, "wb") as out:
            out.write(f"$ {' '.join(map(str, command))}\n".encode())
            out.flush()
            try:
                child = subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env={**self.environment, **environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise Failed(f"{name}: cannot start {command[0]}: {error}") from error
        process = Process(name, child, log)
        self.running.append(process)
        return process

    def run(self, name, command, deadline_s, **environment):
        """Runs a command to its end; anything but exit code 0 in time is a failure."""
        process = self.start(name, command, **environment)
        try:
            code = process.child.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failed(f"{name}: not done within {deadline_s} s\n{process.tail()}") from None
        finally:
            self.running.remove(process)
        if code != 0:
            raise Failed(f"{name}: exit code {code}\n{process.tail()}")
        return process

    def stop(self, process, grace_s=30):
        """SIGINT, as a user would; says whether it ended in time by itself."""
        if process in self.running:
            self.running.remove(process)
        if process.child.poll() is None:
            process.child.send_signal(signal.SIGINT)
            try:
                process.child.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return False
        process.kill()
        return True

    def marked(self):
        """Process ids that carry this run's mark, whatever became of their parents."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def end_all(self):
        for process in reversed(list(self.running)):
            self.stop(process, grace_s=15)
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = self.marked()
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            end = time.monotonic() + 3
            while left and self.marked() and time.monotonic() < end:
                time.sleep(0.1)


class Process:
    def __init__(self, name, child, log):
        self.name, self.child, self.log = name, child, log

    def kill(self):
        with contextlib.suppress(OSError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(timeout=10)

    def check_alive(self):
        code = self.child.poll()
        if code is not None:
            raise Failed(f"{self.name}: ended early with exit code {code}\n{self.tail()}")

    def tail(self, lines=40):
        text = self.log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        return "\n".join(f"  | {line[:400]}" for line in text[-lines:]) + f"\n  (all of it: {self.log})"

    def descendants(self):
        """Command lines of the processes below this one."""
        parents, lines = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        below, found = {self.child.pid}, []
        grew = True
        while grew:
            more = {pid for pid, parent in parents.items() if parent in below} - below
            below |= more
            grew = bool(more)
            found.extend(lines.get(pid, "") for pid in more)
        return found
