#!/usr/bin/env python3
"""Runs the commands of the guides and of the documents that the project began with, and provokes every row of the troubleshooting guide.

Usage: .ci/guides PROGRAM [rows]. With `rows`, only the rows are provoked. Each command runs with this one program, or has a reason in ELSEWHERE.

A command that serves (`ng_run`, `rgym run`) goes to the background once it is ready, and ends with its section; all others must succeed.
A text of the troubleshooting guide has parts with … between them; what is provoked must print the parts in this order.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ["topologies.md", "capacity.md", "migration.md", "multi-node.md", "page.md"]

DOCKER, ENGINES, RAY = "the tier `docker`", "the tier `engines`", "the tier `ray`"
PACKAGE, OWNER = "the tier `package`, in a copy of its own", "it publishes"
MONITORING, VENDOR = "the tier `monitoring`", "an engine and a model of a hub"
# Why a command of a guide is not run here: by its page and beginning.
ELSEWHERE = {
    "README.md": {"cargo build": "the program under test is built from these sources", "mkdir": "the names are links of the test",
                  "ln -sf": "as above", 'eval "$(rgym aliases)"': "as above"},
    "docker.md": {"docker ": DOCKER, "curl ": DOCKER, "rgym collect": DOCKER},
    "engines.md": {"rgym collect": ENGINES, "vllm serve": f"{VENDOR}; the tier `engines-vllm`", "llama-server": f"{VENDOR}; {ENGINES}", "python -m sglang": VENDOR},
    "monitoring.md": {"curl ": MONITORING, "promtool ": MONITORING},
    "multi-node.md": {"docker run": DOCKER},
    "publishing.md": {"git worktree": PACKAGE, "cd ": PACKAGE, ".ci/prefix": PACKAGE, "cargo publish --workspace --dry-run": "the tier `package` compiles the packages, but as a user does",
                      "rm .cargo": OWNER, "cargo login": OWNER, "cargo publish --workspace --allow-dirty": OWNER},
    "ray.md": {"ray ": RAY, "export RAY_ADDRESS": RAY, "rgym ray": RAY, "cargo run": RAY, "mkdir -p job": RAY},
}

# The commands of the documents that the project began with, and how each is run: here, or elsewhere.
HERE = "here"
BEGINNINGS = [
    ("All-in-one", 'ng_run "+config_paths=[config.yaml]"', HERE),
    ("Multi-node", "ng_run --head-only", HERE),
    ("Multi-node", "ng_run --worker --head-url=http://coordinator:11000", HERE),
    ("Multi-node", "curl --fail http://coordinator:11000/health", HERE),
    ("Multi-node", "curl --fail http://worker-1:8080/health", HERE),
    ("Containers", "docker compose up -d", DOCKER),
    ("Containers", "docker compose logs head | grep 'worker registered'", DOCKER),
    ("Containers", "docker compose up -d --scale worker=5", DOCKER),
    ("Containers", "docker compose logs -f worker-1", DOCKER),
    ("Ray", 'ng_run "+config_paths=[config.yaml]" +ray_head_node_address="ray://your-cluster:10001"', RAY),
    ("Ray", "ray start --head --port=6379 --dashboard-host=0.0.0.0 --dashboard-port=8265", RAY),
    ("Ray", "ray start --address='10.0.1.100:6379'", RAY),
    ("Ray", "ray status; ray memory; ray list tasks --limit 20; ray stop", "commands of Ray; ours are in the tier `ray`"),
    ("Ray", "python -m nemo_rl.train --config training_config.yaml", "NeMo RL itself: needs GPUs and a model of a hub"),
    ("RoCE worker", "bash -c 'ray start --address=${RAY_ADDRESS} --node-ip-address=${VLLM_HOST_IP} --num-gpus=1'", "the tier `docker-rdma`; a GPU and RDMA cards"),
]
NAMES = ["rgym", "ng_run", "ng_status", "ng_collect_rollouts"]
TIMEOUT = 120


class Machine:
    """A directory with the examples, in which commands run, and the servers that were started there."""

    def __init__(self, folder: str, program: str):
        self.folder = Path(folder)
        (self.folder / "bin").mkdir()
        for name in NAMES:
            (self.folder / "bin" / name).symlink_to(program)
        (self.folder / "examples").symlink_to(ROOT / "examples")
        without = {name: value for name, value in os.environ.items() if name not in ("HEAD_SERVER_URL", "RUST_LOG", "VIRTUAL_ENV")}
        self.environment = {**without, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        self.serving: list[tuple[subprocess.Popen, Path]] = []

    def run(self, command: str, expected: int | None = 0) -> str:
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, env=self.environment, timeout=TIMEOUT, text=True, check=False,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if expected is not None and done.returncode != expected:
            raise AssertionError(f"`{command}` ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def serve(self, command: str, until: str = "ready: ") -> Path:
        """Starts a server, and waits until it prints this text. Returns its log."""
        log = self.folder / f"server-{len(self.serving)}.log"
        with log.open("w") as out:
            # `exec`, so that signals reach the program.
            server = subprocess.Popen(["bash", "-c", f"exec env {command}"], cwd=self.folder, env=self.environment,
                                      stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        self.serving.append((server, log))
        wait_for(log.read_text, until, f"`{command}`", server)
        return log

    def stop(self) -> None:
        for server, _ in reversed(self.serving):
            server.send_signal(signal.SIGCONT)
            server.terminate()
        for server, _ in self.serving:
            server.wait(timeout=TIMEOUT)
        self.serving = []

    def kill(self) -> None:
        for server, _ in self.serving:
            server.kill()
            server.wait()


def wait_for(read, text: str, what: str, server: subprocess.Popen | None = None) -> str:
    deadline = time.monotonic() + TIMEOUT
    while True:
        said = read()
        if pattern(text).search(said):
            return said
        if time.monotonic() > deadline or (server is not None and server.poll() is not None):
            raise AssertionError(f"{what} does not print `{text}`:\n{said}")
        time.sleep(0.1)


def pattern(text: str) -> re.Pattern:
    return re.compile(".*?".join(re.escape(part) for part in re.split(r"\s*…\s*", text)), re.DOTALL)


def sections(page: str):
    """Yields each section's heading and its commands."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
        yield section.split("\n", 1)[0], [line for line in lines if line.strip()]


def reason(name: str, command: str) -> str | None:
    """Returns why a command is not run here."""
    return next((why for beginning, why in ELSEWHERE.get(name, {}).items() if command.startswith(beginning)), None)


def check_that_none_is_left_out() -> None:
    """Each command of each page runs, or has a reason; each reason has a command."""
    used = set()
    for page in sorted((ROOT / "docs").glob("*.md")):
        for _, commands in sections(page.read_text()):
            for command in commands:
                why = reason(page.name, command)
                if why is None and page.name not in GUIDES:
                    raise AssertionError(f"docs/{page.name}: `{command}` is not run; add the page to GUIDES, or a reason to ELSEWHERE")
                used.update((page.name, beginning) for beginning in ELSEWHERE.get(page.name, {}) if command.startswith(beginning))
                if why is not None:
                    print(f"guides: not here: docs/{page.name}: {command}: {why}")
    stale = [(name, beginning) for name, reasons in ELSEWHERE.items() for beginning in reasons if (name, beginning) not in used]
    if stale:
        raise AssertionError(f"reasons without a command: {stale}")


def run_beginnings(program: str) -> int:
    """Runs the commands of the documents that the project began with, in the order of a user."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(folder, program)
        machine.run("cp examples/configs/quickstart.yaml config.yaml")
        try:
            machine.serve(BEGINNINGS[0][1])
            machine.stop()
            # The head of a cluster without a configuration takes that of its directory.
            machine.serve(f"{BEGINNINGS[1][1]} '+config_paths=[config.yaml]' ++head_server.host=0.0.0.0")
            machine.serve(f"{BEGINNINGS[2][1]} --name worker-1", "joined the cluster")
            for _, command, where in BEGINNINGS[3:]:
                if where == HERE:
                    machine.run(command)
        finally:
            machine.kill()
    for document, command, where in BEGINNINGS:
        if where != HERE:
            print(f"guides: not here: {document}: {command}: {where}")
    return sum(where == HERE for _, _, where in BEGINNINGS)


def run_guide(name: str, program: str) -> int:
    ran = 0
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(folder, program)
        machine.run("cp examples/configs/quickstart.yaml config.yaml")
        try:
            for _, commands in sections((ROOT / "docs" / name).read_text()):
                for command in (command for command in commands if reason(name, command) is None):
                    print(f"$ {command}", flush=True)
                    if re.match(r"([A-Z_]+=\S+ )*(ng_run|rgym run)\b", command):
                        machine.serve(command, "ready: " if "--worker" not in command else "joined the cluster")
                    else:
                        print(machine.run(command), end="", flush=True)
                    ran += 1
                machine.stop()
        finally:
            machine.kill()
    print(f"guides: {ran} commands of docs/{name} run", flush=True)
    return ran


HEAD = 'ng_run --head-only "+config_paths=[config.yaml]" ++head_server.host=0.0.0.0'
FAST = "WORKER_HEARTBEAT_INTERVAL=1 WORKER_TIMEOUT=3"
WORKER = "ng_run --worker --head-url=http://coordinator:11000"
COLLECT = "rgym collect --agent math_simple_agent --input math.jsonl --progress none"
OWN = f"{COLLECT} --config config.yaml ++head_server.port=0"


def mistakes(machine: Machine) -> None:
    """Writes a row that no environment accepts, and the configurations of the mistakes."""
    files = {
        "bad.jsonl": '{"responses_create_params": {"input": "How many?"}}\n',
        "down.yaml": 'policy_model: {responses_api_models: {openai_model: {entrypoint: app.py, openai_base_url: "http://127.0.0.1:9/v1", '
                     "openai_api_key: none, openai_model: m, retry_budget_seconds: 1}}}\n",
        "python.yaml": "broken: {resources_servers: {nothing: {entrypoint: app.py, domain: other}}}\n",
        "agent.yaml": "math_simple_agent: {responses_api_agents: {simple_agent: {entrypoint: app.py, resources_server: "
                      "{type: resources_servers, name: math}, model_server: {type: responses_api_models, name: policy_model}}}}\n",
    }
    for name, text in files.items():
        (machine.folder / name).write_text(text)


def suspect_and_gone(machine: Machine) -> str:
    machine.serve(f"{FAST} {HEAD}")
    machine.serve(f"{FAST} {WORKER} --name worker-1", "joined the cluster")
    wait_for(lambda: machine.run("rgym workers"), "worker-1 … serving", "the worker")
    machine.serving[-1][0].send_signal(signal.SIGSTOP)
    said = wait_for(lambda: machine.run("rgym workers"), "suspect … no heartbeat for", "the worker")
    return said + wait_for(lambda: machine.run("rgym workers"), "gone … no heartbeat for", "the worker")


def two_names(machine: Machine) -> str:
    machine.serve(HEAD)
    machine.serve(f"{WORKER} --name worker-1", "joined the cluster")
    return machine.run(f"{WORKER} --name worker-1 --join-timeout 1", 1)


def uneven(machine: Machine) -> str:
    machine.serve(HEAD)
    machine.serve(f"{WORKER} --name worker-1", "joined the cluster")
    machine.serve(f"{COLLECT} --head-url http://coordinator:11000 --metrics-port 9100 --num-repeats 400 --output results/uneven.jsonl",
                  "of the cluster take")
    return wait_for(lambda: machine.run("curl --silent http://127.0.0.1:9100/metrics", None), "gym_pool_worker_held", "the collector")


def stuck(machine: Machine) -> str:
    machine.serve("rgym run --config config.yaml --head-only")
    machine.serve("rgym run --config config.yaml --serve math --serve math_simple_agent --serve math_environment_server")
    machine.serve("rgym run --config config.yaml --serve policy_model")
    machine.serving[-1][0].send_signal(signal.SIGSTOP)
    machine.serve(f"{COLLECT.replace('none', 'plain')} --output results/stuck.jsonl", "in flight")
    return wait_for(lambda: machine.run("rgym stuck --older 1"), "its process is stopped", "rgym stuck")


def a_server_is_missing(machine: Machine) -> str:
    machine.serve("rgym run --head-only")
    said = machine.serve("rgym run --config agent.yaml --serve math_simple_agent", "waiting up to").read_text()
    machine.stop()
    machine.serve("rgym run --config config.yaml --head-only")
    machine.serve("rgym run --config config.yaml --serve math_simple_agent")
    return said + machine.run(f"{COLLECT} --limit 3 --output results/a.jsonl", 3)


# What provokes each row: a function, or the servers to start and the command that prints it with its exit status.
ROWS = {
    "workers do not register": lambda machine: machine.serve(f"NUM_EXPECTED_WORKERS=2 {HEAD}", "waiting for workers").read_text()
    + machine.run(f"{WORKER.replace('11000', '11001')} --join-timeout 1", 1),
    "`HEAD_SERVER_URL`: connection refused": lambda machine: machine.run("HEAD_SERVER_URL=http://coordinator:11000 ng_run --worker --join-timeout 1", 1),
    "the head is not healthy": lambda machine: machine.serve(f"NUM_EXPECTED_WORKERS=2 {HEAD}", "waiting for workers").read_text()
    + machine.run("curl --silent --write-out ' %{http_code}' http://coordinator:11000/health; curl --silent --fail http://coordinator:11000/livez"),
    "a second head server": lambda machine: machine.serve(HEAD).read_text() + machine.run("ng_run --head-only", 1),
    "two workers with one name": two_names,
    "a worker takes another port": lambda machine: [
        machine.serve(HEAD), machine.serve(f"{WORKER} --name worker-1", "joined the cluster"),
        machine.serve(f"{WORKER} --name worker-2", "joined the cluster"),
    ][2].read_text(),
    "a worker is marked unhealthy": suspect_and_gone,
    "work is distributed unevenly": uneven,
    "GPU not visible in a worker": lambda machine: machine.run("rgym doctor", None),
    "no head server": lambda machine: machine.run("rgym status", 1),
    "an unknown agent": lambda machine: machine.run(OWN.replace("math_simple_agent", "maths") + " --output results/a.jsonl", 2),
    "a row that does not fit": lambda machine: machine.run(OWN.replace("math.jsonl", "bad.jsonl") + " --output results/a.jsonl", 2),
    "earlier results": lambda machine: machine.run(f"{OWN} --limit 5 --output results/again.jsonl")
    + machine.run(f"{OWN} --limit 5 --output results/again.jsonl", 2),
    "other settings than those of the earlier results": lambda machine: machine.run(f"{OWN} --limit 5 --output results/again.jsonl")
    + machine.run(f"{OWN} ++math_simple_agent.responses_api_agents.simple_agent.max_steps=7 --limit 5 --resume --output results/again.jsonl", 2),
    "rollouts are missing from the statistics": lambda machine: machine.run(
        f"{OWN} --config down.yaml '~policy_model.responses_api_models.scripted_model' --limit 3 --output results/c.jsonl", 3),
    "the model endpoint is down": lambda machine: machine.run(
        f"{OWN} --config down.yaml '~policy_model.responses_api_models.scripted_model' --limit 3 --output results/a.jsonl", 3),
    "all rollouts fail alike": lambda machine: machine.run(
        f"{OWN} --config down.yaml '~policy_model.responses_api_models.scripted_model' --limit 3 --output results/b.jsonl", 3),
    "a server is missing": a_server_is_missing,
    "a Python server does not start": lambda machine: machine.run("rgym run --config python.yaml --python /no/python ++head_server.port=0", 2),
    "a rollout does not end": stuck,
    "killed, out of disk, power failure": lambda machine: machine.run(f"{OWN} --limit 5 --output results/again.jsonl")
    + machine.run(f"{OWN} --limit 9 --resume --output results/again.jsonl"),
}


def troubleshoot(program: str) -> int:
    table = re.findall(r"^\| (?!symptom)(?!---)(.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    missing = [symptom for symptom, _, _ in table if symptom not in ROWS]
    unknown = [symptom for symptom in ROWS if symptom not in [row[0] for row in table]]
    if missing or unknown:
        raise AssertionError(f"not provoked: {missing}; not in the guide: {unknown}")
    for symptom, printed, _ in table:
        with tempfile.TemporaryDirectory() as folder:
            machine = Machine(folder, program)
            machine.run("cp examples/configs/quickstart.yaml config.yaml; cp examples/data/math.jsonl math.jsonl")
            mistakes(machine)
            try:
                said = ROWS[symptom](machine)
            finally:
                machine.kill()
            texts = [text for text in re.findall(r"`([^`]+)`", printed) if not text.startswith("rgym ") and not text.isupper()]
            for text in texts:
                if not pattern(text).search(said):
                    raise AssertionError(f"{symptom}: `{text}` is not in\n{said}")
            print(f"guides: {symptom}: prints {len(texts)} of {len(texts)} texts", flush=True)
    return len(table)


def main() -> None:
    program = sys.argv[1]
    if sys.argv[2:] != ["rows"]:
        check_that_none_is_left_out()
        for name in GUIDES:
            if run_guide(name, program) == 0:
                raise AssertionError(f"docs/{name} has no commands")
        print(f"guides: {run_beginnings(program)} commands of the first documents run")
    print(f"guides: {troubleshoot(program)} rows of docs/troubleshooting.md provoked")


if __name__ == "__main__":
    main()
