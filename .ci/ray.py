#!/usr/bin/env python3
"""Starts a Ray cluster whose nodes are network namespaces of this machine, and runs a program in a further one.

    .ci/ray.py --python "$(.ci/python-ray | tail -n 1)" [--nodes 2] [--cpus 4] [--gpus 4] -- PROGRAM ARGS…

The head is 10.88.0.1, the nodes n1, n2, … are 10.88.0.11, 10.88.0.12, …, and the program runs at 10.88.0.9. Each node has its own processes
and its own Ray files. The exit status is that of the program; 77 if this machine cannot create the namespaces, 70 if Ray does not start.

The program finds these variables:

- GYM_RAY_TEST_ADDRESS: the address of Ray's dashboard and of its REST API
- GYM_RAY_TEST_PYTHON: the interpreter of the Ray processes
- GYM_RAY_TEST_FAULT_TOLERANT: 1 with --fault-tolerant
- GYM_RAY_TEST_CONTROL: a Unix socket that takes requests, one line of JSON each, and answers each with {"ok": true, …} or
  {"ok": false, "error": "…"}

| request | effect |
|---|---|
| {"do": "nodes"} | returns "nodes", the head among them: name, ip, alive (has processes), connected (its link is up), pids |
| {"do": "kill_node", "node": "n1"} | kills all processes at once; connections are reset, unless a partition comes first |
| {"do": "kill_raylet", "node": "n1"} | kills Ray's node manager only |
| {"do": "start_node", "node": "n1"} | starts a node, again or for the first time, and returns its "node_id" once it is alive; takes "cpus", "gpus", "labels", "resources" |
| {"do": "drain_node", "node": "n1", "seconds": 20} | lets Ray drain a node, as an autoscaler does before it takes the machine away: Ray starts nothing new there |
| {"do": "partition", "node": "n1"} | takes the link down |
| {"do": "heal", "node": "n1"} | takes the link up |
| {"do": "kill_head"}, {"do": "start_head"} | the same for the head, which starts as a new cluster: the nodes must be started again. With --fault-tolerant, it goes on as the same cluster, and the nodes stay |
| {"do": "repair"} | starts the head and the first nodes again if they were killed, drained or cut off since, and kills the nodes that were added |
| {"do": "list_processes", "node": "n1", "containing": "text"} | returns "processes", pid, parent and command of each whose command line or environment has the text |
| {"do": "kill_process", "pid": 4711, "signal": 9} | sends a signal to a process of a node |
"""

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

HEAD, PORT, DASHBOARD = "10.88.0.1", 6379, 8265
REDIS, REDIS_PORT = "10.88.0.2", 6390
NETWORKS = pathlib.Path("/run/netns")
CLONE_NEWNET = 0x40000000
PREFIX = "gymray"
# The names of this run. The folder is short: Ray puts Unix sockets deep below it, and their paths have 107 bytes at most.
ID = f"{PREFIX}{os.getpid()}"
FOLDER = pathlib.Path("/tmp") / ID
START_S, KILL_S = 90, 30
# What a node may be started with, and the option of `ray start`.
OPTIONS = {"cpus": "num-cpus", "gpus": "num-gpus", "labels": "labels", "resources": "resources"}


def parent_of(pid):
    """Returns the process that started this one, or 0 if it has ended."""
    try:
        return int(re.search(r"^PPid:\s*(\d+)$", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1])
    except OSError:
        return 0


class Failed(Exception):
    pass


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=KILL_S, check=False)
    if done.returncode != 0:
        raise Failed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def wait(what, ready, limit, pause=0.05):
    """Returns the first true value of `ready`."""
    until = time.monotonic() + limit
    while True:
        value = ready()
        if value:
            return value
        if time.monotonic() > until:
            raise Failed(f"{what}: not within {limit} s")
        time.sleep(pause)


def processes_in(network):
    """Returns the pids of the processes in a network namespace; zombies are in none."""
    wanted, found = os.stat(NETWORKS / network), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), wanted):
                found.append(int(pid))
    return found


def kill(what, pids):
    """Kills processes until there are none."""

    def killed():
        found = pids()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait(f"the processes of {what} end", killed, KILL_S, 0.005)


def remove(run):
    """Kills the processes of a run, and removes its namespaces and its folder."""
    names = [path.name for path in NETWORKS.glob(f"{run}-*")]
    try:
        kill(run, lambda: [pid for name in names for pid in processes_in(name) if pid != os.getpid()])
    finally:
        for name in names:
            ip("netns", "del", name)
        shutil.rmtree(pathlib.Path("/tmp") / run, ignore_errors=True)


def remove_earlier_runs():
    """Removes what runs left that were killed."""
    found = [*NETWORKS.glob(f"{PREFIX}*-*"), *pathlib.Path("/tmp").glob(f"{PREFIX}*")]
    for pid in {match[1] for path in found if (match := re.match(rf"{PREFIX}(\d+)(-|$)", path.name))}:
        try:
            runs = int(pid) != os.getpid() and b"ray.py" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            runs = False
        if not runs:
            remove(f"{PREFIX}{pid}")


class Node:
    """A host with Ray, the head or a worker node."""

    def __init__(self, name, address, settings):
        self.name, self.ip, self.settings = name, address, settings
        # How often it was started; each life has a folder of its own.
        self.lives, self.folder, self.process, self.node_id = 0, None, None, None
        self.connected = True
        # Whether nothing was done to it since it was started.
        self.whole = False
        self.lock = threading.Lock()

    def pids(self):
        """Returns the pids of its processes as this machine counts them."""
        return [pid for pid in processes_in(f"{ID}-{self.name}") if self.process is None or pid != self.process.pid]

    def kill(self):
        """Kills its processes: the first one of the namespace takes all others along."""
        kill(self.name, self.pids)
        if self.process is not None:
            self.process.wait(KILL_S)


class Cluster:
    def __init__(self, options):
        self.options, self.nodes, self.lock = options, {}, threading.Lock()
        self.bin = pathlib.Path(options.python).absolute().parent
        (FOLDER / "home").mkdir(parents=True)
        (FOLDER / "ray").mkdir()
        ip("netns", "add", f"{ID}-bridge")
        ip("-n", f"{ID}-bridge", "link", "add", "lan", "type", "bridge")
        ip("-n", f"{ID}-bridge", "link", "set", "lan", "up")
        self.add_host("c", "10.88.0.9")
        # This program and what it starts talk to no other network from here on.
        with open(NETWORKS / f"{ID}-c") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "enter the network of the program")

    def add_host(self, name, address):
        host = f"{ID}-{name}"
        ip("netns", "add", host)
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", f"{ID}-bridge", "link", "add", f"cable-{name}", "type", "veth", "peer", "name", "eth0", "netns", host)
        ip("-n", f"{ID}-bridge", "link", "set", f"cable-{name}", "master", "lan", "up")
        ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", host, "link", "set", "eth0", "up")

    def node(self, name, add=False):
        with self.lock:
            if name not in self.nodes:
                number = re.fullmatch(r"n([1-9]\d{0,2})", str(name))
                if not add or not (name == "head" or number and int(number[1]) <= 200):
                    raise Failed(f"no node {name}; there are {', '.join(self.nodes)}, and start_node adds n1 to n200")
                address = HEAD if name == "head" else f"10.88.0.{10 + int(number[1])}"
                settings = {"cpus": self.options.cpus, "gpus": self.options.gpus}
                self.add_host(name, address)
                self.nodes[name] = Node(name, address, {"cpus": 0, "gpus": 0} if name == "head" else settings)
            return self.nodes[name]

    def environment(self, node):
        """Returns the environment of the Ray processes: nothing of this process's, which may have settings of Ray or a token."""
        values = {
            "PATH": f"{self.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": FOLDER / "home", "TMPDIR": node.folder, "LANG": "C.UTF-8",
            "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": FOLDER / "token",
            "RAY_USAGE_STATS_ENABLED": 0, "RAY_memory_monitor_refresh_ms": 0, "RAY_prestart_worker_first_driver": 0,
            # Ray gives its workers, and so the agents and ranks, a niceness of 15: beside other tests they would not renew their leases in time.
            "RAY_worker_niceness": 0,
        }
        if node.name == "head" and not self.options.no_fault_tolerance_settings:
            # A killed node is declared dead after 2 to 4 s, and one that is cut off after 5 to 6 s. With Ray's settings it takes 17 s and 64 s.
            values |= {"RAY_health_check_period_ms": 1_000, "RAY_health_check_timeout_ms": 1_000, "RAY_health_check_failure_threshold": 3}
        if node.name == "head" and self.options.fault_tolerant:
            values |= {"RAY_REDIS_ADDRESS": f"{REDIS}:{REDIS_PORT}", "RAY_external_storage_namespace": ID}
        return {name: str(value) for name, value in values.items()}

    def start_redis(self):
        """Starts the store of a head that keeps its state. It ends with the processes of its host."""
        self.add_host("redis", REDIS)
        command = ["redis-server", "--bind", REDIS, "--port", REDIS_PORT, "--save", "", "--protected-mode", "no", "--dir", FOLDER]
        with open(FOLDER / "redis.log", "wb") as log:
            subprocess.Popen(["nsenter", f"--net={NETWORKS / f'{ID}-redis'}", *map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def listens():
            with contextlib.suppress(OSError):
                socket.create_connection((REDIS, REDIS_PORT), timeout=1).close()
                return True
            return False

        wait("Redis listens", listens, KILL_S, 0.02)

    def launch(self, node, settings):
        """Starts the processes of a node, and does not wait for them."""
        node.whole = False
        if node.name == "head" and not self.options.fault_tolerant:
            # It knows none of them.
            for other in list(self.nodes.values()):
                other.whole = False
        node.kill()
        self.connect(node, True)
        node.lives += 1
        node.folder = FOLDER / f"{node.name}-{node.lives}"
        node.folder.mkdir()
        arguments = [f"--node-ip-address={node.ip}", "--object-store-memory=100000000", "--disable-usage-stats", "--log-color=false"]
        if node.name == "head":
            arguments += ["--head", f"--port={PORT}", f"--dashboard-host={HEAD}", f"--dashboard-port={DASHBOARD}", f"--temp-dir={FOLDER / 'ray'}"]
        else:
            arguments.append(f"--address={HEAD}:{PORT}")
        # One NVLink domain, in which the nodes are numbered.
        if node.name != "head":
            settings = {"labels": {"nvlink_domain": "rack1", "topo_rank": int(node.name[1:])}, **settings}
        for option, value in settings.items():
            if option == "labels":
                value = ",".join(f"{key}={text}" for key, text in value.items())
            elif option == "resources":
                value = json.dumps(value)
            arguments.append(f"--{OPTIONS[option]}={value}")
        # The shell is the first process of the namespace, and adopts those that Ray leaves behind. It ends when this program does, however
        # that ends: its input is closed then.
        script = 'mount --bind "$0" "$1" && shift && "$@" < /dev/null && cat'
        command = [
            "nsenter", f"--net={NETWORKS / f'{ID}-{node.name}'}", "unshare", "-mpf", "--mount-proc", "--kill-child",
            "sh", "-c", script, node.folder, FOLDER / "ray", self.bin / "ray", "start", *arguments,
        ]
        with open(node.folder / "start.log", "wb") as log:
            node.process = subprocess.Popen(command, cwd=node.folder, env=self.environment(node), stdin=subprocess.PIPE, stdout=log, stderr=log)

    def wait_alive(self, nodes, limit):
        """Waits until the head lists the nodes as alive, under identifiers that they did not have before."""
        missing = list(nodes)

        def alive():
            # The earlier life of a node may still be listed.
            listed = [(entry["node_ip"], entry["node_id"]) for entry in self.listed() if entry["state"] == "ALIVE"]
            for node in list(missing):
                if found := [node_id for address, node_id in listed if address == node.ip and node_id != node.node_id]:
                    node.node_id, node.whole = found[0], True
                    missing.remove(node)
                elif node.process.poll() is not None:
                    raise Failed(f"{node.name} does not start: {tail(node.folder / 'start.log', 5)}")
            return not missing

        wait(f"{', '.join(node.name for node in nodes)} alive", alive, limit, 0.1)

    @staticmethod
    def listed():
        """Returns the nodes that the dashboard lists; none while it does not answer."""
        connection = http.client.HTTPConnection(HEAD, DASHBOARD, timeout=5)
        try:
            connection.request("GET", "/api/v0/nodes?detail=1&limit=1000", headers={"User-Agent": "gym"})
            return json.loads(connection.getresponse().read())["data"]["result"]["result"]
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            return []
        finally:
            connection.close()

    def start(self):
        if self.options.fault_tolerant:
            self.start_redis()
        head = self.node("head", add=True)
        self.launch(head, head.settings)

        def listens():
            with contextlib.suppress(OSError):
                socket.create_connection((HEAD, PORT), timeout=1).close()
                return True
            return head.process.poll() is not None

        wait("the head listens", listens, START_S, 0.02)
        nodes = [self.node(f"n{number}", add=True) for number in range(1, self.options.nodes + 1)]
        for node in nodes:
            self.launch(node, node.settings)
        self.wait_alive([head, *nodes], START_S)

    def repair(self):
        """Makes the cluster what it was at first, whatever was done to it."""
        head, *nodes = self.nodes.values()
        first = [head, *nodes[: self.options.nodes]]
        for node in nodes[self.options.nodes :]:
            with node.lock:
                node.kill()
        for node in first:
            with node.lock:
                if not node.whole:
                    self.launch(node, node.settings)
                    self.wait_alive([node], START_S)

    def connect(self, node, up):
        ip("-n", f"{ID}-bridge", "link", "set", f"cable-{node.name}", "up" if up else "down")
        node.connected = up

    def do(self, request):
        """Runs a request of the program, and returns its answer."""
        action, name = request["do"], request.get("node")
        if action == "nodes":
            nodes = [(node, node.pids()) for node in list(self.nodes.values())]
            return {"nodes": [
                {"name": node.name, "ip": node.ip, "alive": bool(pids), "connected": node.connected, "pids": pids} for node, pids in nodes
            ]}
        if action == "kill_process":
            if not any(request["pid"] in node.pids() for node in list(self.nodes.values())):
                raise Failed(f"no process {request['pid']} on any node")
            os.kill(request["pid"], request.get("signal", signal.SIGKILL))
            return {}
        if action == "repair":
            self.repair()
            return {}
        if action in ("kill_head", "start_head"):
            action, name = action.replace("head", "node"), "head"
        node = self.node(name, add=action == "start_node")
        if action == "list_processes":
            return {"processes": [
                {"pid": pid, "parent": parent_of(pid), "command": command} for pid in node.pids() if (command := self.command(pid, request.get("containing", "")))
            ]}
        with node.lock:
            if action == "start_node":
                settings = node.settings | {key: request[key] for key in OPTIONS if key in request}
                self.launch(node, settings)
                self.wait_alive([node], START_S)
                node.settings = settings
                return {"node_id": node.node_id}
            node.whole = False
            if action == "kill_node":
                node.kill()
            elif action == "drain_node":
                arguments = ["drain-node", f"--address={HEAD}:{PORT}", f"--node-id={node.node_id}", f"--deadline-remaining-seconds={request['seconds']}"]
                arguments += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test"]
                done = subprocess.run([self.bin / "ray", *arguments], env=self.environment(node), capture_output=True, text=True, timeout=START_S, check=False)
                if done.returncode != 0:
                    raise Failed(f"ray drain-node: {done.stderr.strip() or done.stdout.strip()}")
            elif action == "kill_raylet":
                found = [pid for pid in node.pids() if self.command(pid).split(" ")[0].endswith("/raylet")]
                if not found:
                    raise Failed(f"no raylet runs on {name}")
                for pid in found:
                    os.kill(pid, signal.SIGKILL)
            elif action in ("partition", "heal"):
                self.connect(node, action == "heal")
            else:
                raise Failed(f"unknown request {action}")
        return {}

    @staticmethod
    def command(pid, containing=""):
        """Returns the command line of a process, or nothing if neither it nor the environment has the text."""
        try:
            texts = [pathlib.Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace") for name in ("cmdline", "environ")]
        except OSError:
            return ""
        return texts[0].strip() if any(containing in text for text in texts) else ""

    def control(self, listener):
        """Takes requests until the program ends, those of each connection in order."""
        while True:
            threading.Thread(target=self.answer, args=(listener.accept()[0],), daemon=True).start()

    def answer(self, connection):
        with contextlib.suppress(OSError), connection, connection.makefile("rwb") as stream:
            for line in stream:
                try:
                    reply = {"ok": True, **self.do(json.loads(line))}
                except Exception as error:  # whatever it is, the program learns of it
                    reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
                stream.write(json.dumps(reply).encode() + b"\n")
                stream.flush()

    def run(self, program, inside=None):
        """Runs the program, and returns its exit status. Inside a node, it sees the processes of that node, and no others."""
        if inside:
            program = ["nsenter", "--target", str(min(self.node(inside).pids())), "--mount", "--pid", "--net", "--", *program]
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(FOLDER / "control"))
        listener.listen()
        threading.Thread(target=self.control, args=(listener,), daemon=True).start()
        environment = {
            **os.environ, "GYM_RAY_TEST_ADDRESS": f"http://{HEAD}:{DASHBOARD}", "GYM_RAY_TEST_CONTROL": str(FOLDER / "control"),
            "GYM_RAY_TEST_PYTHON": str(self.bin / "python"),
        }
        if self.options.fault_tolerant:
            environment["GYM_RAY_TEST_FAULT_TOLERANT"] = "1"
        status = subprocess.call(program, env=environment)
        return 128 - status if status < 0 else status


def tail(path, lines):
    with contextlib.suppress(OSError):
        return "\n".join([line for line in path.read_text(errors="replace").splitlines() if not line.startswith("[state-dump]")][-lines:])
    return ""


def print_logs():
    names = ["gcs_server.out", "raylet.out", "raylet.err", "dashboard.log", "job-driver-*.log"]
    for pattern in ["start.log", *(f"session_2*/logs/{name}" for name in names)]:
        for path in sorted(FOLDER.glob(f"*/{pattern}")):
            if text := tail(path, 15):
                print(f"── {path.relative_to(FOLDER).parts[0]}: {path.name}\n{text}", file=sys.stderr)


def main():
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, program = sys.argv[1:end], sys.argv[end + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of a virtual environment with Ray")
    parser.add_argument("--nodes", type=int, default=2, help="nodes beside the head")
    parser.add_argument("--cpus", type=int, default=4, help="CPUs that each node pretends to have")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs that each node pretends to have")
    parser.add_argument("--no-fault-tolerance-settings", action="store_true", help="leave the health checks of the head as Ray has them")
    parser.add_argument("--fault-tolerant", action="store_true", help="keep the state of the head in Redis, so that it can restart")
    parser.add_argument("--inside", metavar="NODE", help="run the program on this node, not on a machine of its own")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the files of Ray")
    options = parser.parse_args(own)
    if not program:
        parser.error("no program after --")
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        print("ray: needs root, iproute2 and util-linux: network namespaces", file=sys.stderr)
        return 77
    if options.fault_tolerant and not shutil.which("redis-server"):
        print("ray: --fault-tolerant needs redis-server", file=sys.stderr)
        return 77
    remove_earlier_runs()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    cluster, status = None, 77
    try:
        began = time.monotonic()
        cluster = Cluster(options)
        status = 70
        cluster.start()
        print(f"ray: a head and {options.nodes} nodes have started in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        status = cluster.run(program, options.inside)
    except (Failed, OSError) as failure:
        print(f"ray: {failure}", file=sys.stderr)
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        for node in cluster.nodes.values() if cluster else []:
            with contextlib.suppress(Failed, subprocess.TimeoutExpired):
                node.kill()
        if status != 0:
            print_logs()
        if options.keep:
            FOLDER.rename(f"{FOLDER}.kept")
            print(f"ray: the files are in {FOLDER}.kept", file=sys.stderr)
        remove(ID)
    return status


if __name__ == "__main__":
    sys.exit(main())
