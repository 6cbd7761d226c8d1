#!/usr/bin/env python3
"""Interoperability with the Python NeMo Gym: each side drives the other, and what they write must be equal.

usage: RGYM=target/release/rgym RGYM_EXAMPLES=target/release/examples-binary python suite.py [--case a --case e] [--work DIR]
       python suite.py --self-check            Python in both roles: proves this suite, not the Rust side

Run it with the interpreter that has nemo-gym (.ci/python-peer prints it). The reference is made first, at run time: the
Python collector drives Python's agents and servers over five example environments, 240 rows each.

a  the Python collector drives an all-Rust stack (RGYM_EXAMPLES) through our head
b  Python's simple_agent and gymnasium_agent drive the Rust ports of the environments (RGYM_EXAMPLES)
c  our collector and agents (RGYM) drive Python's environments, which `run` starts from Python's own configuration
d  in a and c: materialized inputs and aggregate metrics too, also for repeats with seeds and for a file of several agents
e  a collection begun by one collector is killed and resumed by the other, in both directions
p  pools: the Python collector, and NeMo RL's `run_examples`, over two workers that have no files; one is all Rust
   (RGYM_EXAMPLES), the environments of the other one (RGYM) are Python's, beside our agents
r  one role at a time: our collector, model, agent, worker and head, each with Python in all other roles; b is for resources
o  OpenAI's own Python client against our model server (RGYM): answers, tools, streams, errors, timeouts

Exit codes: 0 all equal, 1 something differs or did not work, 2 wrong usage.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from compare import compare, compare_collection
from processes import Failed, Processes, free_port, http_get, http_post, wait_until

HERE = Path(__file__).resolve().parent
# Environment -> top-level name of its resources server in the stock configuration.
SERVERS = {
    "example_single_tool_call": "example_single_tool_call",
    "example_multi_step": "example_multi_step_resources_server",
    "example_session_state_mgmt": "example_session_state_mgmt_resources_server",
    "example_tool_call_multireward": "example_tool_call_multireward",
    "example_multi_turn_gymnasium": "example_multi_turn_gymnasium",
}
EVERY = tuple(SERVERS)
# The environment that replies as a user has an agent of its own, and a model that only quotes the question.
TURNS = "example_multi_turn_gymnasium"
STATEFUL = ("example_multi_step", "example_session_state_mgmt", TURNS)
REPEATED = "example_tool_call_multireward"


def agent_of(environment):
    return f"{environment}_agent" if environment == TURNS else f"{environment}_simple_agent"


# Stock NeMo Gym imports scipy and Ray in a dozen processes, beside the other tiers.
READY_S = 600
COLLECT_S = 600
ROWS_AT_LEAST = 200


class Suite:
    def __init__(self, arguments):
        self.self_check = arguments.self_check
        self.work = Path(arguments.work or tempfile.mkdtemp(prefix="python-peer-")).resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.venvs = self.work / "venvs"
        self.processes = Processes(
            self.work / "logs",
            {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "GYM_PEER_VENVS": str(self.venvs),
                "WANDB_MODE": "disabled",
                "RAY_USAGE_STATS_ENABLED": "0",
                "PYTHONUNBUFFERED": "1",
            },
        )
        self.gym = Path(sys.executable).parent / "gym"
        if self.self_check:
            stand_in = [sys.executable, str(HERE / "stand_in.py")]
            self.rgym, self.examples = stand_in, stand_in
        else:
            self.rgym, self.examples = binary("RGYM"), binary("RGYM_EXAMPLES")
        self.jobs, self.reuse = arguments.jobs, arguments.reuse_reference
        self.reference = self.work / "reference"
        self.results = []
        self.times = []

    # What runs

    def write_stock(self, name="stock", servers=SERVERS):
        """The stock configuration of the environments that are tested; each one more starts three Python processes."""
        lines = (HERE / "configs" / "stock.yaml").read_text().split("\n")
        others = tuple(f"- resources_servers/{name}/" for name in EVERY if name not in servers)
        path = self.work / f"{name}.yaml"
        path.write_text("\n".join(line for line in lines if not line.startswith(others)))
        return path

    def start_mock(self):
        process = self.processes.start("mock", [sys.executable, HERE / "mock_openai.py"])
        wait_until("the mock model", lambda: b"ready http" in process.log.read_bytes(), 30, process.check_alive)
        self.mock = process.log.read_text().split("ready ", 1)[1].split()[0]

    def delay(self, milliseconds):
        http_post(f"{self.mock.removesuffix('/v1')}/control/delay?ms={milliseconds}")

    def link_venvs(self):
        """One interpreter for every server: what NeMo Gym takes for a ready environment is a link to this one."""
        folders = [f"resources_servers/{name}" for name in SERVERS]
        folders += ["responses_api_agents/simple_agent", "responses_api_agents/gymnasium_agent", "responses_api_models/openai_model", "environment_servers/legacy_agent"]
        for folder in folders:
            path = self.venvs / folder / ".venv"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_symlink():
                path.symlink_to(sys.prefix)

    def settings(self):
        port = free_port()
        return f"http://127.0.0.1:{port}", ["+head_server.host=127.0.0.1", f"+head_server.port={port}"]

    def start_stack(self, name, command, config, extra=()):
        """Starts servers from a configuration and waits until their head says that all are ready."""
        head, settings = self.settings()
        began = time.monotonic()
        process = self.processes.start(name, [*command, "--config", HERE / "configs" / config, *settings, *extra])
        wait_until(f"{name} ready", lambda: http_get(f"{head}/readyz")[0] == 200, READY_S, process.check_alive)
        self.took(f"{name}: ready", began)
        return head, process

    def start_python(self, name, extra=(), stock=None):
        own = ["+skip_venv_if_present=true", f"+uv_venv_dir={self.venvs}", f"+policy_base_url={self.mock}"]
        return self.start_stack(name, [self.gym, "env", "start"], stock or self.stock, [*own, *extra])

    def start_ours(self, name, binary, config=None, extra=()):
        config = config or self.stock
        own = ["--python", sys.executable]
        if config != "ports.yaml":
            own.append(f"+policy_base_url={self.mock}")
        return self.start_stack(name, [*binary, "run"], config, [*own, *extra])

    def python_collector(self, head, source, output, more=()):
        host, port = head.removeprefix("http://").split(":")
        place = [f"+head_server.host={host}", f"+head_server.port={port}"]
        return [self.gym, "eval", "run", "--no-serve", "--input", source, "--output", output, *more, *place]

    def our_collector(self, head, source, output, more=()):
        return [*self.rgym, "collect", "--input", source, "--output", output, "--head-url", head, *more]

    # What is collected

    def plans(self):
        """(name, input, options): each environment by its agent; repeats with seeds; one file whose rows name agents."""
        plans = []
        for environment in SERVERS:
            source = HERE / "data" / f"{environment}.jsonl"
            plans.append((environment, source, ["--agent", agent_of(environment), "--concurrency", "16"]))
        if REPEATED in SERVERS:
            agent = agent_of(REPEATED)
            repeats = ["--agent", agent, "--limit", "30", "--num-repeats", "4", "--concurrency", "16", "+num_repeats_add_seed=true"]
            plans.append(("repeats", HERE / "data" / f"{REPEATED}.jsonl", repeats))
        plans.append(("mixed", self.mixed_input(), ["--concurrency", "16"]))
        return plans

    def mixed_input(self):
        path = self.work / "mixed.jsonl"
        if not path.exists():
            lines = []
            for index in range(20):
                for environment in SERVERS:
                    row = json.loads((HERE / "data" / f"{environment}.jsonl").read_text(encoding="utf-8").split("\n")[index])
                    lines.append(json.dumps({**row, "agent_ref": {"name": agent_of(environment)}}))
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def collect_all(self, name, collector, head, plans):
        folder = self.work / name
        began = time.monotonic()

        def one(plan):
            # A folder for each: NeMo Gym writes files with fixed names beside its output.
            output = folder / plan[0] / "rollouts.jsonl"
            shutil.rmtree(output.parent, ignore_errors=True)
            output.parent.mkdir(parents=True)
            self.processes.run(f"{name}-{plan[0]}", collector(head, plan[1], output, plan[2]), COLLECT_S)
            return output

        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            outputs = list(pool.map(one, plans))
        self.took(f"{name}: {len(plans)} collections", began)
        return outputs

    def check_against_reference(self, case, folder, plans, whole):
        for name, _, _ in plans:
            expected, found = (base / name / "rollouts.jsonl" for base in (self.reference, self.work / folder))
            title = f"{case} {name}"
            if whole:
                self.results.append((title, compare_collection(expected, found, ids=True, title=title)))
            else:
                self.results.append((title, compare("rows", expected, found, ids=True, title=f"{title}: rows")))

    def check(self, title, good, text):
        print(f"{'right   ' if good else 'WRONG   '} {title}: {text}", flush=True)
        self.results.append((title, good))

    def took(self, what, began):
        self.times.append((what, time.monotonic() - began))
        print(f"         {what} in {self.times[-1][1]:.1f} s", flush=True)

    # The cases

    def reference_stamp(self):
        """What the reference depends on; the interpreter's packages are pinned."""
        digest = hashlib.sha256()
        for path in [*sorted((HERE / "data").iterdir()), *(HERE / name for name in ("script.py", "mock_openai.py", "suite.py"))]:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def make_reference(self):
        stamp = self.reference / "stamp"
        if self.reuse and stamp.exists() and stamp.read_text() == self.reference_stamp():
            print(f"         reused: {self.reference}")
            return
        shutil.rmtree(self.reference, ignore_errors=True)
        head, process = self.start_python("reference-stack")
        self.collect_all("reference", self.python_collector, head, self.plans())
        self.check("reference stack stops", self.processes.stop(process, 60), "on SIGINT")
        for environment in SERVERS:
            # Not splitlines(): a row may hold U+2028.
            rows = (self.reference / environment / "rollouts.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
            rewards = {json.loads(row)["reward"] for row in rows}
            good = len(rows) >= ROWS_AT_LEAST and len(rewards) >= 2
            self.check(f"reference {environment}", good, f"{len(rows)} rows, rewards {sorted(rewards)}")
        stamp.write_text(self.reference_stamp())

    def case_a(self):
        head, process = self.start_ours("a-stack", self.examples)
        try:
            if not self.self_check:
                strangers = [line for line in process.descendants() if "python" in line.split(" ")[0]]
                self.check("a is all Rust", not strangers, f"Python children: {strangers or 'none'}")
            plans = self.plans()
            self.collect_all("a", self.python_collector, head, plans)
            self.check_against_reference("a", "a", plans, whole=True)
        finally:
            self.check("a stack stops", self.processes.stop(process, 60), "on SIGINT")

    def case_b(self):
        where = {name: free_port() for name in SERVERS}
        ports, shims = [], []
        for name, top in SERVERS.items():
            place = f"{top}.resources_servers.{name}"
            address = [f"+{place}.host=127.0.0.1", f"+{place}.port={where[name]}"]
            ports += address
            folder = Path(installed(f"resources_servers/{name}"))
            shims += [*address, f"++{place}.entrypoint={os.path.relpath(HERE / 'placeholder.py', folder)}"]
        _, rust = self.start_ours("b-ports", self.examples, "ports.yaml", ports)
        try:
            head, python = self.start_python("b-stack", shims)
            try:
                plans = [plan for plan in self.plans() if plan[0] in SERVERS]
                self.collect_all("b", self.python_collector, head, plans)
                self.check_against_reference("b", "b", plans, whole=False)
            finally:
                self.processes.stop(python, 60)
        finally:
            self.check("b ports stop", self.processes.stop(rust, 60), "on SIGINT")

    def case_c(self):
        head, process = self.start_ours("c-stack", self.rgym)
        try:
            if not self.self_check:
                below = "\n".join(process.descendants())
                count = below.count("app.py")
                self.check("c runs Python's environments", count >= len(SERVERS), f"{count} Python processes below ours")
            plans = self.plans()
            self.collect_all("c", self.our_collector, head, plans)
            self.check_against_reference("c", "c", plans, whole=True)
        finally:
            self.check("c stack stops", self.processes.stop(process, 60), "on SIGINT")

    def case_e(self):
        head, process = self.start_ours("e-stack", self.examples)
        try:
            environment = "example_session_state_mgmt"
            plan = next(plan for plan in self.plans() if plan[0] == environment)
            self.hand_over("e-python-then-ours", head, plan, self.python_collector, self.our_collector)
            self.hand_over("e-ours-then-python", head, plan, self.our_collector, self.python_collector)
        finally:
            self.processes.stop(process, 60)

    def hand_over(self, name, head, plan, first, second):
        """The first collector is killed mid-flight; the second finishes. Nothing is lost, done twice or changed."""
        began = time.monotonic()
        environment, source, options = plan
        output = self.work / name / environment / "rollouts.jsonl"
        shutil.rmtree(output.parent, ignore_errors=True)
        output.parent.mkdir(parents=True)

        def lines():
            return output.read_bytes().count(b"\n") if output.exists() else 0

        # Slow enough to be killed in the middle: 16 at a time, a few answers each.
        self.delay(150)
        started = self.processes.start(f"{name}-begins", first(head, source, output, options))
        try:
            wait_until(f"{name}: first rows", lambda: lines() >= 60, COLLECT_S, started.check_alive, every_s=0.01)
        finally:
            started.kill()
            self.delay(0)
        self.processes.running.remove(started)
        before = [line for line in output.read_bytes().split(b"\n")[:-1]]
        reference = (self.reference / environment / "rollouts.jsonl").read_bytes().count(b"\n")
        self.check(f"{name} was cut", 60 <= len(before) < reference, f"{len(before)} of {reference} rows were there")
        self.processes.run(f"{name}-ends", second(head, source, output, [*options, "--resume"]), COLLECT_S)
        after = output.read_bytes().split(b"\n")
        self.check(f"{name} keeps", after[: len(before)] == before, "the rows of the first are untouched and come first")
        self.check_against_reference(name, name, [plan], whole=True)
        self.took(name, began)

    def write_pools(self):
        """A pool in the place of each relay of the stock configuration."""
        lines, names = [], []
        for environment in SERVERS:
            name = environment.removesuffix("_gymnasium") + "_environment_server"
            agent = "{type: responses_api_agents, name: %s}" % agent_of(environment)
            lines.append("%s: {environment_servers: {_delete_key: legacy_agent, pool: {entrypoint: app.py, agent_server: %s}}}" % (name, agent))
            names.append(name)
        path = self.work / "pools.yaml"
        path.write_text("\n".join(lines) + "\n")
        return path, names

    def start_worker(self, name, binary, head, extra=()):
        process = self.processes.start(name, [*binary, "run", "--worker", "--head-url", head, "--name", name, *extra])

        def serves():
            members = json.loads(http_get(f"{head}/cluster/members")[1] or "[]")
            return any(member["name"] == name and member["state"] == "serving" for member in members)

        wait_until(f"{name} serves", serves, READY_S, process.check_alive)
        return process

    def runs_of(self, head, worker, agent):
        """The rollouts that the agent of a worker has run."""
        servers = json.loads(http_get(f"{head}/registry/instances?name={agent}")[1])
        url = next(url for server in servers if server.get("member") == worker for url in server["endpoints"] if url.startswith("http:"))
        counts = [line for line in http_get(f"{url}/metrics")[1].decode().splitlines() if line.startswith("gym_requests_total")]
        return sum(int(line.rsplit(" ", 1)[1]) for line in counts if f'server="{agent}"' in line and 'route="/run"' in line)

    def case_p(self):
        pools, names = self.write_pools()
        serves = [word for name in ["head_server", *names] for word in ("--serve", name)]
        head, process = self.start_ours("p-head", self.examples, extra=["--config", pools, *serves])
        workers = []
        try:
            # Few at a time, so that the collector's window holds more than one worker takes.
            capacity = ["--pull-capacity", "4"]
            workers.append(self.start_worker("p-rust", self.examples, head, capacity))
            workers.append(self.start_worker("p-python", self.rgym, head, [*capacity, "--python", sys.executable]))
            below = "\n".join(workers[1].descendants())
            self.check("p has Python's environments", below.count("app.py") >= len(SERVERS), f"{below.count('app.py')} below p-python")
            plans = [plan for plan in self.plans() if plan[0] in (*STATEFUL, "mixed")]
            self.as_relayed(self.collect_all("p", self.python_collector, head, plans), "pool")
            self.check_against_reference("p", "p", plans, whole=True)
            environment = plans[0][0]
            runs = {name: self.runs_of(head, name, agent_of(environment)) for name in ("p-rust", "p-python")}
            self.check("p uses both workers", min(runs.values()) > 0, f"{runs}")
            # Environments with a state. Two at a time, as the collections.
            with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
                stateful = [name for name in SERVERS if name in STATEFUL]
                list(pool.map(lambda environment: self.run_examples("p", head, environment), stateful))
        finally:
            for worker in workers:
                self.check(f"{worker.name} stops", self.processes.stop(worker, 60), "on SIGINT")
            self.check("p head stops", self.processes.stop(process, 60), "on SIGINT")

    def as_relayed(self, outputs, implementation):
        """Rows name the implementation of the environment server; here it takes the place of the reference's relay."""
        for output in outputs:
            named = rb'("_ng_result_type":\s*)"%s"' % implementation.encode()
            output.write_bytes(re.sub(named, rb'\1"legacy_agent"', output.read_bytes()))

    def run_examples(self, case, head, environment):
        output = self.work / f"{case}-run-examples-{environment}.jsonl"
        source = HERE / "data" / f"{environment}.jsonl"
        script = [sys.executable, HERE / "run_examples.py", head, source, agent_of(environment), output]
        self.processes.run(f"{case}-run-examples-{environment}", script, COLLECT_S)
        folder = self.reference / environment

        def rows(path):
            return map(json.loads, path.read_text(encoding="utf-8").rstrip("\n").split("\n"))

        def key(row):
            return row["_ng_task_index"], row["_ng_rollout_index"]

        rewards = {key(row): row["reward"] for row in rows(folder / "rollouts.jsonl")}
        # In the order of the input, in which a row may occur twice.
        expected = {index: rewards[key(row)] for index, row in enumerate(rows(folder / "rollouts_materialized_inputs.jsonl"))}
        found = {row["index"]: row["reward"] for row in map(json.loads, output.read_text().splitlines())}
        differ = [index for index in expected if expected[index] != found.get(index)]
        self.check(f"{case} run_examples {environment}", not differ and len(found) == len(expected), f"{len(found)} results, {len(differ)} differ")

    def case_r(self):
        environment = "example_session_state_mgmt"
        plan = next(plan for plan in self.plans() if plan[0] == environment)

        def collect(name, collector, head):
            # A Python server whose implementation this program has too runs under another name.
            self.as_relayed(self.collect_all(name, collector, head, [plan]), "python_legacy_agent")
            self.check_against_reference(name.replace("-", " ", 1), name, [plan], whole=False)

        # Our model server below Python's servers, and our collector beside them.
        port = free_port()
        place = "policy_model.responses_api_models.openai_model"
        address = [f"+{place}.host=127.0.0.1", f"+{place}.port={port}"]
        folder = Path(installed("responses_api_models/openai_model"))
        shim = [*address, f"++{place}.entrypoint={os.path.relpath(HERE / 'placeholder.py', folder)}"]
        _, model = self.start_ours("r-model-alone", self.rgym, "model.yaml", address)
        try:
            head, python = self.start_python("r-stack", shim, self.write_stock("r-stock", [environment]))
            try:
                collect("r-model", self.python_collector, head)
                collect("r-collector", self.our_collector, head)
            finally:
                self.processes.stop(python, 60)
        finally:
            self.check("r model stops", self.processes.stop(model, 60), "on SIGINT")

        # Our head and worker with Python in all other roles, and then with our agent. The head has no files.
        for name, own in (("r-worker", ()), ("r-agent", ("simple_agent",))):
            head, settings = self.settings()
            process = self.processes.start(f"{name}-head", [*self.rgym, "run", "--head-only", *settings])
            try:
                wait_until(f"{name}-head ready", lambda: http_get(f"{head}/livez")[0] == 200, READY_S, process.check_alive)
                config = ["--config", self.write_python_servers(name, environment, own), "--search-dir", self.work / "roots"]
                worker = self.start_worker(name, self.rgym, head, [*config, "--python", sys.executable])
                try:
                    count = "\n".join(worker.descendants()).count("app.py")
                    self.check(f"{name} has Python servers", count == 4 - len(own), f"{count} below the worker")
                    collect(name, self.python_collector, head)
                finally:
                    self.check(f"{name} stops", self.processes.stop(worker, 60), "on SIGINT")
            finally:
                self.processes.stop(process, 60)

    def write_python_servers(self, case, environment, own):
        """An environment whose servers run with Python although this program has them too: under other names."""

        def implementation(kind, name):
            if name in own:
                return name
            link = self.work / "roots" / kind / f"python_{name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(installed(f"{kind}/{name}"))
            return f"python_{name}"

        def block(name, kind, implementation, **keys):
            return f"{name}: {{{kind}: {{{implementation}: {json.dumps({'entrypoint': 'app.py', **keys})}}}}}"

        def reference(kind, name):
            return {"type": kind, "name": name}

        agents, models, resources = "responses_api_agents", "responses_api_models", "resources_servers"
        agent = {"resources_server": reference(resources, SERVERS[environment]), "model_server": reference(models, "policy_model")}
        model = {"openai_base_url": self.mock, "openai_api_key": "none", "openai_model": "mock"}
        lines = [
            block("policy_model", models, implementation(models, "openai_model"), **model),
            block(SERVERS[environment], resources, environment, domain="agent"),
            block(agent_of(environment), agents, implementation(agents, "simple_agent"), **agent),
            block(
                f"{environment}_environment_server",
                "environment_servers",
                implementation("environment_servers", "legacy_agent"),
                agent_server=reference(agents, agent_of(environment)),
            ),
        ]
        path = self.work / f"{case}.yaml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def case_o(self):
        head, process = self.start_ours("o-stack", self.rgym, "model.yaml")
        try:
            instances = json.loads(http_get(f"{head}/server_instances")[1])
            url = next(one["url"] for one in instances if one["server_type"] == "responses_api_models")
            expect = "python" if self.self_check else "passthrough"
            client = [sys.executable, HERE / "openai_client.py", "--base-url", f"{url}/v1", "--expect", expect]
            done = self.processes.run("o-client", client, 120)
            self.check("o openai client", True, done.tail(1).splitlines()[0].strip(" |-"))
        finally:
            self.processes.stop(process, 60)

    def run(self, cases):
        self.stock = self.write_stock()
        self.link_venvs()
        self.start_mock()
        steps = [] if cases == ["o"] else [("reference", self.make_reference)]
        steps += [(case, getattr(self, f"case_{case}")) for case in cases]
        for name, step in steps:
            print(f"--- {name}", flush=True)
            try:
                step()
            except Failed as error:
                print(f"FAILED   {name}: {error}", flush=True)
                self.results.append((name, False))
                if name == "reference":
                    break
        if steps[0][0] == "reference":
            self.report_coverage()
        wrong = [title for title, good in self.results if not good]
        print(f"--- {len(self.results) - len(wrong)} of {len(self.results)} as they should be; files in {self.work}")
        for title in wrong:
            print(f"  not: {title}")
        return 1 if wrong else 0

    def report_coverage(self):
        status, body = http_get(f"{self.mock.removesuffix('/v1')}/control/stats")
        scripts = json.loads(body) if status == 200 else {}
        for environment in SERVERS:
            if environment == TURNS:
                continue
            count = sum(name.startswith(f"{environment}:") for name in scripts)
            self.check(f"scripts of {environment}", count >= 15, f"{count} kinds of model behaviour seen")


def binary(variable):
    path = os.environ.get(variable)
    if not path or not os.access(path, os.X_OK):
        print(f"{variable} must name a program to test (it is {path!r}); or try --self-check", file=sys.stderr)
        sys.exit(2)
    return [str(Path(path).resolve())]


def installed(folder):
    """Where NeMo Gym's own servers lie in this interpreter."""
    import sysconfig

    return Path(sysconfig.get_paths()["purelib"]) / folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list("abcdeopr"), help="only these; may be given several times")
    parser.add_argument("--environment", action="append", choices=list(SERVERS), help="only these, and not case e; may be given several times")
    parser.add_argument("--work", help="folder for logs and outputs; default: a new temporary one, removed when all is equal")
    parser.add_argument("--jobs", type=int, default=2, help="collections at a time (default: 2)")
    parser.add_argument("--reuse-reference", action="store_true", help="of --work, if it is current")
    parser.add_argument("--self-check", action="store_true", help="Python in both roles")
    arguments = parser.parse_args()
    cases = set(arguments.case or ("abceo" if arguments.self_check else "abceopr"))
    if "d" in cases:
        cases = cases - {"d"} | {"a", "c"}
    for name in set(SERVERS) - set(arguments.environment or SERVERS):
        del SERVERS[name]
        cases -= {"e", "r"}
    suite = Suite(arguments)
    began = time.monotonic()
    code = 1
    try:
        code = suite.run(sorted(cases))
    finally:
        suite.processes.end_all()
        print(f"--- {time.monotonic() - began:.0f} s in all", flush=True)
    if code == 0 and not arguments.work:
        shutil.rmtree(suite.work, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
