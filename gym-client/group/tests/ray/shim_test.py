#!/usr/bin/env python3
"""Tests of shim.py, the entry point of our Ray jobs, without Ray.

    python3 gym-client/group/tests/ray/shim_test.py [CASE…]

Each case runs the shim on the Ray of `stub`, whose actors are processes, with agents that do as the case says. Cases run at the same time.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
SHIM = HERE.parents[1] / "src" / "ray" / "shim.py"
# A wait for something that must come. Nothing takes that long, unless the machine is very busy.
LIMIT_S = 30
# A wait that shows that something does not come.
MOMENT_S = 0.3
# Cases mostly wait.
CASES_AT_ONCE = 8

# What Ray gives the driver of a job for its actors.
JOB_CONFIG = {"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip", "env_vars": {"A": "b"}}, "metadata": {"gym": "gym-test-a1"}}

# An agent. Each life does what the plan of its share says; the last entry is for all further lives.
AGENT = """
import ctypes, json, os, signal, subprocess, sys, time

assignment = json.loads(os.environ["GYM_NODE_AGENT"])
share = int(assignment["name"][5:9])
lives = os.path.join(os.environ["TEST_FOLDER"], f"lives{share}")
plan = json.loads(os.environ["TEST_PLAN"]).get(str(share), [{}])
before = len(open(lives).readlines()) if os.path.exists(lives) else 0
life = plan[min(before, len(plan) - 1)]


def note(**fields):
    with open(lives if "pid" in fields else f"{lives}.more", "ab", buffering=0) as file:
        file.write(json.dumps(fields).encode() + b"\\n")


def end(number, _):
    note(signal=number)
    if number != signal.SIGTERM or not life.get("stubborn"):
        os._exit({signal.SIGUSR1: 0, signal.SIGUSR2: 75, signal.SIGHUP: 7, signal.SIGTERM: 0}[number])


blocked = [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigBlk")][0]
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, end)
# As the real agent: it ends with the thread that started it.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
note(pid=os.getpid(), parent=os.getppid(), blocked=int(blocked, 16), assignment=assignment, variables=dict(os.environ))
if os.getppid() != assignment["parent"]:
    sys.exit(1)
if life.get("child"):
    note(child=subprocess.Popen(["sleep", "60"]).pid)
for number in range(life.get("stderr", 0)):
    os.write(2, f"line {number} {life.get('long', '') * 600}\\n".encode())
os.write(1, b"a rank without a newline\\xff" * life.get("early", 0))
if life.get("listen", True):
    print('\\n@gym {"endpoints": ["http://10.0.0.%d:%d"]}' % (share, before + 1), flush=True)
for line in life.get("stdout", []):
    print(line)
for number in range(life.get("megabytes", 0)):
    os.write(1, b"\\xc3(" * (1 << 19) + b"\\n")
sys.stdout.flush()
if "after" in life:
    time.sleep(life["after"])
if "code" in life:
    os._exit(life["code"])
while True:
    # signal.pause would miss a signal that arrives just before it.
    time.sleep(0.05)
"""


def wait_for(what, ready):
    until = time.monotonic() + LIMIT_S
    while not (value := ready()):
        if time.monotonic() > until:
            raise AssertionError(f"not within {LIMIT_S} s: {what}")
        time.sleep(0.01)
    return value


class Shim:
    """A job: a shim, its cluster and its agents."""

    def __init__(self, case, bundles=1, plan=None, cluster=None, files=None, **spec):
        self.case = case
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="shim-test-"))
        case.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.program = self.folder / "agent"
        self.program.write_text(f"#!{sys.executable} -IS\n{AGENT}")
        self.program.chmod(0o755)
        for name, (content, mode) in (files or {}).items():
            if content is not None:
                (self.folder / name).write_text(content)
                (self.folder / name).chmod(mode)
        nodes = [{"id": f"node{n}", "ip": f"10.0.0.{n}", "alive": True, "resources": {"CPU": 8.0, "GPU": 4.0}} for n in range(2)]
        self.cluster = {"nodes": nodes, "room": True, **(cluster or {})}
        self.change_cluster()
        self.spec = {
            "run": "gym-test-a1", "strategy": "PACK", "bundles": [{"CPU": 2.0, "GPU": 2.0}] * bundles, "cpus": [2] * bundles,
            "command": [str(self.program), "--gym-node-agent"], "variables": {"TEST_PLAN": json.dumps(plan or {}), "TEST_FOLDER": str(self.folder)},
            "agent": {"secret": "s", "first_s": 60.0, "later_s": 10.0, "grace_s": 2.0},
            "selectors": [], "placement_attempts": 2, "placement_timeout_s": 20.0, "start_timeout_s": 20.0, "silence_s": 0.2, "grace_s": 5.0, "max_restarts": 1, "packaged": False, "child": None, **spec,
        }
        environment = {
            "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": str(HERE / "stub"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
            "GYM_RAY_SPEC": json.dumps(self.spec), "GYM_RAY_STUB": str(self.folder), "RAY_AUTH_TOKEN": "hidden",
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(JOB_CONFIG), "RAY_ADDRESS": "10.0.0.1:6379",
        }
        # The lines of the log, those with an event, and the numbers of the events that were expected.
        self.lines, self.marked, self.taken = [], [], []
        # Both are in one file, as in the log of a job.
        self.process = subprocess.Popen(
            [sys.executable, SHIM], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.reader = threading.Thread(target=self.follow, daemon=True)
        self.reader.start()
        case.addCleanup(self.kill)

    def follow(self):
        for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace"))
            if line.startswith(b"@gym "):
                self.marked.append(self.lines[-1])

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        children = [entry["child"] for share in range(len(self.spec["bundles"])) for entry in self.read_lines(f"lives{share}.more") if "child" in entry]
        for pid in filter(self.runs, self.pids() + children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def runs(self, pid):
        """Returns whether a process of this job runs. Another one may have its number by now."""
        try:
            return os.fsencode(self.folder) in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def change_cluster(self, **changes):
        self.cluster.update(changes)
        new = self.folder / "cluster.new"
        new.write_text(json.dumps(self.cluster))
        new.rename(self.folder / "cluster.json")

    def read_lines(self, name):
        path = self.folder / name
        # The last line may not be complete.
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def journal(self, do):
        return [entry for entry in self.read_lines("journal") if entry["do"] == do]

    def lives(self, share=0):
        return self.read_lines(f"lives{share}")

    def pids(self):
        """Returns the processes of the actors and of the agents."""
        shares = range(len(self.spec["bundles"]))
        return [entry["pid"] for entry in self.journal("start_actor")] + [life["pid"] for share in shares for life in self.lives(share)]

    def signals(self, share=0):
        return [entry["signal"] for entry in self.read_lines(f"lives{share}.more") if "signal" in entry]

    def log(self):
        return "".join(line for line in self.lines if line != "a line of Ray\n")[-6000:]

    def events(self):
        return [json.loads(line[5:]) for line in list(self.marked)]

    def next_event(self, share=None):
        """Returns the next event of a share, or of the job."""

        def find():
            ended = not self.reader.is_alive()
            found = [event for event in self.events() if event.get("share") == share and event["seq"] not in self.taken]
            return found[0] if found else ended and {"kind": "none"}

        try:
            event = wait_for(f"an event of share {share}", find)
        except AssertionError as error:
            raise AssertionError(f"{error}, in\n{self.log()}") from None
        self.taken.append(event.get("seq"))
        return event

    def event(self, kind, share=None):
        """Returns the next event of a share, or of the job. It must be of this kind."""
        event = self.next_event(share)
        self.case.assertEqual(event["kind"], kind, f"{event} in\n{self.log()}")
        return event

    def expect_agents(self, count=1):
        """Returns the events of the first agents, by share."""
        self.event("shim")
        self.event("placed")
        return [self.event("agent", share) for share in range(count)]

    def signal_agent(self, number, share=0):
        os.kill(self.lives(share)[-1]["pid"], number)

    def lose_node(self, number):
        """Declares a node dead, and kills the actors there."""
        nodes = [{**node, "alive": node["alive"] and place != number} for place, node in enumerate(self.cluster["nodes"])]
        self.change_cluster(nodes=nodes)
        for actor in self.journal("start_actor"):
            if actor["node"] == nodes[number]["id"] and self.runs(actor["pid"]):
                os.kill(actor["pid"], signal.SIGKILL)

    def terminate(self):
        """Sends SIGTERM, and returns the time at which that was."""
        self.process.send_signal(signal.SIGTERM)
        return time.monotonic()

    def expect_end(self, code, why):
        """Checks that the job has ended in this way, and left nothing."""
        event = self.event("ended")
        self.case.assertEqual((event["code"], event["why"]), (code, why), self.log())
        self.case.assertEqual(self.process.wait(LIMIT_S), code, self.log())
        ended = time.monotonic()
        self.reader.join(LIMIT_S)
        self.case.assertEqual(sorted(self.taken), list(range(1, len(self.events()) + 1)), f"events of which nothing is known:\n{self.log()}")
        self.case.assertEqual([event["seq"] for event in self.events()], sorted(self.taken))
        broken = [line for line in self.lines if "@gym " in line and not line.startswith("@gym ") or not line.endswith("\n")]
        self.case.assertEqual(broken, [])
        self.case.assertEqual(len(self.journal("remove_group")), len(self.journal("create_group")), "the placement groups were not all removed")
        wait_for("the end of all processes", lambda: not any(map(self.runs, self.pids())))
        return ended


class TooSlow(AssertionError):
    pass


def timed(case):
    """Repeats a case that was too slow: the machine may have been busy, but not each time."""

    @functools.wraps(case)
    def run(self):
        for _ in range(2):
            with contextlib.suppress(TooSlow):
                return case(self)
        return case(self)

    return run


def expect_within(limit_s, took):
    if took >= limit_s:
        raise TooSlow(f"{took:.2f} s instead of {limit_s} s")


class ShimTest(unittest.TestCase):
    def test_agents_are_reported_with_their_place_and_given_what_they_need(self):
        nodes = [
            {"id": "a", "ip": "10.1.0.1", "alive": True, "resources": {"CPU": 8.0, "nvlink_domain_7": 1.0, "topo_rank": 3.0}},
            {"id": "b", "ip": "10.1.0.2", "alive": True, "resources": {"CPU": 8.0}, "labels": {"nvlink_domain": "rack", "topo_rank": "12"}},
        ]
        selectors = [{}, {"nvlink_domain": "rack"}, {}]
        shim = Shim(self, 3, cluster={"nodes": nodes}, cpus=[2, 3, 4], strategy="SPREAD", selectors=selectors)
        started = shim.event("shim")
        self.assertEqual((started["pid"], started["ray"]), (shim.process.pid, "stub"))
        self.assertLess(abs(started["t"] - time.time()), LIMIT_S)
        self.assertEqual(shim.event("placed")["nodes"], ["a", "b", "a"])
        for share, (node, ip, gpus) in enumerate([("a", "10.1.0.1", ["0", "1"]), ("b", "10.1.0.2", ["0", "1"]), ("a", "10.1.0.1", ["2", "3"])]):
            agent = shim.event("agent", share)
            self.assertEqual((agent["incarnation"], agent["node_id"], agent["ip"], agent["gpus"]), (1, node, ip, gpus))
            self.assertEqual(agent["endpoints"], [f"http://10.0.0.{share}:1"])
            (life,) = shim.lives(share)
            self.assertEqual(agent["pid"], life["pid"])
            actor = next(entry for entry in shim.journal("start_actor") if entry["name"] == f"gym-test-a1-share{share}-1")
            self.assertEqual((actor["cpus"], actor["gpus"]), (2.0, 2.0))
            domain, domain_rank = ("7", 3) if node == "a" else ("rack", 12)
            self.assertEqual(life["assignment"], {
                "name": f"share{share:04}@{ip}", "host": ip, "gpus": gpus, "cpus": share + 2, "domain": domain, "domain_rank": domain_rank,
                "parent": actor["pid"], **shim.spec["agent"],
            })
            self.assertEqual(life["parent"], actor["pid"])
            self.assertEqual(life["blocked"], 0, "signals that the actor blocks are not blocked in the agent")
            self.assertNotIn("RAY_AUTH_TOKEN", life["variables"])
            self.assertEqual(life["variables"]["CUDA_VISIBLE_DEVICES"], ",".join(gpus))
            self.assertEqual(life["variables"]["TEST_FOLDER"], str(shim.folder))
        (group,) = shim.journal("create_group")
        self.assertEqual((group["name"], group["strategy"], group["bundles"]), ("gym-test-a1", "SPREAD", shim.spec["bundles"]))
        self.assertEqual(group["labels"], {"bundle_label_selector": selectors})
        for share in range(3):
            shim.signal_agent(signal.SIGUSR1, share)
            exited = shim.event("exited", share)
            self.assertEqual((exited["code"], exited["stderr"]), (0, []))
        shim.expect_end(0, "released")

    def test_actors_have_the_environment_of_the_job_only_if_the_program_is_in_its_package(self):
        for packaged, environment in ((True, JOB_CONFIG["runtime_env"]), (False, {})):
            shim = Shim(self, packaged=packaged)
            shim.expect_agents()
            (driver,) = shim.journal("init")
            self.assertEqual(driver["config"], {**JOB_CONFIG, "runtime_env": environment})
            shim.signal_agent(signal.SIGUSR1)
            shim.event("exited", 0)
            shim.expect_end(0, "released")

    def test_driver_that_is_a_child_has_a_job_of_its_own(self):
        for working_dir, environment in ((None, None), ("gcs://_ray_pkg_2.zip", {"working_dir": "gcs://_ray_pkg_2.zip"})):
            metadata = {"name": "trainer", "gym": "gym-test-a1"}
            shim = Shim(self, packaged=bool(working_dir), child={"address": "10.0.0.9:6379", "metadata": metadata, "working_dir": working_dir})
            self.assertEqual(shim.event("shim")["node_id"], "node0")
            shim.event("placed")
            shim.event("agent", 0)
            (driver,) = shim.journal("init")
            given = {name: driver[name] for name in ("config", "address", "metadata", "environment")}
            self.assertEqual(given, {"config": None, "address": "10.0.0.9:6379", "metadata": metadata, "environment": environment})
            # What a launcher sends first.
            shim.process.send_signal(signal.SIGINT)
            shim.expect_end(143, "stopped")

    def test_job_ends_when_no_agent_has_a_controller(self):
        shim = Shim(self, 2, silence_s=60)
        shim.expect_agents(2)
        for share in range(2):
            shim.signal_agent(signal.SIGUSR2, share)
            self.assertEqual(shim.event("exited", share)["code"], 75)
        shim.expect_end(75, "no controller")

    def test_agent_without_a_controller_starts_again_while_another_runs(self):
        shim = Shim(self, 2)
        shim.expect_agents(2)
        shim.signal_agent(signal.SIGUSR2)
        exited, agent = shim.event("exited", 0), shim.event("agent", 0)
        self.assertEqual((exited["code"], agent["incarnation"], agent["endpoints"]), (75, 2, ["http://10.0.0.0:2"]))
        self.assertGreaterEqual(agent["t"] - exited["t"], shim.spec["silence_s"] - 0.01)
        self.assertEqual(len(shim.journal("start_actor")), 2, "in the same process")
        for share in range(2):
            shim.signal_agent(signal.SIGUSR1, share)
            self.assertEqual(shim.event("exited", share)["code"], 0)
        shim.expect_end(0, "released")

    def test_agent_that_is_cut_off_again_and_again_starts_while_another_has_a_controller(self):
        # The second agent runs for longer than it would without a controller.
        shim = Shim(self, 2, plan={"0": [{}, {"code": 75}, {"code": 75}, {"code": 75}, {}]}, silence_s=0.1, agent={"secret": "s", "first_s": 0.05})
        shim.expect_agents(2)
        shim.signal_agent(signal.SIGUSR2)
        while True:
            event = shim.next_event(0)
            self.assertIn(event["kind"], ("agent", "exited"))
            if event["kind"] == "agent" and event["incarnation"] == 5:
                break
        shim.terminate()
        shim.expect_end(143, "stopped")

    def test_job_ends_although_agents_take_turns_to_wait_for_a_controller(self):
        shim = Shim(self, 2, plan={"0": [{"after": 0.6, "code": 75}], "1": [{"after": 1.0, "code": 75}, {"after": 0.6, "code": 75}]})
        shim.event("shim")
        shim.event("placed")
        for share in range(2):
            while shim.next_event(share)["kind"] != "none":
                pass
        shim.taken = [number for number in shim.taken if number is not None]
        shim.expect_end(75, "no controller")

    def test_program_that_cannot_be_executed_is_an_error_of_the_system(self):
        for name, content, mode, error in [
            ("missing", None, 0, "No such file or directory (os error 2)"),
            ("no-x-bit", "#!/bin/sh\n", 0o644, "Permission denied (os error 13)"),
            ("wrong-format", "neither ELF nor a script", 0o755, "Exec format error (os error 8)"),
        ]:
            with self.subTest(name):
                shim = Shim(self, files={name: (content, mode)}, command=[f"./{name}", "--gym-node-agent"])
                shim.event("shim")
                shim.event("placed")
                times = []
                for incarnation in (1, 2):
                    exited = shim.event("exited", 0)
                    self.assertEqual((exited["incarnation"], exited["error"]), (incarnation, f"start {shim.folder / name}: {error}"))
                    times.append(exited["t"])
                self.assertGreaterEqual(times[1] - times[0], 0.19, "the second start waits")
                self.assertEqual(shim.event("failed", 0)["why"], "its agent has ended 2 times")
                shim.expect_end(1, "share 0 failed")

    def test_agent_that_fails_is_reported_with_its_last_lines_and_the_others_are_stopped(self):
        shim = Shim(self, 2, plan={"0": [{"stderr": 30}, {"stderr": 2, "long": "x", "listen": False, "code": 7}]})
        shim.expect_agents(2)
        shim.signal_agent(signal.SIGHUP)
        exited = shim.event("exited", 0)
        self.assertEqual((exited["incarnation"], exited["code"], exited["stderr"]), (1, 7, [f"line {number} " for number in range(10, 30)]))
        # The second one has no lines of the first.
        exited = shim.event("exited", 0)
        self.assertEqual((exited["incarnation"], exited["code"]), (2, 7))
        self.assertEqual(exited["stderr"], [f"line {number} {'x' * 600}"[:500] for number in range(2)])
        shim.event("failed", 0)
        shim.expect_end(1, "share 0 failed")
        self.assertEqual(shim.signals(1), [signal.SIGTERM])

    def test_event_has_the_last_lines_that_a_pipe_takes(self):
        shim = Shim(self, plan={"0": [{"stderr": 30, "long": "é"}]}, max_restarts=0)
        shim.expect_agents()
        shim.signal_agent(signal.SIGHUP)
        exited = shim.event("exited", 0)
        self.assertEqual(exited["stderr"], [f"line {number} {'é' * 600}"[:500] for number in range(28, 30)])
        self.assertLess(max(map(len, shim.marked)), 16 << 10)
        shim.event("failed", 0)
        shim.expect_end(1, "share 0 failed")

    def test_agent_that_never_listens_is_killed_and_does_not_disturb_the_next(self):
        # Its child holds its output open.
        shim = Shim(self, plan={"0": [{"listen": False, "stderr": 3, "child": True, "early": 1}, {}]}, start_timeout_s=4.0)
        shim.event("shim")
        shim.event("placed")
        exited = shim.event("exited", 0)
        self.assertEqual((exited["error"], exited["stderr"]), ("the agent has not listened within 4.0 s", [f"line {number} " for number in range(3)]))
        self.assertFalse(shim.runs(shim.lives()[0]["pid"]))
        self.assertEqual(shim.event("agent", 0)["pid"], shim.lives()[1]["pid"])
        time.sleep(MOMENT_S)
        shim.signal_agent(signal.SIGUSR1)
        shim.event("exited", 0)
        shim.expect_end(0, "released")
        self.assertEqual(len(shim.lives()), 2)

    def test_end_of_an_agent_is_noticed_although_a_child_holds_its_output_open(self):
        shim = Shim(self, plan={"0": [{"child": True}]})
        shim.expect_agents()
        shim.signal_agent(signal.SIGUSR1)
        shim.event("exited", 0)
        shim.expect_end(0, "released")

    def test_agent_that_ends_before_it_listens_is_taken_at_its_word(self):
        for code, why in [(0, "released"), (75, "no controller")]:
            with self.subTest(code):
                shim = Shim(self, plan={"0": [{"listen": False, "code": code}]})
                shim.event("shim")
                shim.event("placed")
                self.assertEqual(shim.event("exited", 0)["code"], code)
                shim.expect_end(code, why)

    def test_agent_that_prints_a_lot_does_not_wait(self):
        # Ranks have no right to events, nor to a character set.
        forged = ['@gym {"code": 0}', '@gym {"endpoints": []}', "@gym {", "@gym 7", '@gym {"seq": 1, "kind": "ended"}']
        shim = Shim(self, plan={"0": [{"early": 1000, "stdout": forged, "megabytes": 4, "after": 0.0, "code": 7}, {"early": 100_000}]})
        shim.event("shim")
        shim.event("placed")
        event = shim.next_event(0)
        if event["kind"] == "agent":
            self.assertEqual(event["endpoints"], ["http://10.0.0.0:1"])
            event = shim.event("exited", 0)
        self.assertEqual((event["incarnation"], event["code"]), (1, 7))
        self.assertEqual(shim.event("agent", 0)["endpoints"], ["http://10.0.0.0:2"])
        output = (shim.folder / "gym-test-a1-share0-1.out").read_bytes()
        self.assertGreater(len(output), 4 << 20)
        self.assertIn(b'@gym {"code": 0}\n', output, "it is in the log of the actor")
        shim.terminate()
        shim.expect_end(143, "stopped")

    def test_end_of_an_agent_is_noticed_where_ray_rotates_logs(self):
        # The standard error of the actor cannot be read again.
        shim = Shim(self, plan={"0": [{"stderr": 5}]}, cluster={"rotated_logs": True})
        shim.expect_agents()
        shim.signal_agent(signal.SIGUSR1)
        self.assertEqual(shim.event("exited", 0)["stderr"], [])
        shim.expect_end(0, "released")

    def test_bundles_without_room_are_requested_again_and_then_given_up(self):
        shim = Shim(self, cluster={"room": False}, placement_timeout_s=0.7)
        shim.event("shim")
        waits = [shim.event("waiting") for _ in range(2)]
        self.assertEqual([event["attempt"] for event in waits], [1, 2])
        self.assertGreaterEqual(waits[1]["t"] - waits[0]["t"], 1.4, "with a pause between")
        shim.expect_end(3, "the bundles found no room in 2 attempts of 0.7 s")
        self.assertEqual((len(shim.journal("create_group")), len(shim.journal("start_actor"))), (2, 0))

    def test_bundles_are_placed_when_there_is_room(self):
        shim = Shim(self, cluster={"room": False})
        shim.event("shim")
        shim.event("waiting")
        shim.change_cluster(room=True)
        shim.event("placed")
        shim.event("agent", 0)
        shim.terminate()
        shim.expect_end(143, "stopped")

    @timed
    def test_stop_while_bundles_wait_for_room(self):
        shim = Shim(self, cluster={"room": False})
        shim.event("shim")
        shim.event("waiting")
        began = shim.terminate()
        expect_within(2.0, shim.expect_end(143, "stopped while it waited for room") - began)

    @timed
    def test_stop_between_two_attempts(self):
        shim = Shim(self, cluster={"room": False}, placement_timeout_s=0.01, placement_attempts=10)
        shim.event("shim")
        # The next pause takes 4 s.
        wait_for("the third attempt", lambda: len(shim.journal("remove_group")) == 3)
        began = shim.terminate()
        expect_within(2.0, shim.expect_end(143, "stopped while it waited for room") - began)
        self.assertEqual(len(shim.journal("create_group")), 3)

    @timed
    def test_stop_asks_the_agents_and_kills_those_that_do_not_end(self):
        shim = Shim(self, 2, plan={"0": [{"stubborn": True}]}, grace_s=1.0)
        shim.expect_agents(2)
        began = shim.terminate()
        took = shim.expect_end(143, "stopped") - began
        self.assertGreaterEqual(took, 1.0)
        expect_within(3.0, took)
        self.assertEqual((shim.signals(0), shim.signals(1)), ([signal.SIGTERM], [signal.SIGTERM]))

    @timed
    def test_stop_while_an_agent_starts(self):
        shim = Shim(self, plan={"0": [{"listen": False}]})
        wait_for("the agent", shim.lives)
        shim.event("shim")
        shim.event("placed")
        began = shim.terminate()
        expect_within(3.0, shim.expect_end(143, "stopped") - began)

    def test_agent_of_an_actor_that_was_killed_starts_again_in_another(self):
        shim = Shim(self, 2)
        first, _ = shim.expect_agents(2)
        actor = shim.lives()[0]["parent"]
        os.kill(actor, signal.SIGKILL)
        lost = shim.event("lost", 0)
        self.assertEqual((lost["cause"], lost["node_id"], lost["why"]), ("process", "node0", "its process has died"))
        again = shim.event("agent", 0)
        self.assertEqual((again["incarnation"], again["node_id"], again["gpus"]), (2, first["node_id"], first["gpus"]))
        wait_for("the end of the first agent", lambda: not shim.runs(first["pid"]))
        self.assertNotEqual(shim.lives()[1]["parent"], actor)
        # This was the fault of the program.
        os.kill(shim.lives()[1]["parent"], signal.SIGKILL)
        shim.event("lost", 0)
        self.assertEqual(shim.event("failed", 0)["why"], "its agent has ended 2 times")
        shim.expect_end(1, "share 0 failed")
        self.assertEqual(shim.signals(1), [signal.SIGTERM])

    def test_actor_that_was_killed_for_memory_is_lost_too(self):
        # This error is no RayActorError.
        shim = Shim(self, cluster={"death": "OutOfMemoryError"})
        shim.expect_agents()
        os.kill(shim.lives()[0]["parent"], signal.SIGKILL)
        self.assertEqual(shim.event("lost", 0)["cause"], "process")
        shim.event("agent", 0)
        shim.terminate()
        shim.expect_end(143, "stopped")

    def test_agent_of_a_lost_node_starts_on_another_without_a_failure(self):
        shim = Shim(self, max_restarts=0)
        shim.expect_agents()
        shim.lose_node(0)
        lost = shim.event("lost", 0)
        self.assertEqual((lost["cause"], lost["node_id"]), ("node", "node0"))
        agent = shim.event("agent", 0)
        self.assertEqual((agent["incarnation"], agent["node_id"]), (2, "node1"))
        shim.signal_agent(signal.SIGUSR1)
        shim.event("exited", 0)
        shim.expect_end(0, "released")

    def test_node_that_is_lost_while_the_agent_starts_is_no_failure(self):
        shim = Shim(self, plan={"0": [{"listen": False}, {}]}, max_restarts=0)
        shim.event("shim")
        shim.event("placed")
        wait_for("the agent", shim.lives)
        shim.lose_node(0)
        self.assertEqual(shim.event("lost", 0)["cause"], "node")
        self.assertEqual(shim.event("agent", 0)["node_id"], "node1")
        shim.terminate()
        shim.expect_end(143, "stopped")

    def test_node_that_ray_drains_is_reported_once_for_each_agent(self):
        shim = Shim(self)
        shim.expect_agents()
        end = time.time() + 30
        shim.change_cluster(draining={"node0": int(end * 1000), "node7": 0})
        drained = shim.event("draining", 0)
        self.assertEqual(drained["node_id"], "node0")
        self.assertLess(abs(drained["seconds"] - 30), LIMIT_S)
        # Ray starts nothing there, so the next agent starts when the node is gone.
        shim.signal_agent(signal.SIGKILL)
        shim.event("exited", 0)
        time.sleep(2.0)
        self.assertEqual(len(shim.lives()), 1)
        shim.change_cluster(draining={"node1": 0})
        self.assertEqual(shim.event("agent", 0)["incarnation"], 2)
        shim.terminate()
        shim.expect_end(143, "stopped")

    def test_share_waits_for_room_after_the_loss_of_its_node(self):
        shim = Shim(self, 2)
        shim.expect_agents(2)
        shim.change_cluster(room=False)
        shim.lose_node(0)
        shim.event("lost", 0)
        time.sleep(MOMENT_S)
        shim.change_cluster(room=True)
        self.assertEqual(shim.event("agent", 0)["node_id"], "node1")
        shim.terminate()
        shim.expect_end(143, "stopped")

    @timed
    def test_stop_while_an_actor_waits_for_room(self):
        shim = Shim(self, 2, grace_s=1.0)
        shim.expect_agents(2)
        shim.change_cluster(room=False)
        shim.lose_node(0)
        shim.event("lost", 0)
        began = shim.terminate()
        expect_within(3.0, shim.expect_end(143, "stopped") - began)
        self.assertEqual(shim.signals(1), [signal.SIGTERM])

    def test_job_without_a_controller_ends_although_a_share_waits_for_room(self):
        shim = Shim(self, 2, plan={"1": [{}, {"code": 75}]}, grace_s=0.5)
        shim.expect_agents(2)
        shim.change_cluster(room=False)
        shim.lose_node(0)
        shim.event("lost", 0)
        shim.signal_agent(signal.SIGUSR2, 1)
        self.assertEqual(shim.event("exited", 1)["incarnation"], 1)
        while shim.next_event(1)["kind"] != "exited":
            pass
        shim.expect_end(75, "no controller")

    def test_actor_that_does_not_respond_is_asked_again(self):
        shim = Shim(self, cluster={"lost_calls": {"wait": ["unanswered"]}})
        shim.expect_agents()
        shim.event("suspect", 0)
        time.sleep(MOMENT_S)
        shim.signal_agent(signal.SIGHUP)
        self.assertEqual(shim.event("exited", 0)["code"], 7)
        self.assertEqual(shim.event("agent", 0)["incarnation"], 2)
        shim.signal_agent(signal.SIGUSR1)
        self.assertEqual(shim.event("exited", 0)["code"], 0)
        # No event is reported twice.
        shim.expect_end(0, "released")

    def test_agent_starts_once_although_the_answer_is_lost(self):
        for fate in ("unsent", "unanswered"):
            with self.subTest(fate):
                shim = Shim(self, cluster={"lost_calls": {"start": [fate, fate]}})
                shim.event("shim")
                shim.event("placed")
                shim.event("suspect", 0)
                agent = shim.event("agent", 0)
                (life,) = shim.lives()
                self.assertEqual((agent["incarnation"], agent["pid"]), (1, life["pid"]))
                shim.signal_agent(signal.SIGUSR1)
                shim.event("exited", 0)
                shim.expect_end(0, "released")

    def test_lost_answers_do_not_exhaust_the_threads_of_an_actor(self):
        shim = Shim(self, plan={"0": [{"stubborn": True}]}, cluster={"lost_calls": {"wait": ["unanswered"] * 17}}, grace_s=1.0)
        shim.expect_agents()
        shim.event("suspect", 0)
        wait_for("the last one", lambda: len(shim.journal("lose_call")) == 17)
        shim.terminate()
        shim.process.wait(LIMIT_S)
        shim.reader.join(LIMIT_S)
        # One every 10 s.
        shim.taken = sorted({*shim.taken, *(event["seq"] for event in shim.events() if event["kind"] == "suspect")})
        shim.expect_end(143, "stopped")
        self.assertEqual(shim.signals(), [signal.SIGTERM])

    def test_method_that_fails_is_a_failure_of_the_share(self):
        shim = Shim(self, cpus=[])
        shim.event("shim")
        shim.event("placed")
        for _ in range(2):
            self.assertEqual(shim.event("exited", 0)["error"], "IndexError: list index out of range")
        shim.event("failed", 0)
        shim.expect_end(1, "share 0 failed")

    def test_failure_of_the_driver_ends_the_job_and_removes_the_group(self):
        for failing in ("init", "placement_group_table"):
            with self.subTest(failing):
                shim = Shim(self, cluster={"failing": [failing]})
                if failing != "init":
                    shim.event("shim")
                shim.expect_end(1, f"the driver has failed: {failing}: no answer from the head")
                self.assertIn("Traceback", shim.log())

    def test_failure_of_the_driver_stops_the_agents(self):
        shim = Shim(self, 2)
        shim.expect_agents(2)
        shim.change_cluster(failing=["nodes"])
        os.kill(shim.lives(0)[0]["parent"], signal.SIGKILL)
        shim.expect_end(1, "the driver has failed: nodes: no answer from the head")
        self.assertEqual(shim.signals(1), [signal.SIGTERM])

    def test_agents_end_with_a_driver_that_is_killed(self):
        shim = Shim(self, 2, plan={"0": [{"stubborn": True}]})
        shim.expect_agents(2)
        shim.process.kill()
        wait_for("the end of all processes", lambda: not any(map(shim.runs, shim.pids())))
        self.assertEqual((shim.signals(0), shim.signals(1)), ([], []))

    def test_events_are_whole_lines_although_ray_writes_too(self):
        shim = Shim(self, 2, plan={"0": [{}, {"code": 75}, {"code": 75}, {"code": 75}, {}]}, cluster={"noise": True}, silence_s=0.01, max_restarts=100)
        shim.expect_agents(2)
        shim.signal_agent(signal.SIGUSR2)
        while shim.next_event(0).get("incarnation") != 5:
            pass
        shim.terminate()
        shim.expect_end(143, "stopped")
        self.assertIn("a line of Ray\n", shim.lines)


def run_case(name):
    began, result = time.monotonic(), unittest.TestResult()
    ShimTest(name).run(result)
    print(f"{'ok' if result.wasSuccessful() else 'FAILED':6} {time.monotonic() - began:4.1f} s  {name}", flush=True)
    return [f"\n── {case}\n{error}" for case, error in result.failures + result.errors]


def main():
    names = sys.argv[1:] or unittest.TestLoader().getTestCaseNames(ShimTest)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(CASES_AT_ONCE) as pool:
        errors = [error for failed in pool.map(run_case, names) for error in failed]
    print("".join(errors), f"{len(names)} cases in {time.monotonic() - began:.1f} s, {len(errors)} failures", sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
