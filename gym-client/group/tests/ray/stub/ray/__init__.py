"""The part of Ray that shim.py uses, for its tests: one driver, actors as processes of their own, and a cluster that the test scripts.

The variable GYM_RAY_STUB names a folder. The test may change `cluster.json` at any time:

  nodes         id, ip, alive, resources and labels of each node
  draining      the nodes that Ray drains, with the time of their end in milliseconds
  room          whether placement groups find room, at first and after the loss of a node
  lost_calls    for the name of a method, what happens to its first calls: `unsent` and `unanswered` fail with ActorUnavailableError, the second
                kind although the method runs; `answered` is as usual
  death         the name of the exception for calls to an actor whose process has ended
  failing       the names of functions that fail, as they do without the head of the cluster
  rotated_logs  gives the actors pipes as their output, as RAY_ROTATION_MAX_BYTES does
  noise         writes lines to standard error all the time

The driver writes what it does to `journal`, a JSON object a line, and the output of its actors to `<name>.out` and `<name>.err`. Where Ray 2.60
behaves in a way that one would not expect, a comment says so.
"""

import itertools
import json
import multiprocessing.connection
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time

from ray import exceptions, util

__version__ = "stub"

FOLDER = pathlib.Path(os.environ["GYM_RAY_STUB"])
# In the process of an actor: its place.
PLACE = json.loads(os.environ.get("GYM_RAY_STUB_PLACE", "null"))
# Notified when a call has a result.
CHANGED = threading.Condition()
ACTORS = []
CALLS = {}


def cluster():
    return json.loads((FOLDER / "cluster.json").read_text())


def check(name):
    if name in cluster().get("failing", []):
        raise exceptions.RpcError(f"{name}: no answer from the head")


def note(**entry):
    with open(FOLDER / "journal", "ab", buffering=0) as journal:
        journal.write(json.dumps(entry).encode() + b"\n")


def init(*, log_to_driver, logging_level, namespace, address=None, job_config=None, runtime_env=None):
    # Ray replaces the handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    check("init")
    config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "null"))
    # The variable is preferred to the argument.
    address = os.environ.get("RAY_ADDRESS") or address
    metadata = job_config and job_config.metadata
    note(do="init", namespace=namespace, config=config, address=address, metadata=metadata, environment=runtime_env)
    if cluster().get("noise"):
        threading.Thread(target=make_noise, daemon=True).start()


def end_with(parent):
    """Ends the driver, and the actors with it, if the test is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def make_noise():
    while True:
        os.write(2, b"a line of Ray\n")
        time.sleep(0.0001)


def shutdown():
    for actor in ACTORS:
        actor.kill()
    note(do="shutdown")


def nodes():
    check("nodes")
    return [{"NodeID": node["id"], "Alive": node["alive"], "Resources": node["resources"], "Labels": node.get("labels", {})} for node in cluster()["nodes"]]


class ObjectRef:
    def __init__(self):
        # Whether it is a value, and the value or the exception.
        self.result = None

    def settle(self, good, value):
        with CHANGED:
            if self.result is None:
                self.result = (good, value)
                CHANGED.notify_all()


def wait(references, *, num_returns=1, timeout=None):
    if num_returns > len(references):
        raise ValueError("num_returns cannot be greater than the number of references")
    with CHANGED:
        CHANGED.wait_for(lambda: sum(reference.result is not None for reference in references) >= num_returns, timeout)
        ready = [reference for reference in references if reference.result is not None][:num_returns]
    return ready, [reference for reference in references if reference not in ready]


def get(reference):
    wait([reference])
    good, value = reference.result
    if good:
        return value
    raise value


def remote(cls):
    return ActorClass(cls, {})


class ActorClass:
    def __init__(self, cls, options):
        self.cls, self.chosen = cls, options

    def options(self, *, scheduling_strategy, max_restarts, max_concurrency, name, num_cpus, num_gpus, resources):
        return ActorClass(self.cls, {name: value for name, value in locals().items() if name != "self"})

    def remote(self):
        if any(actor.options["name"] == self.chosen["name"] for actor in ACTORS):
            # Also if that actor has died.
            raise ValueError(f"the name {self.chosen['name']} is already taken")
        actor = Actor(self.cls, self.chosen)
        ACTORS.append(actor)
        return ActorHandle(actor)


class ActorHandle:
    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        if not callable(getattr(self._actor.cls, name, None)):
            raise AttributeError(name)
        return ActorMethod(self._actor, name)


class ActorMethod:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *arguments):
        reference = ObjectRef()
        fates = cluster().get("lost_calls", {}).get(self.name, [])
        number = next(CALLS.setdefault(self.name, itertools.count()))
        fate = fates[number] if number < len(fates) else "answered"
        if fate != "answered":
            lost = exceptions.ActorUnavailableError("the actor is unavailable: socket closed. The task may or may not have been executed on the actor.")
            note(do="lose_call", method=self.name)
            threading.Timer(0.02, reference.settle, (False, lost)).start()
        if fate != "unsent":
            # Copied at once, as Ray does.
            self.actor.call(pickle.dumps((self.name, arguments)), ObjectRef() if fate == "unanswered" else reference)
        return reference


class Actor:
    """What the driver knows of an actor."""

    def __init__(self, cls, options):
        self.cls, self.options = cls, options
        self.lock = threading.Lock()
        self.process, self.connection, self.dead = None, None, False
        # The calls without a result by their numbers, and those that wait for the process.
        self.references, self.queue = {}, []
        self.numbers = itertools.count()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        strategy = self.options["scheduling_strategy"]
        # It waits for ever if the group has been removed.
        while (place := strategy.placement_group.place(strategy.placement_group_bundle_index)) is None:
            time.sleep(0.02)
        ours, theirs = multiprocessing.connection.Pipe()
        variables = {**os.environ, "GYM_RAY_STUB_PLACE": json.dumps(place), "CUDA_VISIBLE_DEVICES": ",".join(place["gpus"])}
        command = ["-m", "ray.actor_process", theirs.fileno(), sys.modules[self.cls.__module__].__file__, self.cls.__name__, self.options["max_concurrency"]]
        name = self.options["name"]
        with open(FOLDER / f"{name}.out", "ab") as out, open(FOLDER / f"{name}.err", "ab") as err:
            if cluster().get("rotated_logs"):
                out, err = (subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file).stdin for file in (out, err))
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)], env=variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        theirs.close()
        note(do="start_actor", name=name, pid=self.process.pid, node=place["node_id"], cpus=self.options["num_cpus"], gpus=self.options["num_gpus"])
        with self.lock:
            self.connection = ours
            for number, call in self.queue:
                ours.send((number, call))
        try:
            while True:
                number, good, value = ours.recv()
                self.references.pop(number).settle(good, value if good else exceptions.RayTaskError(value))
        except (EOFError, OSError):
            self.process.wait()
        with self.lock:
            self.dead = True
            for reference in self.references.values():
                self.fail(reference)

    def call(self, call, reference):
        with self.lock:
            if self.dead:
                self.fail(reference)
                return
            number = next(self.numbers)
            self.references[number] = reference
            if self.connection is None:
                self.queue.append((number, call))
                return
            try:
                self.connection.send((number, call))
            except OSError:
                # It has just died, and its thread fails the call.
                pass

    def fail(self, reference):
        kind = getattr(exceptions, cluster().get("death", "ActorDiedError"))
        reference.settle(False, kind("The actor died unexpectedly before finishing this task.\n\tclass_name: Slot\nits process has died"))

    def kill(self):
        if self.process is not None:
            self.process.kill()


def get_runtime_context():
    return RuntimeContext()


class RuntimeContext:
    def get_node_id(self):
        # The driver is on the first node.
        return PLACE["node_id"] if PLACE else cluster()["nodes"][0]["id"]

    def get_accelerator_ids(self):
        return {"GPU": PLACE["gpus"], "TPU": []}
