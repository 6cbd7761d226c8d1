"""A cluster over real networks: a head, a collector and workers in network namespaces, each with its own address.

    .ci/cluster [PROGRAM] [--faults N] [--rollouts N] [--strict] [--on-nodes PROGRAM]

Seven campaigns. Each prints its figures; wrong rows end the program with 1, and with --strict a figure above its limit too.

- faults: N times each, at random moments of a collection whose rollouts the workers pull: a worker is killed and started again, a worker is
  stopped and goes on, the cable of a worker is cut and plugged in, the head is killed and started again;
- beheaded: the head is killed and started again while a collector calls replicas by name;
- restarts: the head is killed and started again while workers, which know it by name, have rollouts: no attempt is lost. Every second time, the
  resolver takes 3 s;
- frozen: one of two replicas is stopped while a collector calls them by name;
- lossy: all workers are behind links with delay and loss;
- nat: the only worker is behind a router that translates addresses, and takes its rollouts over connections that it opens;
- everything, with --on-nodes PROGRAM, the example `on_nodes`: a worker group on two node agents runs beside the collection. 20 times N processes
  are killed (collector, head, workers, node agents, ranks) and 5 times N cables cut, at random moments and without waiting for recovery. A killed
  collector is resumed. No rank is ever alive on two nodes, and all ranks serve at the end.

The rows must be those of an undisturbed collection in one process: none lost, none twice, the same rewards, no reward on a failed attempt.
"""

import argparse
import collections
import contextlib
import ctypes
import fcntl
import heapq
import http.client
import json
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples/configs/quickstart.yaml"
HEAD = "10.77.0.1"
HEAD_URL = f"http://{HEAD}:11000"
PRIVATE = "192.168.77.2"
HEARTBEAT, TIMEOUT = 1, 3
TASKS = 100
CAMPAIGNS = ["faults", "beheaded", "restarts", "frozen", "lossy", "nat", "everything"]
CLONE_NEWNET = 0x40000000
# The names of this run: an earlier one may have been killed.
ID = f"gym{os.getpid()}"


def enter(host):
    """Moves this thread, and those that it starts, to the network of a host."""
    with open(f"/run/netns/{ID}-{host}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"enter the network of {host}")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, stdout=subprocess.DEVNULL)


class Failed(Exception):
    pass


class Link:
    """A forwarding process between the bridge and a host: it delays each packet, and loses some."""

    def __init__(self, host, name, delay, loss):
        # The namespaces belong to this run, so the process gets its number.
        command = [sys.executable, __file__, "--forward", f"{ID}-h", f"tap{name}", f"{ID}-{host}", "eth0", str(delay), str(loss)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "ready\n":
            raise Failed("the forwarding process has not started")

    def end(self):
        """Ends it, and returns how many frames it forwarded and lost."""
        self.process.terminate()
        text, _ = self.process.communicate()
        return [int(number) for number in text.split()]


def forward(first, first_name, second, second_name, delay, loss):
    """Forwards frames between two devices, which it creates in two namespaces."""

    def tap(namespace, name):
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(f"enter {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        # TUNSETIFF with IFF_TAP | IFF_NO_PI.
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x0002 | 0x1000))
        return device

    ends = [tap(first, first_name), tap(second, second_name)]
    rng, due, number, lost = random.Random(1), [], 0, 0

    def end(*_):
        print(number, lost, flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        readable, _, _ = select.select(ends, [], [], wait)
        for end in readable:
            try:
                while True:
                    frame = os.read(end, 65_536)
                    number += 1
                    if rng.random() < loss:
                        lost += 1
                    else:
                        heapq.heappush(due, (time.monotonic() + delay, number, ends[1 - ends.index(end)], frame))
            except BlockingIOError:
                pass
            except OSError:
                return
        while due and due[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(due)
            try:
                os.write(end, frame)
            except OSError:
                # The device is down, or its queue is full: the frame is lost.
                pass


class Roster:
    """Follows the members as a client does, and keeps the time of each change."""

    def __init__(self):
        self.changed = threading.Condition()
        # (time, member, incarnation, "serving", "paused" or "gone")
        self.events = []
        self.now = {}
        self.updates = 0
        self.ended = False
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self):
        seen = connection = None
        while not self.ended:
            try:
                if connection is None:
                    connection = http.client.HTTPConnection(HEAD, 11000, timeout=30)
                body = json.dumps({"seen": seen, "wait_ms": 20_000})
                connection.request("POST", "/cluster/roster", body, {"content-type": "application/json"})
                update = json.loads(connection.getresponse().read())
                seen = {"term": update["term"], "version": update["version"]}
            except (OSError, ValueError, KeyError, http.client.HTTPException):
                connection = None
                time.sleep(0.01)
                continue
            self.apply(time.time(), update)

    def apply(self, at, update):
        with self.changed:
            if update["complete"]:
                # What the head knew before it was started again.
                self.now.clear()
            for change in update["changes"]:
                if "present" in change:
                    server = change["present"]
                    if server.get("member"):
                        self.note(at, server["member"], server["incarnation"], "paused" if server.get("paused") else "serving")
                elif change["gone"].get("member"):
                    self.note(at, change["gone"]["member"], change["gone"]["incarnation"], "gone")
            self.updates += 1
            self.changed.notify_all()

    def note(self, at, member, incarnation, state):
        if self.now.get(member) != (incarnation, state):
            self.now[member] = (incarnation, state)
            self.events.append((at, member, incarnation, state))

    def wait(self, what, ready, limit):
        with self.changed:
            if not self.changed.wait_for(ready, limit):
                raise Failed(f"{what}: not within {limit} s; the roster is {self.now}")
        return time.time()

    def serving(self, *names, limit=30):
        return self.wait(f"{', '.join(names)} serve", lambda: all(self.now.get(name, (0, ""))[1] == "serving" for name in names), limit)

    def first(self, member, states, since, until=float("inf")):
        """Returns the time of the first change of a member to one of these states, from a time on."""
        with self.changed:
            return next((at for at, name, _, state in self.events if name == member and state in states and since <= at <= until), None)


class Cluster:
    def __init__(self, program):
        self.program, self.folder = program, pathlib.Path(tempfile.mkdtemp(prefix="gym-cluster-"))
        self.processes, self.hosts, self.links = {}, [], []
        self.latency_ms, self.head_url = (0, 0), HEAD_URL
        self.add_host("h", None)
        # With an address of its own; it takes the lowest of its ports otherwise, and when a host joins with a lower one, the others send to
        # the earlier address for seconds.
        ip("-n", f"{ID}-h", "link", "add", "lan", "address", "02:00:0a:4d:00:01", "type", "bridge")
        ip("-n", f"{ID}-h", "addr", "add", f"{HEAD}/24", "dev", "lan")
        ip("-n", f"{ID}-h", "link", "set", "lan", "up")
        # Nothing of this program itself talks to other networks from here on.
        enter("h")
        self.add_host("c", 2)
        # An undisturbed collection of the tasks, in one process.
        lines = (ROOT / "examples/data/math.jsonl").read_text().splitlines()[:TASKS]
        (self.folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
        self.references = {}

    def add_host(self, host, number, delay=0, loss=0):
        ip("netns", "add", f"{ID}-{host}")
        self.hosts.append(host)
        ip("-n", f"{ID}-{host}", "link", "set", "lo", "up")
        if number is None:
            return
        cable = f"cable{host}"
        if delay or loss:
            self.links.append(Link(host, host, delay, loss))
            cable = f"tap{host}"
        else:
            ip("-n", f"{ID}-h", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", f"{ID}-{host}")
        ip("-n", f"{ID}-h", "link", "set", cable, "master", "lan", "up")
        ip("-n", f"{ID}-{host}", "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        ip("-n", f"{ID}-{host}", "link", "set", "eth0", "up")

    def add_host_behind_router(self, host, router, number):
        """Adds a host with a private address. It reaches the others through a router, under the address of the router; they do not reach it."""
        self.add_host(router, number)
        ip("netns", "add", f"{ID}-{host}")
        self.hosts.append(host)
        ip("-n", f"{ID}-{host}", "link", "set", "lo", "up")
        ip("-n", f"{ID}-{router}", "link", "add", "inside", "type", "veth", "peer", "name", "eth0", "netns", f"{ID}-{host}")
        ip("-n", f"{ID}-{router}", "addr", "add", "192.168.77.1/24", "dev", "inside")
        ip("-n", f"{ID}-{router}", "link", "set", "inside", "up")
        ip("-n", f"{ID}-{host}", "addr", "add", f"{PRIVATE}/24", "dev", "eth0")
        ip("-n", f"{ID}-{host}", "link", "set", "eth0", "up")
        ip("-n", f"{ID}-{host}", "route", "add", "default", "via", "192.168.77.1")
        rules = """
            table ip nat {
                chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
                chain in { type filter hook forward priority 0; iifname "eth0" ct state new drop; }
            }"""
        for command, text in [(["tee", "/proc/sys/net/ipv4/ip_forward"], "1"), (["nft", "-f", "-"], rules)]:
            subprocess.run(["ip", "netns", "exec", f"{ID}-{router}", *command], input=text, text=True, check=True, stdout=subprocess.DEVNULL)
        # The head sends packets for the private network to the router, as to a gateway; the collector has no route to it.
        ip("-n", f"{ID}-h", "route", "add", "192.168.77.0/24", "via", f"10.77.0.{number}")

    def start(self, name, host, arguments, program=None, variables=None):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HEAD_SERVER", "NUM_EXPECTED", "WORKER_"))}
        environment.update(variables or {})
        log = open(self.folder / f"{name}.log", "ab")
        # `ip` becomes the program, so signals reach it.
        command = ["ip", "netns", "exec", f"{ID}-{host}", program or self.program, *map(str, arguments)]
        self.processes[name] = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        log.close()
        return self.processes[name]

    def start_head(self):
        return self.start("h", "h", ["run", "--head-only", "--config", CONFIG, "++head_server.host=0.0.0.0"])

    def start_worker(self, name, *options):
        low, high = self.latency_ms
        return self.start(name, name, [
            "run", "--worker", "--head-url", self.head_url, "--host", "0.0.0.0", "--name", name, "--config", CONFIG,
            f"+policy_model.responses_api_models.scripted_model.latency_ms=[{low},{high}]",
            "--heartbeat-interval", HEARTBEAT, "--worker-timeout", TIMEOUT, *options,
        ])

    def kill(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def signal(self, name, number):
        self.processes[name].send_signal(number)

    def cable(self, host, state):
        ip("-n", f"{ID}-h", "link", "set", f"cable{host}", state)

    def collect(self, name, rollouts, *options):
        """Begins a collection, and returns its process."""
        output = self.folder / f"{name}.jsonl"
        return self.start(f"collect-{name}", "c", [
            "collect", "--head-url", HEAD_URL, "--agent", "math_simple_agent", "--input", self.folder / "tasks.jsonl", "--output", output,
            "--num-repeats", rollouts // TASKS, "--add-seed", "--progress", "none", "--events", self.folder / f"{name}.events", *options,
        ])

    def rows(self, name):
        output = self.folder / f"{name}.jsonl"
        return output.read_bytes().count(b"\n") if output.exists() else 0

    def reference(self, rollouts):
        if rollouts not in self.references:
            name = f"undisturbed-{rollouts}"
            process = self.start(name, "c", [
                "collect", "--config", CONFIG, "--agent", "math_simple_agent", "--input", self.folder / "tasks.jsonl",
                "--output", self.folder / f"{name}.jsonl", "--num-repeats", rollouts // TASKS, "--add-seed", "--progress", "none",
                "+head_server.port=0",
            ])
            if process.wait(600) != 0:
                raise Failed(f"the undisturbed collection ended with {process.returncode}")
            self.references[rollouts] = read_rows(self.folder / f"{name}.jsonl", rollouts)
        return self.references[rollouts]

    def ended(self, name, rollouts, limit):
        """Waits for the end of a collection, and compares what it wrote. Returns the failed attempts by class."""
        process = self.processes[f"collect-{name}"]
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"{name} hangs: {self.rows(name)} of {rollouts} rows after {limit} s") from None
        if status != 0:
            raise Failed(f"{name} ended with {status}")
        rows, reference = read_rows(self.folder / f"{name}.jsonl", rollouts), self.reference(rollouts)
        different = [key for key in reference if rows.get(key) != reference[key]]
        if different:
            raise Failed(f"{name}: {len(different)} rows differ from the undisturbed ones, such as {different[0]}")
        classes = collections.Counter()
        with open(self.folder / f"{name}_failures.jsonl") as file:
            for line in file:
                row = json.loads(line)
                if row.get("reward") is not None:
                    raise Failed(f"{name}: a failed attempt has a reward")
                classes[row["_ng_failure_class"]] += 1
        print(f"cluster: {name}: {rollouts:,} of {rollouts:,} rows as undisturbed: 0 lost, 0 twice, 0 rewards on failed attempts; "
              f"{sum(classes.values()):,} attempts failed: {dict(classes)}", flush=True)
        return classes

    def end_workers(self):
        for name in [name for name in self.processes if re.fullmatch(r"w\d+", name)]:
            self.signal(name, signal.SIGCONT)
            self.kill(name)

    def clean_up(self, keep):
        for name in list(self.processes):
            self.kill(name)
        for link in self.links:
            frames, lost = link.end()
            print(f"cluster: a slow link had {frames:,} frames and lost {lost:,}")
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", f"{ID}-{host}"], check=False)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def without_chance(value):
    """Leaves out times, and identifiers that are random."""
    if isinstance(value, dict):
        return {key: without_chance(item) for key, item in value.items() if key not in ("created_at", "id", "call_id")}
    if isinstance(value, list):
        return [without_chance(item) for item in value]
    return value


def read_rows(path, rollouts):
    """Returns a hash of each row by its task and rollout, without what differs between two runs."""
    rows = {}
    with open(path) as file:
        for line in file:
            row = json.loads(line)
            for name in ["_gym_episode", "_ng_attempt_index", "_ng_environment_server", "_ng_result_type"]:
                row.pop(name, None)
            key = (row["_ng_task_index"], row["_ng_rollout_index"])
            if key in rows:
                raise Failed(f"{path.name}: {key} has two rows")
            rows[key] = hash(json.dumps(without_chance(row), sort_keys=True))
    if len(rows) != rollouts:
        raise Failed(f"{path.name}: {len(rows)} of {rollouts} rows")
    return rows


class RowCount:
    """Counts the lines of a file that grows."""

    def __init__(self, path):
        self.path, self.offset, self.rows, self.lock = path, 0, 0, threading.Lock()

    def count(self):
        with self.lock, open(self.path, "rb") as file:
            file.seek(self.offset)
            text = file.read()
            self.offset += len(text)
            self.rows += text.count(b"\n")
            return self.rows


class Figures:
    """Times by what they measure, each with a limit."""

    def __init__(self):
        self.figures, self.limits = collections.defaultdict(list), {}

    def add(self, what, limit, value):
        self.limits[what] = limit
        self.figures[what].append(value)

    def print(self, unit="s"):
        width = max(map(len, self.figures), default=0)
        over = 0
        for what, values in self.figures.items():
            limit, values = self.limits[what], sorted(values)
            above = sum(value > limit for value in values)
            over += above
            p50, p99 = values[len(values) // 2], values[min(len(values) - 1, len(values) * 99 // 100)]
            mark = f"   {above} ABOVE THE LIMIT" if above else ""
            print(f"  {what:<{width}}  {len(values):>4} times   p50 {p50:7.3f}   p99 {p99:7.3f}   max {values[-1]:7.3f}   limit {limit} {unit}{mark}", flush=True)
        return over


class FaultCampaign:
    """Faults in three lanes, each of which strikes another worker at a time. The head is killed between them."""

    WORKERS = [f"w{number}" for number in range(1, 6)]
    LANES = 3

    def __init__(self, cluster, roster, faults, seed):
        self.cluster, self.roster, self.faults = cluster, roster, faults
        self.rng = random.Random(seed)
        self.deck = [kind for kind in ["kill", "stop", "cut"] for _ in range(faults)]
        self.rng.shuffle(self.deck)
        self.lock = threading.Condition()
        self.struck, self.record, self.failure = set(), [], None
        self.lanes_on, self.head_wants = 0, False
        self.heads = []
        # The faults are spread over this many rows.
        self.count, self.rows_struck, self.dealt, self.cards = None, 0, 0, len(self.deck)

    def run(self, rollouts):
        cluster = self.cluster
        name = "faults"
        began = time.time()
        cluster.collect(name, rollouts, "--dispatch", "pull", "--concurrency", 40, "--lost-attempts", 100)
        while cluster.rows(name) < 20:
            if time.time() - began > 60:
                raise Failed(f"{name} has no rows")
            time.sleep(0.05)
        self.count, self.rows_struck = RowCount(cluster.folder / f"{name}.jsonl"), rollouts * 8 // 10
        threads = [threading.Thread(target=self.guarded, args=(self.lane,)) for _ in range(self.LANES)]
        threads.append(threading.Thread(target=self.guarded, args=(self.head_lane,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        struck_for = time.time() - began
        if cluster.processes[f"collect-{name}"].poll() is not None:
            raise Failed(f"{name} ended before all faults; it needs more rollouts or slower models")
        rows_struck = cluster.rows(name)
        classes = cluster.ended(name, rollouts, 1_800)
        print(f"  {len(self.record) + len(self.heads)} faults in {struck_for:.0f} s, during {rows_struck:,} rollouts; the whole took {time.time() - began:.0f} s")
        return self.figures(name), classes

    def guarded(self, lane):
        try:
            lane()
        except Exception as error:  # noqa: BLE001 - ends the campaign
            with self.lock:
                self.failure = self.failure or error
                self.lock.notify_all()

    def lane(self):
        while True:
            while not self.failure and self.count.count() < self.rows_struck * self.dealt // self.cards:
                time.sleep(0.05)
            with self.lock:
                # A fault while the head is away, or just back, has other figures.
                self.lock.wait_for(lambda: self.failure or not self.head_wants)
                if self.failure or not self.deck:
                    return
                kind = self.deck.pop()
                self.dealt += 1
                worker = self.rng.choice([worker for worker in self.WORKERS if worker not in self.struck])
                self.struck.add(worker)
                self.lanes_on += 1
                pause = self.rng.uniform(0, 0.5)
                # Short enough to return, or long enough to be given up.
                lasts = self.rng.uniform(0.2, 2.5) if self.rng.random() < 0.4 else TIMEOUT + self.rng.uniform(1.2, 2)
            time.sleep(pause)
            self.strike(kind, worker, lasts)
            with self.lock:
                self.struck.discard(worker)
                self.lanes_on -= 1
                self.lock.notify_all()

    def strike(self, kind, worker, lasts):
        cluster, roster = self.cluster, self.roster
        incarnation = roster.now[worker][0]
        at = time.time()
        if kind == "kill":
            cluster.kill(worker)
            roster.wait(f"{worker} is gone", lambda: roster.first(worker, ["gone"], at), 30)
            cluster.start_worker(worker, "--pull-capacity", 24)
            roster.wait(f"{worker} serves again", lambda: roster.now.get(worker, (0, ""))[1] == "serving" and roster.now[worker][0] != incarnation, 60)
        else:
            begin, end = {
                "stop": (lambda: cluster.signal(worker, signal.SIGSTOP), lambda: cluster.signal(worker, signal.SIGCONT)),
                "cut": (lambda: cluster.cable(worker, "down"), lambda: cluster.cable(worker, "up")),
            }[kind]
            begin()
            time.sleep(lasts)
            end()
            # It may not have noticed yet.
            time.sleep(0.3)
            roster.serving(worker, limit=60)
        with self.lock:
            self.record.append((kind, worker, at, lasts, time.time()))

    def head_lane(self):
        pids = lambda: {worker: self.cluster.processes[worker].pid for worker in self.WORKERS}
        for number in range(self.faults):
            # At a random moment among the other faults.
            with self.lock:
                due = len(self.deck) * (self.faults - number) // max(1, self.faults - number + 1)
                self.lock.wait_for(lambda: self.failure or len(self.deck) <= due)
                if self.failure:
                    return
                self.head_wants = True
                self.lock.wait_for(lambda: self.failure or self.lanes_on == 0)
                if self.failure:
                    return
            time.sleep(self.rng.uniform(0, 0.3))
            before = pids()
            self.heads.append(behead(self.cluster, self.roster, self.WORKERS, self.rng.uniform(0, 1)))
            if pids() != before or any(self.cluster.processes[worker].poll() is not None for worker in self.WORKERS):
                raise Failed("a worker was restarted with its head")
            time.sleep(self.rng.uniform(0, 0.3))
            with self.lock:
                self.head_wants = False
                self.lock.notify_all()

    def figures(self, name):
        """Reads the course of the attempts, and returns the figures."""
        lost, starts = collections.defaultdict(list), collections.defaultdict(list)
        with open(self.cluster.folder / f"{name}.events") as file:
            for line in file:
                event = json.loads(line)
                if event["event"] == "started":
                    starts[event["task_index"], event["rollout_index"]].append(event["time"])
                elif event["event"] == "failed" and event["class"] == "worker_lost":
                    worker = re.search(r"worker (w\d+) was lost", event["cause"])
                    lost[worker[1]].append((event["time"], (event["task_index"], event["rollout_index"])))
        figures = Figures()
        for kind, worker, at, lasts, until in self.record:
            long = kind == "kill" or lasts > TIMEOUT + 1
            if not long:
                continue
            label = {"kill": "SIGKILL", "stop": "SIGSTOP", "cut": "cable cut"}[kind]
            if kind == "kill":
                figures.add(f"{label}: gone", 0.25, self.roster.first(worker, ["gone"], at) - at)
            else:
                suspect = self.roster.first(worker, ["paused", "gone"], at, until)
                # 50 ms are the time until this program hears of it.
                figures.add(f"{label}: suspect", 2 * HEARTBEAT + 0.05, (suspect or float("inf")) - at)
            moved = [
                next((start for start in starts[rollout] if start >= ended - 0.001), None)
                for ended, rollout in lost[worker] if at <= ended <= until
            ]
            moved = [start - at for start in moved if start is not None]
            if moved:
                figures.add(f"{label}: its work elsewhere", 1 if kind == "kill" else TIMEOUT + 1, max(moved))
        for complete in self.heads:
            figures.add("head killed and restarted: complete", 2, complete)
        return figures


class Everything:
    """Kills and cuts whatever there is, at random moments, and repairs it some time later."""

    WORKERS = ["w1", "w2", "w3", "w4"]
    # The last part of the address of each.
    NODES = {"n1": 31, "n2": 32}
    # How often each strikes for one fault of the command line.
    KILLS = {"worker": 6, "rank": 6, "agent": 4, "head": 2, "collector": 2}
    CUTS = {"cable of a worker": 4, "cable of a node": 1}
    NAME = "everything"

    def __init__(self, cluster, program, rng):
        self.cluster, self.program, self.rng = cluster, os.path.realpath(program), rng
        self.variables = {"GYM_JOIN_SECRET": ID, "HEAD_SERVER_URL": HEAD_URL}
        # What to do when, and what is struck until then.
        self.repairs, self.struck, self.number = [], set(), 0
        self.done, self.twice, self.ended = collections.Counter(), set(), False

    def start_node(self, node):
        self.cluster.start(node, node, ["node", node, "--host", f"10.77.0.{self.NODES[node]}"], self.program, self.variables)

    def collect(self, *options):
        self.cluster.collect(self.NAME, self.rollouts, "--dispatch", "pull", "--concurrency", 100, "--lost-attempts", 100, *options)

    def ranks(self):
        """Returns the living ranks: process, rank and node of each."""
        namespaces = {os.stat(f"/run/netns/{ID}-{node}").st_ino: node for node in self.NODES}
        found = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            try:
                node = namespaces.get(os.stat(f"/proc/{process}/ns/net").st_ino)
                variables = node and pathlib.Path(f"/proc/{process}/environ").read_bytes()
                rank = variables and re.search(rb"(?:^|\0)RANK=(\d+)\0", variables)
                if rank and not re.search(r"^State:\s[ZX]", pathlib.Path(f"/proc/{process}/status").read_text(), re.MULTILINE):
                    found.append((int(process), int(rank[1]), node))
            except OSError:
                pass
        return found

    def watch(self):
        while not self.ended:
            nodes = collections.defaultdict(set)
            for _, rank, node in self.ranks():
                nodes[rank].add(node)
            self.twice |= {rank for rank, on in nodes.items() if len(on) > 1}
            time.sleep(0.2)

    def repair(self, after, what, action):
        self.number += 1
        self.struck.add(what)
        heapq.heappush(self.repairs, (time.time() + after, self.number, what, action))

    def strike(self, kind):
        """Returns `False` if all that this kind could strike is struck already."""
        cluster, rng = self.cluster, self.rng
        names = {"worker": self.WORKERS, "cable of a worker": self.WORKERS, "agent": self.NODES, "cable of a node": self.NODES,
                 "head": ["h"], "collector": ["collector"], "rank": ["rank"]}[kind]
        names = [name for name in names if name not in self.struck]
        if not names:
            return False
        name, away = rng.choice(names), rng.uniform(0, 2)
        if kind == "rank":
            ranks = self.ranks()
            if not ranks:
                return False
            try:
                os.kill(rng.choice(ranks)[0], signal.SIGKILL)
            except ProcessLookupError:
                return False
        elif kind.startswith("cable"):
            cluster.cable(name, "down")
            away = rng.uniform(0.2, 2.5) if rng.random() < 0.5 else TIMEOUT + rng.uniform(1, 2)
            self.repair(away, name, lambda: cluster.cable(name, "up"))
        elif kind == "collector":
            cluster.kill(f"collect-{self.NAME}")
            self.repair(away, name, lambda: self.collect("--resume"))
        else:
            cluster.kill(name)
            start = {"worker": lambda: cluster.start_worker(name, "--pull-capacity", 24), "agent": lambda: self.start_node(name),
                     "head": cluster.start_head}[kind]
            self.repair(away, name, start)
        self.done[kind] += 1
        return True

    def mend(self, all_of_them=False):
        while self.repairs and (all_of_them or self.repairs[0][0] <= time.time()):
            at, _, name, action = heapq.heappop(self.repairs)
            time.sleep(max(0, at - time.time()))
            action()
            self.struck.discard(name)

    def collects(self):
        """Resumes a collection that found no head, as a supervisor does. Returns `False` when it is complete."""
        if "collector" in self.struck:
            return True
        status = self.cluster.processes[f"collect-{self.NAME}"].poll()
        if status:
            self.repair(1, "collector", lambda: self.collect("--resume"))
        return status != 0

    def serve(self):
        """Returns `True` if all ranks serve, as the controller says."""
        lines = [line for line in (self.cluster.folder / "controller.log").read_text().splitlines() if " ranks " in line]
        return bool(lines) and lines[-1].count("/healthy") == 4

    def wait_for(self, what, ready, limit=60):
        began = time.time()
        while not ready():
            if time.time() - began > limit:
                raise Failed(f"{self.NAME}: never came: {what}")
            time.sleep(0.1)

    def run(self, rollouts, faults):
        cluster, self.rollouts = self.cluster, rollouts
        for node, number in self.NODES.items():
            cluster.add_host(node, number)
            self.start_node(node)
        cluster.add_host("g", 40)
        self.wait_for("the nodes join", lambda: {member["name"] for member in members()} >= self.NODES.keys())
        cluster.start("controller", "g", ["group"], self.program, self.variables)
        self.wait_for("all ranks serve", self.serve)
        watching = threading.Thread(target=self.watch)
        watching.start()
        try:
            self.collect()
            self.wait_for("the first rows", lambda: cluster.rows(self.NAME) >= 20)
            deck = [kind for kind, times in {**self.KILLS, **self.CUTS}.items() for _ in range(times * faults)]
            self.rng.shuffle(deck)
            count, cards = RowCount(cluster.folder / f"{self.NAME}.jsonl"), len(deck)
            began = time.time()
            while deck:
                time.sleep(self.rng.uniform(0, 0.4))
                self.mend()
                if not self.collects():
                    raise Failed(f"{self.NAME} ended before all faults; it needs more rollouts")
                # Over the whole collection.
                if count.count() < rollouts * 8 // 10 * (cards - len(deck)) // cards:
                    continue
                kind = deck.pop()
                if not self.strike(kind):
                    # Later, between the others.
                    deck.insert(self.rng.randrange(len(deck) + 1), kind)
            struck_for, rows = time.time() - began, cluster.rows(self.NAME)
            while self.collects():
                time.sleep(0.1)
                self.mend()
                if time.time() - began > 3_600:
                    raise Failed(f"{self.NAME} hangs: {cluster.rows(self.NAME)} of {rollouts} rows")
            self.mend(all_of_them=True)
            cluster.ended(self.NAME, rollouts, 60)
            self.wait_for("all ranks serve again", self.serve)
        finally:
            self.ended = True
            watching.join()
        if self.twice:
            raise Failed(f"{self.NAME}: ranks {sorted(self.twice)} were alive on two nodes at a time")
        kills = sum(self.done[kind] for kind in self.KILLS)
        print(f"cluster: {self.NAME}: {kills} kills and {cards - kills} cut cables in {struck_for:.0f} s, during {rows:,} rollouts: {dict(self.done)}; "
              "no rank was alive on two nodes, and all serve", flush=True)


def members():
    """Returns the members that the head lists."""
    connection = http.client.HTTPConnection(HEAD, 11000, timeout=30)
    connection.request("GET", "/cluster/members")
    return json.loads(connection.getresponse().read())


def behead(cluster, roster, workers, away):
    """Kills the head, starts it again, and returns the time from its return until all workers serve."""
    cluster.kill("h")
    with roster.changed:
        roster.now.clear()
    time.sleep(away)
    cluster.start_head()
    while True:
        try:
            socket.create_connection((HEAD, 11000), timeout=1).close()
            break
        except OSError:
            time.sleep(0.002)
    back = time.time()
    return max(0.0, roster.serving(*workers, limit=60) - back)


def requests_of(workers, urls):
    """Returns how many rollouts each worker's agent was called for."""
    counts = {}
    for worker in workers:
        host, port = urls[worker].removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        found = re.findall(r'^gym_requests_total\{([^}]*)\} (\d+)', text, re.MULTILINE)
        counts[worker] = sum(int(count) for labels, count in found if 'server="math_simple_agent"' in labels and 'route="/run"' in labels)
    return counts


def agents_of(workers):
    connection = http.client.HTTPConnection(HEAD, 11000, timeout=10)
    connection.request("GET", "/registry/instances?name=math_simple_agent")
    found = json.loads(connection.getresponse().read())
    urls = {server["member"]: next(url for url in server["endpoints"] if url.startswith("http://")) for server in found}
    return {worker: urls[worker].rstrip("/") for worker in workers}


def beheaded(cluster, roster, workers, faults, rollouts, rng):
    """The head is killed while replicas are called by name."""
    name, figures = "beheaded", Figures()
    cluster.collect(name, rollouts, "--dispatch", "push", "--concurrency", 100)
    urls = agents_of(workers)
    began = time.time()
    while sum(requests_of(workers, urls).values()) < 100:
        if time.time() - began > 60:
            raise Failed(f"{name} has no rollouts")
        time.sleep(0.05)
    for _ in range(faults):
        time.sleep(rng.uniform(0, 0.5))
        if cluster.processes[f"collect-{name}"].poll() is not None:
            raise Failed(f"{name} ended before all faults")
        before = requests_of(workers, urls)
        complete = behead(cluster, roster, workers, rng.uniform(0, 1))
        # As long as it recovers.
        time.sleep(2.2)
        after = requests_of(workers, urls)
        counts = [after[worker] - before[worker] for worker in workers]
        figures.add("head killed and restarted: complete", 2, complete)
        if sum(counts) >= 50 * len(workers):
            figures.add("largest share of a replica meanwhile", 1.2, max(counts) * len(workers) / sum(counts))
    cluster.ended(name, rollouts, 1_800)
    return figures


class Resolver:
    """Answers at an address that every name is the head's, after a delay."""

    def __init__(self, at, head):
        self.delay, self.head = 0.0, head
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((at, 53))
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            query, sender = self.socket.recvfrom(4_096)
            threading.Timer(self.delay, self.answer, (query, sender)).start()

    def answer(self, query, sender):
        end = query.index(b"\0", 12) + 5
        is_a = query[end - 4 : end - 2] == b"\0\1"
        record = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(self.head) if is_a else b""
        header = query[:2] + b"\x81\x80\0\1" + (b"\0\1" if is_a else b"\0\0") + b"\0\0\0\0"
        self.socket.sendto(header + query[12:end] + record, sender)


@contextlib.contextmanager
def resolver_of(hosts):
    """`ip netns exec` shows these files to the processes of a namespace."""
    folders = [pathlib.Path(f"/etc/netns/{ID}-{host}") for host in hosts]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "resolv.conf").write_text(f"nameserver {HEAD}\noptions timeout:10\n")
    try:
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder)


def restarts(cluster, roster, workers, count, resolver, dispatch):
    """The head is killed and started again, and no attempt is lost."""
    name, figures = f"restarts-{dispatch}", Figures()
    # More than end meanwhile; the collection is stopped after the last restart.
    rollouts = 100 * TASKS
    collecting = cluster.collect(name, rollouts, "--dispatch", dispatch, "--concurrency", 40)
    began = time.time()
    while cluster.rows(name) < 20:
        if time.time() - began > 60:
            raise Failed(f"{name} has no rows")
        time.sleep(0.05)
    for number in range(count):
        resolver.delay = 3.0 if number % 2 else 0.0
        complete = behead(cluster, roster, workers, 0.5)
        slow = ", with a resolver that takes 3 s" if number % 2 else ""
        figures.add(f"head killed and restarted, {dispatch}{slow}: complete", 2 + resolver.delay * 2, complete)
        # Longer than a rollout takes.
        time.sleep(3)
    resolver.delay = 0.0
    if collecting.poll() is not None:
        raise Failed(f"{name} ended before the last restart")
    collecting.send_signal(signal.SIGINT)
    collecting.wait(60)
    failures = (cluster.folder / f"{name}_failures.jsonl").read_text().splitlines()
    if failures:
        raise Failed(f"{name}: {len(failures)} attempts were lost in {count} restarts of the head, such as {failures[0][:600]}")
    print(f"cluster: {name}: {count} restarts of the head, {cluster.rows(name):,} rows, 0 attempts lost", flush=True)
    return figures


def frozen(cluster, roster, workers, rollouts, rng):
    """One of two replicas is stopped, and goes on only at the end."""
    name, figures = "frozen", Figures()
    cluster.collect(name, rollouts, "--dispatch", "push", "--concurrency", 64)
    began = time.time()
    while cluster.rows(name) < rollouts // 8:
        if time.time() - began > 120:
            raise Failed(f"{name} has too few rows")
        time.sleep(0.02)
    victim = rng.choice(workers)
    at = time.time()
    cluster.signal(victim, signal.SIGSTOP)
    roster.wait(f"{victim} is gone", lambda: roster.first(victim, ["gone"], at), 30)
    figures.add("one of two replicas stopped: gone", TIMEOUT + 1, time.time() - at)
    cluster.ended(name, rollouts, 900)
    cluster.signal(victim, signal.SIGCONT)
    roster.serving(*workers)
    return figures


def lossy(cluster, roster, workers, rollouts):
    """Workers behind links with delay and loss: none of them is given up."""
    name, figures = "lossy", Figures()
    at = time.time()
    cluster.collect(name, rollouts, "--dispatch", "pull", "--concurrency", 200)
    cluster.ended(name, rollouts, 1_800)
    with roster.changed:
        states = [(member, state) for when, member, _, state in roster.events if when >= at and member in workers]
    figures.add("living members that were declared gone", 0, sum(state == "gone" for _, state in states))
    figures.add("living members that were suspect for a moment", 0, sum(state == "paused" for _, state in states))
    return figures


def nat(cluster, worker, rollouts):
    """A worker that nobody reaches takes all rollouts."""
    servers = next(member["servers"] for member in members() if member["name"] == worker and member["state"] == "serving")
    addresses = {re.fullmatch(r"http://(.*):(\d+)", endpoint).groups() for server in servers for endpoint in server["endpoints"] if endpoint.startswith("http:")}
    if {host for host, _ in addresses} != {PRIVATE}:
        raise Failed(f"the worker behind the router is at {addresses}")
    host, port = min(addresses)
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        pass
    else:
        raise Failed(f"the worker behind the router can be reached at {host}:{port}")
    name = "nat"
    cluster.collect(name, rollouts)
    classes = cluster.ended(name, rollouts, 300)
    if classes:
        raise Failed(f"{name}: attempts failed: {dict(classes)}")


def drain(cluster, worker):
    """A worker that is asked to drain ends by itself."""
    subprocess.run(["ip", "netns", "exec", f"{ID}-h", cluster.program, "drain", worker, "--head-url", HEAD_URL],
                   check=True, stdout=subprocess.DEVNULL, timeout=60)
    status = cluster.processes.pop(worker).wait(60)
    if status != 0:
        raise Failed(f"a drained worker ended with {status}")


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "--forward":
        first, first_name, second, second_name, delay, loss = sys.argv[2:]
        return forward(first, first_name, second, second_name, float(delay), float(loss))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--faults", type=int, default=10, help="how often each kind of fault strikes")
    parser.add_argument("--rollouts", type=int, default=2_000, help="rollouts of the campaign of faults")
    parser.add_argument("--seed", type=int, default=1, help="decides which faults strike when")
    parser.add_argument("--only", choices=CAMPAIGNS, action="append")
    parser.add_argument("--on-nodes", help="the example `on_nodes`, for the campaign of everything")
    parser.add_argument("--strict", action="store_true", help="fail if a figure is above its limit")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the rows and the logs")
    options = parser.parse_args()
    wanted = options.only or [name for name in CAMPAIGNS if name != "everything" or options.on_nodes]
    if "everything" in wanted and not options.on_nodes:
        parser.error("the campaign of everything needs --on-nodes PROGRAM, the example `on_nodes`")
    rng, over = random.Random(options.seed), 0
    print(f"cluster: seed {options.seed}", flush=True)
    cluster = Cluster(options.program)
    status = 1
    try:
        cluster.start_head()
        roster = Roster()
        rollouts = options.rollouts
        workers = FaultCampaign.WORKERS
        for number, worker in enumerate(workers, 11):
            cluster.add_host(worker, number)
        refused = subprocess.run(
            ["ip", "netns", "exec", f"{ID}-w1", options.program, "run", "--worker", "--head-url", HEAD_URL, "--config", str(CONFIG)],
            cwd=cluster.folder, capture_output=True, text=True, timeout=60, check=False)
        if refused.returncode == 0 or "add --host 10.77.0.11" not in refused.stdout + refused.stderr:
            raise Failed(f"a worker without --host: {refused.stdout}{refused.stderr}")

        def start(names, latency_ms, *arguments):
            # A process of the earlier campaign has another incarnation.
            before = {name: roster.now.get(name, (0, ""))[0] for name in names}
            cluster.end_workers()
            cluster.latency_ms = latency_ms
            for name in names:
                cluster.start_worker(name, *arguments)

            def serves(name):
                incarnation, state = roster.now.get(name, (0, ""))
                return state == "serving" and incarnation != before[name]

            roster.wait("the workers start", lambda: all(map(serves, names)), 60)

        if "faults" in wanted:
            # Two turns a rollout: long enough that the faults strike the whole collection.
            start(workers, (400, 1_000), "--pull-capacity", 24)
            campaign = FaultCampaign(cluster, roster, options.faults, options.seed)
            figures, _ = campaign.run(rollouts)
            over += figures.print()
            drain(cluster, "w1")
        if "everything" in wanted:
            start(Everything.WORKERS, (400, 1_000), "--pull-capacity", 24)
            Everything(cluster, options.on_nodes, rng).run(rollouts, options.faults)
        if "beheaded" in wanted:
            start(workers[:4], (100, 300), "--pull-capacity", 24)
            faults = max(2, options.faults // 10)
            over += beheaded(cluster, roster, workers[:4], faults, max(1_000, faults * 2_000), rng).print("")
        if "restarts" in wanted:
            names, count = workers[:2], max(2, options.faults // 10)
            resolver = Resolver(HEAD, HEAD)
            with resolver_of(names):
                for dispatch in ("pull", "push"):
                    cluster.head_url = "http://head.gym:11000"
                    start(names, (400, 1_000), "--pull-capacity", 24)
                    over += restarts(cluster, roster, names, count, resolver, dispatch).print()
                    cluster.head_url = HEAD_URL
        if "frozen" in wanted:
            start(workers[:2], (0, 2))
            over += frozen(cluster, roster, workers[:2], rollouts * 12 // 10, rng).print()
        if "lossy" in wanted:
            cluster.end_workers()
            for number, worker in enumerate(["w21", "w22"], 21):
                cluster.add_host(worker, number, delay=0.02, loss=0.01)
            start(["w21", "w22"], (50, 150), "--pull-capacity", 100)
            over += lossy(cluster, roster, ["w21", "w22"], rollouts).print("")
        if "nat" in wanted:
            cluster.end_workers()
            cluster.add_host_behind_router("w31", "router", 30)
            start(["w31"], (0, 2), "--pull-capacity", 100)
            began = time.time()
            nat(cluster, "w31", max(TASKS, rollouts // 4))
            print(f"  one worker behind a router took all of them in {time.time() - began:.1f} s", flush=True)
        roster.ended = True
        status = 0
        if over:
            print(f"cluster: {over} figures are above their limits", flush=True)
            status = int(options.strict)
        print("cluster: passed" if status == 0 else "cluster: FAILED", flush=True)
    except Failed as failure:
        print(f"cluster: {failure}", file=sys.stderr)
        for log in sorted(cluster.folder.glob("*.log")):
            print(f"── {log.name}\n{''.join(log.read_text(errors='replace').splitlines(keepends=True)[-15:])}", file=sys.stderr)
    finally:
        cluster.clean_up(options.keep)
    return status


if __name__ == "__main__":
    sys.exit(main())
