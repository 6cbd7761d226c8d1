"""The driver of a Ray job of the gym SDK, or one that is a child of a program of the SDK. It reserves a placement group, runs a node agent on each of its bundles, and reports what happens.

The specification is JSON in the variable GYM_RAY_SPEC. An event is a line on standard output: `@gym ` and a JSON object with its number (`seq`), its
time (`t`) and its `kind`:

  shim     pid, ray, node_id                              the driver is connected
  waiting  attempt                                        the placement group waits for room
  placed   nodes                                          the node of each bundle
  agent    share, incarnation, node_id, ip, pid, gpus, endpoints      an agent listens
  exited   share, incarnation, code or error, stderr      an agent has ended, or has not started
  suspect  share                                          the process that holds a bundle does not respond (at most every 10 s)
  draining share, node_id, seconds                        the node of a share is to be taken away, in so many seconds if that is known
  lost     share, cause (process or node), node_id, why   it has ended
  failed   share, why                                     a share was given up
  ended    code, why                                      the last event

Exit status: 0 all agents were released, 1 a share or the driver failed, 3 the bundles were not placed in time, 75 no controller, 143 stopped.

Uses the standard library and Ray alone, because it runs in the environment of the cluster.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import ray
from ray.job_config import JobConfig
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

DRAINS_EVERY_S = 1.0
# A program that reads the events of its child by a pipe takes no line above 16 KiB.
EVENT_BYTES = 12_000
RELEASED, FAILED, NOT_PLACED, NO_CONTROLLER, STOPPED = 0, 1, 3, 75, 143
# Ray hands the configuration of a job to its driver in this variable.
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
THREADS = "OMP_NUM_THREADS"
LOG, STDERR_LINES, STDERR_LINE_CHARACTERS, STDERR_BYTES = "/proc/self/fd/2", 20, 500, 1 << 17


class Slot:
    """One bundle. Runs its node agent, which the kernel ends with this process."""

    def __init__(self):
        self.lock = threading.Lock()
        self.incarnation = 0
        self.agent = None

    def start(self, spec, share, incarnation):
        """Starts the agent. Returns what it said when it listened, or how it ended. May be repeated: each incarnation starts once."""
        context = ray.get_runtime_context()
        ip = ray.util.get_node_ip_address()
        gpus = [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]
        place = {"node_id": context.get_node_id(), "ip": ip, "gpus": gpus}
        assignment = {"name": f"share{share:04}@{ip}", "host": ip, "gpus": gpus, "parent": os.getpid(), "cpus": spec["cpus"][share]}
        assignment.update(domain(place["node_id"]))
        assignment.update(spec["agent"])
        # The ranks get no token of the cluster.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
        if not node_has(THREADS):
            variables.pop(THREADS, None)
        variables.update(spec["variables"], GYM_NODE_AGENT=json.dumps(assignment))
        with self.lock:
            if self.incarnation < incarnation:
                self.incarnation, self.agent = incarnation, Agent(spec["command"], variables, spec["start_timeout_s"])
            agent = self.agent
        if not agent.await_hello():
            agent.kill()
            return {"error": f"the agent has not listened within {spec['start_timeout_s']} s", "stderr": agent.stderr(), **place}
        return {**(agent.ended or agent.hello), "pid": agent.child and agent.child.pid, **place}

    def wait(self):
        """Waits until the agent has ended. May be repeated."""
        return self.agent.wait()

    def stop(self, grace_s):
        """Asks the agent to stop, and kills it after the grace."""
        if self.agent is not None:
            self.agent.stop(grace_s)


class Agent:
    """A node agent. The kernel ends it with the thread that started it, so that thread waits for it."""

    def __init__(self, command, variables, start_timeout_s):
        self.until = time.monotonic() + start_timeout_s
        self.child = None
        self.killed = False
        # Its first line, and how it ended.
        self.hello = None
        self.ended = None
        self.waits = 0
        self.changed = threading.Condition()
        threading.Thread(target=self.hold, args=(command, variables), daemon=True).start()

    def hold(self, command, variables):
        # Ray's own threads block signals that the agent and its ranks need, and a new process inherits what is blocked.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        try:
            begin = os.stat(LOG).st_size
            command = [os.path.abspath(command[0]), *command[1:]]
            self.child = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
            )
            if self.killed:
                self.child.kill()
            reader = threading.Thread(target=self.read, args=(self.child.stdout,), daemon=True)
            reader.start()
            code = self.child.wait()
            # The rest of its output, whose end may not come: a process that it started may hold it open.
            reader.join(0.5)
            self.say(ended={"code": code, "stderr": tail(LOG, begin)})
        except Exception as error:
            why = f"{error.strerror} (os error {error.errno})" if isinstance(error, OSError) else str(error)
            self.kill()
            self.say(ended={"error": f"start {command[0]}: {why}"})

    def read(self, output):
        """Reads the output to its end, because the agent stops when nothing reads it."""
        for line in output:
            if self.hello is None and line.startswith("@gym "):
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    self.say(hello={"endpoints": json.loads(line[5:])["endpoints"]})
                    continue
            # The disk may be full.
            with contextlib.suppress(OSError, ValueError):
                print(line, end="", flush=True)

    def say(self, **state):
        with self.changed:
            vars(self).update(state)
            self.changed.notify_all()

    def await_hello(self):
        with self.changed:
            return self.changed.wait_for(lambda: self.hello or self.ended, self.until - time.monotonic())

    def wait(self):
        with self.changed:
            # Ends an earlier call, whose answer was lost: each occupies a thread of the actor.
            self.say(waits=self.waits + 1)
            number = self.waits
            self.changed.wait_for(lambda: self.ended or self.waits > number)
            return self.ended

    def kill(self):
        self.killed = True
        if self.child is not None:
            self.child.kill()

    def stderr(self):
        """Returns the last lines of an agent that was killed."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended, 2.0)
            return (self.ended or {}).get("stderr", [])

    def stop(self, grace_s):
        if self.child is None:
            self.kill()
            return
        self.child.terminate()
        try:
            self.child.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def node_has(name):
    """Returns whether Ray's own process on this node has the variable. Its child may have it by Ray, which sets the threads to the CPUs of the actor: those of
    all ranks of a share."""
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as environment:
            return any(entry.startswith(f"{name}=".encode()) for entry in environment.read().split(b"\0"))
    except OSError:
        return False


def domain(node_id):
    """Returns the NVLink domain of a node and its position there: by custom resources, as NeMo RL's clusters announce them, or by labels."""
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), {})
    resources, labels = node.get("Resources", {}), node.get("Labels", {})
    named = sorted(name.removeprefix("nvlink_domain_") for name in resources if name.startswith("nvlink_domain_"))
    rank = str(resources.get("topo_rank", labels.get("topo_rank", ""))).removesuffix(".0")
    return {"domain": named[0] if named else labels.get("nvlink_domain"), "domain_rank": int(rank) if rank.isdigit() else None}


def draining():
    """Returns the nodes that Ray drains, with the time at which they are to be taken away in milliseconds since 1970, or 0. Ray has no public interface for it."""
    try:
        from ray._private.state import state

        return state.get_draining_nodes()
    except Exception:
        return {}


def tail(path, begin):
    """Returns the last lines of a log that were written after `begin`."""
    try:
        with open(path, "rb") as log:
            # Fails for the pipe that it is with RAY_ROTATION_MAX_BYTES.
            log.seek(max(begin, os.stat(path).st_size - STDERR_BYTES))
            lines = log.read(STDERR_BYTES).decode(errors="replace").splitlines()
            return [line[:STDERR_LINE_CHARACTERS] for line in lines[-STDERR_LINES:]]
    except OSError:
        return []


class Share:
    """What the driver knows of one bundle."""

    def __init__(self, number):
        self.number = number
        self.incarnation = 0
        self.failures = 0
        self.actor = None
        self.node = None
        self.phase = "start"
        # When the next step is due.
        self.due = 0.0
        # A call that is due again, because its answer was lost.
        self.repeat = None
        self.suspected = -math.inf
        # The node, and the incarnation there, of which it was said that Ray drains it.
        self.drained = None
        # When its agent listened, and how many agents in a row found no controller.
        self.since = 0.0
        self.silences = 0


class Run:
    def __init__(self, spec):
        self.spec = spec
        self.group = None
        self.shares = [Share(number) for number in range(len(spec["bundles"]))]
        self.pending = {}
        self.seq = 0
        self.stopping = False
        self.removed = False
        # The nodes that are to be taken away, and when to look again.
        self.leaving = set()
        self.drains_due = 0.0

    def say(self, kind, **fields):
        self.seq += 1
        event = {"seq": self.seq, "t": round(time.time(), 3), "kind": kind, **fields}
        # The last lines of an agent say most.
        while len(text := json.dumps(event)) > EVENT_BYTES and (long := [name for name, value in event.items() if isinstance(value, list) and value]):
            event.update({name: event[name][(len(event[name]) + 1) // 2 :] for name in long})
        # One write, because Ray writes to the same log.
        sys.stdout.write(f"@gym {text}\n")
        sys.stdout.flush()

    def end(self, code, why):
        """Stops what runs, gives the bundles back and returns the exit status."""
        grace = self.spec["grace_s"]
        try:
            stops = [share.actor.stop.remote(grace) for share in self.shares if share.actor is not None]
            if stops:
                # A call to an actor that waits for room does not end.
                ray.wait(stops, num_returns=len(stops), timeout=grace + 0.5)
            if self.group is not None:
                remove_placement_group(self.group)
        except Exception:
            # Ray removes what is left once the driver has ended.
            traceback.print_exc()
        self.say("ended", code=code, why=why)
        return code

    def pause(self, seconds):
        until = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < until:
            time.sleep(min(seconds, 0.1))

    def place(self):
        """Waits for room. Returns the node of each bundle, or `None`."""
        attempts = self.spec["placement_attempts"]
        for attempt in range(1, attempts + 1):
            # Without labels, the option is not used: older versions of Ray do not have it.
            labels = {"bundle_label_selector": self.spec["selectors"]} if self.spec["selectors"] else {}
            self.group = placement_group(self.spec["bundles"], strategy=self.spec["strategy"], name=self.spec["run"], **labels)
            begin = time.monotonic()
            said = False
            while not self.stopping:
                # PlacementGroup.wait counts whole seconds, in which no signal is handled, and with 0 s it often misses that the group is placed.
                table = placement_group_table(self.group)
                if table.get("state") == "CREATED":
                    return table["bundles_to_node_id"]
                waited = time.monotonic() - begin
                if waited >= 0.5 and not said:
                    self.say("waiting", attempt=attempt)
                    said = True
                if waited >= self.spec["placement_timeout_s"]:
                    break
                self.pause(0.2 if said else 0.05)
            if self.stopping:
                return None
            remove_placement_group(self.group)
            self.group = None
            if attempt < attempts:
                self.pause(min(2 ** (attempt - 1), 30))
                if self.stopping:
                    return None
        return None

    def run(self):
        self.say("shim", pid=os.getpid(), ray=ray.__version__, node_id=ray.get_runtime_context().get_node_id())
        nodes = self.place()
        if nodes is None:
            if self.stopping:
                return self.end(STOPPED, "stopped while it waited for room")
            return self.end(NOT_PLACED, f"the bundles found no room in {self.spec['placement_attempts']} attempts of {self.spec['placement_timeout_s']} s")
        for share in self.shares:
            share.node = nodes[share.number]
        self.say("placed", nodes=[share.node for share in self.shares])
        while True:
            if self.stopping:
                return self.end(STOPPED, "stopped")
            now = time.monotonic()
            if self.drains_due <= now:
                self.drains_due = now + DRAINS_EVERY_S
                self.look_at_drains()
            for share in self.shares:
                # Ray starts nothing on a node that is to be taken away. An actor that is requested before its bundle has moved waits for longer.
                if share.phase in ("start", "restart") and share.due <= now and share.node not in self.leaving:
                    self.start(share)
                elif share.phase == "silent" and share.due <= now:
                    # Without this limit, shares could take turns for ever to wait for a controller that has died.
                    if share.silences > self.spec["max_restarts"] and not any(self.has_controller(other) for other in self.shares):
                        return self.end(NO_CONTROLLER, "no controller")
                    share.phase = "restart"
                elif share.repeat is not None and share.due <= now:
                    self.call(share, share.repeat)
            done, _ = ray.wait(list(self.pending), num_returns=1, timeout=0.2) if self.pending else ([], time.sleep(0.2))
            for reference in done:
                self.step(reference, *self.pending.pop(reference))
            if self.removed:
                return self.end(FAILED, "its placement group was removed")
            failed = [share for share in self.shares if share.phase == "failed"]
            if failed:
                return self.end(FAILED, f"share {failed[0].number} failed")
            if all(share.phase in ("released", "silent") for share in self.shares):
                silent = any(share.phase == "silent" for share in self.shares)
                return self.end(*((NO_CONTROLLER, "no controller") if silent else (RELEASED, "released")))

    def look_at_drains(self):
        nodes = draining()
        if nodes or self.leaving:
            self.leaving = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] in nodes}
        for share in self.shares:
            of = (share.node, share.incarnation)
            if share.phase == "running" and share.node in nodes and share.drained != of:
                share.drained = of
                deadline = nodes[share.node]
                self.say("draining", share=share.number, node_id=share.node, seconds=deadline / 1000 - time.time() if deadline else None)

    def start(self, share):
        if share.actor is None:
            bundle = dict(self.spec["bundles"][share.number])
            strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=share.number)
            options = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0), "resources": bundle}
            share.actor = ray.remote(Slot).options(
                scheduling_strategy=strategy, max_restarts=0, max_concurrency=16, name=f"{self.spec['run']}-share{share.number}-{share.incarnation + 1}", **options
            ).remote()
        share.incarnation += 1
        share.phase = "starting"
        actor, incarnation = share.actor, share.incarnation
        self.call(share, lambda: actor.start.remote(self.spec, share.number, incarnation))

    def call(self, share, call):
        share.repeat = None
        self.pending[call()] = (share, call)

    def has_controller(self, share):
        """Returns whether an agent runs for longer than it waits for its first controller."""
        return share.phase == "running" and time.monotonic() - share.since > self.spec["agent"]["first_s"]

    def step(self, reference, share, call):
        """Takes the result of a call to the actor of a share."""
        now = time.monotonic()
        try:
            result = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:
            if now - share.suspected > 10.0:
                share.suspected = now
                self.say("suspect", share=share.number)
            # The call fails in another way once the actor is known to be dead. Until then, it may or may not have been executed.
            share.repeat, share.due = call, now + 0.2
            return
        except ray.exceptions.RayTaskError as error:
            # The method has failed. The actor has not.
            result = {"error": last_line(error)}
        except ray.exceptions.RayError as error:
            # The actor is dead, or was never created. Not each such error is a RayActorError: OutOfMemoryError is none.
            dead = any(node["NodeID"] == share.node and not node["Alive"] for node in ray.nodes())
            cause = "node" if dead else "process"
            self.say("lost", share=share.number, cause=cause, node_id=share.node, why=last_line(error))
            share.actor = None
            if dead:
                share.node = None
            if placement_group_table(self.group).get("state") == "REMOVED":
                # By somebody else. No actor can start in it again.
                self.removed = True
                return
            # The loss of a node is not the fault of the program.
            self.again(share, counts=not dead)
            return
        if "endpoints" in result:
            share.phase, share.node, share.since = "running", result["node_id"], now
            self.say("agent", share=share.number, incarnation=share.incarnation, **result)
            self.call(share, share.actor.wait.remote)
            return
        had_controller = self.has_controller(share)
        self.say("exited", share=share.number, incarnation=share.incarnation, **result)
        if result.get("code") == RELEASED:
            share.phase = "released"
        elif result.get("code") == NO_CONTROLLER:
            # If the others have a controller, this one was cut off from it.
            share.phase, share.due = "silent", now + self.spec["silence_s"]
            share.silences = 1 if had_controller else share.silences + 1
        else:
            self.again(share, counts=True)

    def again(self, share, counts):
        share.failures += counts
        if share.failures > self.spec["max_restarts"]:
            share.phase = "failed"
            self.say("failed", share=share.number, why=f"its agent has ended {share.failures} times")
        else:
            share.phase, share.due = "restart", time.monotonic() + min(0.1 * 2**share.failures, 5.0) * counts


def last_line(error):
    return (str(error).strip() or type(error).__name__).split("\n")[-1].strip()[:STDERR_LINE_CHARACTERS]


def without_environment():
    """Lets the actors start without the environment of the job. Ray starts a process with an environment by way of a second one, which takes as long again."""
    with contextlib.suppress(KeyError, ValueError):
        os.environ[JOB_CONFIG] = json.dumps({**json.loads(os.environ[JOB_CONFIG]), "runtime_env": {}})


def as_child(child):
    """Returns the options of `ray.init` for a driver that is no job of Ray's dashboard."""
    # Those of a job that the program itself may be, and an address that Ray would prefer.
    for variable in (JOB_CONFIG, "RAY_ADDRESS"):
        os.environ.pop(variable, None)
    environment = {"working_dir": child["working_dir"]} if child["working_dir"] else None
    return {"address": child["address"], "job_config": JobConfig(metadata=child["metadata"]), "runtime_env": environment}


def main():
    run = Run(json.loads(os.environ["GYM_RAY_SPEC"]))
    options = {}
    if run.spec["child"]:
        options = as_child(run.spec["child"])
    elif not run.spec["packaged"]:
        without_environment()

    def stop(*_):
        run.stopping = True

    def handle_stop():
        # The one is Ray's, the other that of a program that stops its child.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)

    handle_stop()
    try:
        ray.init(log_to_driver=False, logging_level="warning", namespace=run.spec["run"], **options)
        # Ray has a handler of its own, which would end the process at once.
        handle_stop()
        code = run.run()
    except Exception as error:
        traceback.print_exc()
        code = run.end(FAILED, f"the driver has failed: {last_line(error)}")
    # The actors end with the driver.
    ray.shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main()
