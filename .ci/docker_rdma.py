"""The image for RDMA machines and Ray on a real Docker engine: two containers become a Ray cluster, and a head and a worker of ours.

    .ci/docker PROGRAM --rdma

Ray comes from PyPI and the rest from Debian, so the build takes minutes. It ends with 1 if anything differs, and removes what it created.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from cluster import Failed
from docker import BASE, ID, context_of, docker, make_base, wait

IMAGE = f"{ID}-rdma"
# Of the range for measurements (RFC 2544).
NETWORK, HEAD, WORKER = "198.18.79.0/24", "198.18.79.10", "198.18.79.11"


def build(program, folder):
    make_base()
    base = BASE
    bundle = os.environ.get("PIP_CERT")
    if bundle:
        # pip trusts what it brings along; where this machine has its own authority, so must the image.
        base = f"{BASE}-trusting"
        trusting = folder / "trusting"
        trusting.mkdir()
        shutil.copy(bundle, trusting / "bundle.crt")
        (trusting / "Dockerfile").write_text(f"FROM {BASE}\nCOPY bundle.crt /etc/ssl/certs/ca-certificates.crt\nENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt\n")
        docker("build", "-t", base, trusting)
    began = time.monotonic()
    context = context_of(program, folder)
    docker("build", "-f", context / "examples/deploy/Dockerfile", "--build-arg", f"BUILD_IMAGE={BASE}", "--build-arg", f"BASE_IMAGE={base}",
           "--build-arg", "PROGRAM=program", "--force-rm", "--target", "rdma", "-t", IMAGE, context, limit=900)
    size = int(docker("image", "inspect", "--format", "{{.Size}}", IMAGE)) / 1e6
    print(f"docker-rdma: built in {time.monotonic() - began:.0f} s: {size:.0f} MB", flush=True)


def start(name, address, *variables, command=("ray-node", "--num-cpus=1", "--verbose"), network):
    words = [word for variable in (f"VLLM_HOST_IP={address}", f"RAY_ADDRESS={HEAD}:6379", *variables) for word in ("--env", variable)]
    # The kernel's limit for /dev/shm, as `ipc: host` of the compose file has it.
    return docker("run", "--detach", "--label", f"gym={ID}", "--name", f"{ID}-{name}", "--network", network, "--ip", address, "--shm-size", "1g", *words, IMAGE, *command).strip()


def main():
    folder, network = pathlib.Path(tempfile.mkdtemp(prefix="gym-docker-rdma-")), f"{ID}-ray"
    status = 1
    try:
        build(sys.argv[1], folder)
        docker("network", "create", "--subnet", NETWORK, network)
        # The worker first: it waits.
        worker = start("worker", WORKER, "RAY_MODE=worker", "WORKER_NAME=worker", network=network)
        logs = lambda container: docker("logs", container, check=False)
        wait("the worker says that it waits", lambda: f"waiting for the Ray cluster at {HEAD}:6379 (" in logs(worker), 60)
        head = start("head", HEAD, "RAY_MODE=head", network=network)
        inside = lambda container, *command: docker("exec", container, *command, check=False)
        wait("Ray has both nodes", lambda: inside(head, "ray", "status", "--address", f"{HEAD}:6379").count("1 node_") == 2, 120)

        def serves():
            text = inside(head, "rgym", "workers", "--json")
            try:
                return [worker["name"] for worker in json.loads(text) if worker["state"] == "serving"] == ["worker"]
            except (ValueError, KeyError, TypeError):
                return False

        wait("the worker serves", serves, 60)
        doctor = json.loads(inside(worker, "rgym", "doctor", "--json"))
        usable = {row["transport"] for row in doctor["transports"] if row["usable"]}
        if not {"shm", "ucx_tcp", "http"} <= usable:
            raise Failed(f"UCX is not usable in the container: {json.dumps(doctor['transports'])}")
        tested = {row["over"]: row for row in doctor["self_test"]}
        if any(row["error"] for row in tested.values()):
            raise Failed(f"the self-test has failed: {json.dumps(doctor['self_test'])}")
        docker("stop", "--time", "20", worker)
        print(f"docker-rdma: two containers are a Ray cluster, a head and a worker; usable in the worker: {sorted(usable)}; "
              f"self-test in GB/s: {({name: round(row['gb_per_s'], 1) for name, row in tested.items()})}", flush=True)
        # The variables of rdma-worker.yaml where nothing of it is there.
        docker("rm", "--force", worker, check=False)
        wrong = start("wrong", WORKER, "RAY_MODE=worker", "NCCL_IB_HCA=mlx5_0", "NCCL_IB_TC=106", network=network)
        ended = docker("wait", wrong, limit=180).strip()
        if ended != "2" or "NCCL_IB_HCA" not in logs(wrong) or "fix:" not in logs(wrong):
            raise Failed(f"a card that is not there: the container ended with {ended}: {logs(wrong)[-2_000:]}")
        print("docker-rdma: with NCCL_IB_HCA=mlx5_0 and no card, the container ends with 2 and the fix", flush=True)
        status = 0
        print("docker-rdma: passed", flush=True)
    except (Failed, subprocess.TimeoutExpired) as failure:
        print(f"docker-rdma: {failure}", file=sys.stderr)
        for name in ("head", "worker", "wrong"):
            print(docker("logs", "--tail", "25", f"{ID}-{name}", check=False), file=sys.stderr)
    finally:
        containers = docker("ps", "--all", "--quiet", "--filter", f"label=gym={ID}", check=False).split()
        if containers:
            docker("rm", "--force", *containers, check=False)
        docker("network", "rm", network, check=False)
        for image in (IMAGE, f"{BASE}-trusting", BASE):
            docker("rmi", "--force", image, check=False)
        docker("image", "prune", "--force", check=False)
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
