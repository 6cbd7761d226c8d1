"""The image and the compose files of examples/deploy on a real Docker engine.

    .ci/docker PROGRAM [RESTARTS]

The guide's compose file runs as it is written, apart from GPUs. One container with all servers is used from its machine. Then a head and workers are scaled, killed, cut off and restarted during a
collection, whose rows must be those of an undisturbed one. It ends with 1 if anything differs, and removes what it created.
"""

import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from cluster import Failed, Resolver, read_rows

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "examples/deploy"
IMAGE = "nemo-gym:latest"
ID = f"gym{os.getpid()}"
BASE = f"{ID}-base"
TASKS, ROLLOUTS = 100, 2_000
# Of the head, each with rollouts at five workers. In every second one, the resolver takes 3 s.
RESTARTS = 4
# Only names that Docker does not know reach a resolver of ours. The network is of the range for measurements (RFC 2544).
NETWORK, GATEWAY, HEAD = "198.18.77.0/24", "198.18.77.1", "198.18.77.10"
SLOW = f"""
version: '3.8'
services:
  head:
    # Two turns a rollout: long enough that the faults strike the whole collection.
    command: ng_run --head-only +policy_model.responses_api_models.scripted_model.latency_ms=[400,1000]
    networks:
      gym-network:
        ipv4_address: {HEAD}
  worker:
    dns: [{GATEWAY}]
    environment:
      - HEAD_SERVER_URL=http://head.gym.test:11000
networks:
  gym-network:
    ipam:
      config:
        - subnet: {NETWORK}
          gateway: {GATEWAY}
"""
FIVE = {f"worker-{number}" for number in range(1, 6)}
GUIDE = """
version: '3.8'

services:
  head:
    image: nemo-gym:latest
    ports:
      - "11000:11000"
    command: ng_run --head-only
    environment:
      - NUM_EXPECTED_WORKERS=2
"""
GUIDE_WORKER = """
  worker-{number}:
    image: nemo-gym:latest
    environment:
      - HEAD_SERVER_URL=http://head:11000
    depends_on:
      - head
"""
GUIDE_GPU = """
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              count: 1
              capabilities: [gpu]
"""


def run(*command, check=True, limit=300, **options):
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=limit, check=False, **options)
    if check and ended.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: ended with {ended.returncode}\n{ended.stdout[-2_000:]}{ended.stderr[-2_000:]}")
    return ended.stdout + ended.stderr


def docker(*arguments, **options):
    return run("docker", *arguments, **options)


def compose_program():
    has_plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    return ["docker", "compose"] if has_plugin else ["docker-compose"]


class Project:
    """A compose project in a folder of its own, which is removed at the end."""

    def __init__(self, name, *files):
        self.name, self.files = f"{ID}{name}", [word for file in files for word in ("-f", file)]
        # A port of the machine that is free, or any: other services of the machine may have 11000.
        self.environment = {**os.environ, "HEAD_PORT": "0", "WORKER_HEARTBEAT_INTERVAL": "1", "WORKER_TIMEOUT": "4"}

    def __call__(self, *arguments, **options):
        return run(*compose_program(), "-p", self.name, *self.files, *arguments, env=self.environment, **options)

    def container(self, service, number=1):
        """Returns the identifier of a container, running or not."""
        text = docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={self.name}",
                      "--filter", f"label=com.docker.compose.service={service}", "--filter", f"label=com.docker.compose.container-number={number}")
        return text.split()[0]

    def inside(self, service, *command, check=True):
        return docker("exec", self.container(service), *command, check=check)

    def down(self):
        self("down", "--volumes", "--timeout", "1", "--remove-orphans", check=False)


def wait(what, ready, limit=90):
    """Waits for a condition, which only a poll can show, and returns how long it took."""
    began = time.monotonic()
    while not ready():
        if time.monotonic() - began > limit:
            raise Failed(f"{what}: not within {limit} s")
        time.sleep(0.1)
    return time.monotonic() - began


def serving(project):
    text = project.inside("head", "rgym", "workers", "--json", check=False)
    try:
        return {worker["name"] for worker in json.loads(text) if worker["state"] == "serving"}
    except (ValueError, KeyError, TypeError):
        return set()


def make_base():
    base = subprocess.run([ROOT / ".ci/docker-base", BASE], check=False).returncode
    if base != 0:
        print(f"docker: the base image was not built (.ci/docker-base ended with {base})", file=sys.stderr)
        sys.exit(base)


def context_of(program, folder):
    """Returns a folder with what the Dockerfile copies, and a program that was built before."""
    stripped = folder / "program"
    shutil.copy(program, stripped)
    run("strip", stripped, check=False)
    context = folder / "context"
    shutil.copytree(DEPLOY, context / "examples/deploy")
    shutil.copytree(ROOT / "examples/data", context / "examples/data")
    shutil.copytree(ROOT / "examples/configs", context / "examples/configs")
    shutil.move(stripped, context / "program")
    return context


def build(program, folder):
    began = time.monotonic()
    make_base()
    context = context_of(program, folder)
    arguments = ["-f", context / "examples/deploy/Dockerfile", "--build-arg", f"BUILD_IMAGE={BASE}", "--build-arg", f"BASE_IMAGE={BASE}",
                 "--build-arg", "PROGRAM=program", "--force-rm"]
    # The first stage by its name, so that it can be removed.
    docker("build", *arguments, "--target", "build", "-t", f"{ID}-build", context)
    docker("build", *arguments, "--target", "gym", "-t", IMAGE, context)
    sizes = [int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6 for image in (IMAGE, BASE)]
    print(f"docker: built in {time.monotonic() - began:.1f} s: {IMAGE} has {sizes[0]:.0f} MB, of which its base {sizes[1]:.0f} MB and the "
          f"program {(context / 'program').stat().st_size / 1e6:.0f} MB", flush=True)
    user = docker("run", "--rm", IMAGE, "id", "--user").strip()
    if user != "10001":
        raise Failed(f"the image runs as user {user}")


def configurations(folder):
    """What needs GPUs or RDMA is validated only."""
    full = folder / "gpu.yaml"
    full.write_text(GUIDE + "".join(GUIDE_WORKER.format(number=number).rstrip("\n") + GUIDE_GPU for number in (1, 2)))
    for file in [full, *sorted(DEPLOY.glob("*.yaml"))]:
        run(*compose_program(), "--env-file", DEPLOY / ".env.example", "-f", file, "config", "--quiet")


def guide(folder, projects):
    """The compose file of the guide."""
    file = folder / "guide.yaml"
    file.write_text(GUIDE.replace('"11000:11000"', '"127.0.0.1::11000"') + "".join(GUIDE_WORKER.format(number=number) for number in (1, 2)))
    project = Project("guide", file)
    projects.append(project)
    project("up", "-d")
    wait("both workers serve", lambda: serving(project) == {"worker-1", "worker-2"})
    # 503 until both serve.
    wait("the head is ready", lambda: "503" not in project.inside("head", "curl", "-fsS", "http://localhost:11000/health", check=False), 30)
    for worker in ("worker-1", "worker-2"):
        project.inside(worker, "curl", "-f", "http://localhost:8080/health")
        project.inside(worker, "curl", "-f", "http://localhost:8000/health")
        project.inside("head", "curl", "-f", f"http://{worker}:8080/health")
        lines = [line for line in project("logs", "head").splitlines() if "worker registered" in line]
        if not any(f"{worker} registered successfully" in line for line in lines):
            raise Failed(f"the log of the head does not name {worker}: {lines}")
    project.down()
    print("docker: the guide's compose file: worker-1 and worker-2 registered, /health on 11000, 8080 and 8000", flush=True)


def engine(folder):
    """A stand-in engine, started as a model server, shows what it inherits."""
    script = folder / "engine"
    # The program first asks an interpreter for its packages.
    script.write_text("""#!/bin/sh
if [ "$1" = -c ]; then echo '{"version": "3.13.0", "has": true, "roots": ["/home/gym/engine"]}'; exit; fi
echo "engine: $NCCL_IB_HCA $NCCL_IB_TC $VLLM_HOST_IP"
exit 1
""")
    script.chmod(0o755)
    model = folder / "engine.yaml"
    model.write_text("policy_model: {responses_api_models: {stand_in_engine: {entrypoint: app.py}}}\n")
    app = folder / "responses_api_models/stand_in_engine"
    app.mkdir(parents=True)
    (app / "app.py").write_text("")
    folder.chmod(0o755)
    text = docker("run", "--rm", "--volume", f"{folder}:/home/gym/engine:ro", "--workdir", "/home/gym/engine",
                  "--env", "VLLM_HOST_IP=192.168.100.2",
                  "--env", "NCCL_IB_HCA=mlx5_0", "--env", "NCCL_IB_TC=106", "--env", "VLLM_RAY_WORKER_ENV_VARS=NCCL_IB_HCA,NCCL_IB_TC,NCCL_IB_SL",
                  IMAGE, "ng_run", "--config", "engine.yaml", "--python", "/home/gym/engine/engine", check=False)
    if "engine: mlx5_0 106 192.168.100.2" not in text or "variables that are not set: NCCL_IB_SL" not in text:
        raise Failed(f"the engine does not inherit the environment: {text[-2_000:]}")


def collect_words(name, *more, repeats=ROLLOUTS // TASKS):
    return ["rgym", "collect", "--agent", "math_simple_agent", "--input", "examples/data/math.jsonl", "--output", f"/results/{name}.jsonl",
            "--limit", str(TASKS), "--num-repeats", str(repeats), "--add-seed", "--progress", "none", *more]


def rows(container, folder, name):
    """Returns the rows of a collection, by task and rollout, and the number of failed attempts by class."""
    docker("cp", f"{container}:/results/{name}.jsonl", folder)
    docker("cp", f"{container}:/results/{name}_failures.jsonl", folder)
    classes = collections.Counter()
    for line in (folder / f"{name}_failures.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("reward") is not None:
            raise Failed(f"{name}: a failed attempt has a reward")
        classes[row["_ng_failure_class"]] += 1
    return read_rows(folder / f"{name}.jsonl", ROLLOUTS), classes


def two_commands(project):
    """What docs/docker.md promises: two commands start a head and five workers and finish a collection."""
    began = time.monotonic()
    project("up", "-d", "--scale", "worker=5")
    up = time.monotonic() - began
    wait("five workers serve", lambda: serving(project) == FIVE)
    ready = time.monotonic() - began
    summary = project("run", "--rm", "-T", "collect")
    if "960" not in summary:
        raise Failed(f"the collection of 960 rollouts: {summary[-2_000:]}")
    print(f"docker: two commands: `up` returned after {up:.1f} s, five workers served after {ready:.1f} s, 960 rollouts had ended after "
          f"{time.monotonic() - began:.1f} s", flush=True)


def seed_worker(project, network):
    """A worker that finds its head by the variables of the RDMA guide alone."""
    name = f"{ID}-seed"
    docker("run", "--detach", "--label", f"gym={ID}", "--name", name, "--network", network, "--network-alias", "ray-worker",
           "--env", "RAY_MODE=worker", "--env", "RAY_ADDRESS=head:6379", "--env", "VLLM_HOST_IP=ray-worker", "--env", "WORKER_NAME=ray-worker", IMAGE)
    try:
        wait("the worker of RAY_ADDRESS serves", lambda: "ray-worker" in serving(project), 30)
        members = json.loads(project.inside("head", "rgym", "workers", "--json"))
        if "http://ray-worker:8080" not in json.dumps(members):
            raise Failed("the worker is not at the address of VLLM_HOST_IP")
        docker("stop", "--time", "10", name)
        wait("it left", lambda: serving(project) == FIVE, 30)
    finally:
        docker("rm", "--force", name, check=False)
    print("docker: RAY_MODE, RAY_ADDRESS and VLLM_HOST_IP make a worker", flush=True)


def faults(project, network, folder):
    """Containers are killed, cut off, and scaled down and up during a collection."""
    docker("run", "--name", f"{ID}-undisturbed", "--label", f"gym={ID}", IMAGE,
           *collect_words("undisturbed", "--config", "/etc/gym/servers.yaml", "+head_server.port=0"))
    reference, _ = rows(f"{ID}-undisturbed", folder, "undisturbed")
    collector = f"{ID}-collector"
    docker("run", "--detach", "--name", collector, "--label", f"gym={ID}", "--network", network, IMAGE,
           *collect_words("disturbed", "--head-url", "http://head:11000", "--concurrency", "40"))
    written = lambda: int(docker("exec", collector, "sh", "-c", "cat /results/disturbed.jsonl 2> /dev/null | wc -l", check=False).strip() or 0) \
        if docker("inspect", "--format", "{{.State.Running}}", collector).strip() == "true" else ROLLOUTS
    moments = []

    def until(part):
        wait(f"{part} of the rows", lambda: written() >= ROLLOUTS * part, 120)
        moments.append(written())

    until(0.05)
    docker("kill", project.container("worker", 1))
    until(0.15)
    cut = project.container("worker", 2)
    docker("network", "disconnect", "--force", network, cut)
    wait("the cut worker is gone", lambda: "worker-2" not in serving(project), 30)
    docker("network", "connect", network, cut)
    until(0.3)
    head = project.container("head")
    docker("kill", head)
    docker("start", head)
    wait("its workers returned", lambda: serving(project) >= {"worker-3", "worker-4", "worker-5"}, 60)
    until(0.4)
    project("up", "-d", "--scale", "worker=2")
    until(0.5)
    project("up", "-d", "--scale", "worker=5")
    status = docker("wait", collector, limit=240).strip()
    if status != "0":
        raise Failed(f"the collection ended with {status}: {docker('logs', collector)[-3_000:]}")
    if moments[-1] >= ROLLOUTS:
        raise Failed(f"the collection ended before the last fault: {moments}")
    disturbed, classes = rows(collector, folder, "disturbed")
    different = [key for key in reference if disturbed.get(key) != reference[key]]
    if different:
        raise Failed(f"{len(different)} rows differ from the undisturbed ones, such as {different[0]}")
    wait("five workers serve again", lambda: serving(project) == FIVE, 60)
    print(f"docker: worker killed, worker cut off, head killed, scaled to 2 and to 5 at rows {moments}: {ROLLOUTS:,} rows as undisturbed: 0 lost, "
          f"0 twice, 0 rewards on failed attempts; attempts failed: {dict(classes)}", flush=True)


def all_in_one(program, folder, projects):
    """All servers in one container, whose machine reaches them although they bind all addresses."""
    project = Project("one", DEPLOY / "all-in-one.yaml")
    projects.append(project)
    project("up", "-d")
    port = docker("port", project.container("gym"), "11000").split()[0].rsplit(":", 1)[1]
    url = f"http://127.0.0.1:{port}"
    wait("it serves", lambda: "ok" in run("curl", "-fsS", f"{url}/health", check=False), 30)
    words = collect_words("one", "--head-url", url, repeats=2)
    words[words.index("--output") + 1] = folder / "one.jsonl"
    run(pathlib.Path(program).resolve(), *words[1:], cwd=ROOT)
    project.down()
    print("docker: all-in-one.yaml: 200 rollouts from the machine", flush=True)


def restarts(project, network, resolver, count):
    """The head is restarted while workers have rollouts, and no attempt is lost."""
    collector = f"{ID}-restarts"
    docker("run", "--detach", "--name", collector, "--label", f"gym={ID}", "--network", network, IMAGE,
           *collect_words("restarts", "--head-url", "http://head:11000", "--concurrency", "40", repeats=1_000))
    rows_of = lambda file: int(docker("exec", collector, "sh", "-c", f"cat /results/{file}.jsonl 2> /dev/null | wc -l").strip() or 0)
    wait("rows", lambda: rows_of("restarts") >= 20)
    for number in range(count):
        resolver.delay = 3.0 if number % 2 else 0.0
        docker("restart", "--time", "0", project.container("head"))
        wait("five workers serve", lambda: serving(project) == FIVE, 60)
        # Longer than a rollout takes.
        time.sleep(3)
    resolver.delay = 0.0
    written, lost = rows_of("restarts"), rows_of("restarts_failures")
    docker("rm", "--force", collector)
    if lost:
        raise Failed(f"{lost} attempts were lost in {count} restarts of the head")
    print(f"docker: {count} restarts of the head, every second with a resolver that takes 3 s: {written:,} rows, 0 attempts lost", flush=True)


def main():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gym-docker-"))
    previous = subprocess.run(["docker", "image", "inspect", "--format", "{{.Id}}", IMAGE], capture_output=True, text=True, check=False).stdout.strip()
    projects, status = [], 1
    try:
        configurations(folder)
        build(sys.argv[1], folder)
        engine(folder)
        guide(folder, projects)
        all_in_one(sys.argv[1], folder, projects)
        slow = folder / "slow.yaml"
        slow.write_text(SLOW)
        project = Project("cluster", DEPLOY / "docker-compose.yaml")
        projects.append(project)
        two_commands(project)
        seed_worker(project, f"{project.name}_gym-network")
        project.down()
        project = Project("faults", DEPLOY / "docker-compose.yaml", slow)
        projects.append(project)
        project("up", "-d", "--scale", "worker=5")
        # Workers look the name up until a resolver knows it.
        resolver = Resolver(GATEWAY, HEAD)
        wait("five workers serve", lambda: serving(project) == FIVE)
        restarts(project, f"{project.name}_gym-network", resolver, int(sys.argv[2]) if len(sys.argv) > 2 else RESTARTS)
        faults(project, f"{project.name}_gym-network", folder)
        status = 0
        print("docker: passed", flush=True)
    except (Failed, subprocess.TimeoutExpired) as failure:
        print(f"docker: {failure}", file=sys.stderr)
        for project in projects:
            print(project("logs", "--tail", "15", check=False), file=sys.stderr)
    finally:
        # Only what carries the names of this run.
        containers = docker("ps", "--all", "--quiet", "--filter", f"label=gym={ID}", check=False).split()
        if containers:
            docker("rm", "--force", *containers, check=False)
        for project in projects:
            project.down()
        if previous:
            docker("tag", previous, IMAGE, check=False)
        else:
            docker("rmi", "--force", IMAGE, check=False)
        docker("rmi", "--force", f"{ID}-build", check=False)
        docker("rmi", "--force", BASE, check=False)
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
