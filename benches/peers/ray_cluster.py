"""Ray's own actors and tasks on a running cluster, for the benchmark `ray`: measures, and prints one JSON object.

    python ray_cluster.py ADDRESS DASHBOARD [--quick]

It must run on a node of the cluster. Actors take one CPU and one GPU each, four on each of two nodes, as the ranks of the benchmark.
"""

import argparse
import json
import os
import statistics
import sys
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
import ray
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RANKS, WINDOW, BATCH, ITEM_S = 8, 1000, 25, 200e-6
# A job that does nothing: an actor on each of two nodes, which answers once.
JOB = """
import time, ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

class Nothing:
    def answer(self):
        return None

ray.init(log_to_driver=False, logging_level="error")
group = placement_group([{"CPU": 4, "GPU": 4}] * 2, strategy="STRICT_SPREAD")
actors = [
    ray.remote(Nothing).options(num_cpus=4, num_gpus=4, scheduling_strategy=PlacementGroupSchedulingStrategy(group, node)).remote()
    for node in range(2)
]
ray.get([actor.answer.remote() for actor in actors])
print("answered at", time.time())
"""


class Rank:
    def ping(self, number):
        return number

    def ends(self, data):
        return data[0] + data[-1]

    def pid(self):
        return os.getpid()

    def end(self):
        os._exit(1)


def spin():
    """Takes the CPU time of one item."""
    end = time.thread_time() + ITEM_S
    while time.thread_time() < end:
        pass


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def verify(count):
    for _ in range(count):
        spin()
    return count


def start():
    """Starts the actors on a placement group, and waits until each has answered."""
    group = placement_group([{"CPU": 4, "GPU": 4}] * 2, strategy="STRICT_SPREAD")
    actors = []
    for rank in range(RANKS):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // 4)
        options = {"num_cpus": 1, "num_gpus": 1, "max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": strategy}
        actors.append(ray.remote(Rank).options(**options).remote())
    ray.get([actor.ping.remote(0) for actor in actors])
    return group, actors


def run_job(client):
    """Submits the job that does nothing. Returns the seconds until its actors have answered."""
    begin = time.time()
    job = client.submit_job(entrypoint='exec python -c "$JOB"', runtime_env={"env_vars": {"JOB": JOB}})
    while not (status := client.get_job_status(job)).is_terminal():
        time.sleep(0.1)
    log = client.get_job_logs(job)
    if status != JobStatus.SUCCEEDED:
        sys.exit(f"the job is {status}: {log}")
    return float(log.split("answered at")[1]) - begin


def median_of(count, action):
    times = []
    for number in range(count + max(2, count // 20)):
        begin = time.perf_counter()
        action()
        if number >= max(2, count // 20):
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def restart(actors):
    """Kills an actor's process, and waits until it answers again."""
    begin = time.perf_counter()
    actors[0].end.remote()
    before = time.perf_counter()
    while time.perf_counter() - before < 60:
        try:
            ray.get(actors[0].ping.remote(0), timeout=30)
            # The call may have come before the end.
            if time.perf_counter() - begin > 0.02 and ray.get(actors[0].pid.remote()) != restart.pid:
                return time.perf_counter() - begin
        except ray.exceptions.RayActorError:
            time.sleep(0.005)
    sys.exit("the actor did not restart within 60 s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("dashboard")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    ray.init(options.address, log_to_driver=False, logging_level="error")
    rounds, scale = (1, 0.1) if options.quick else (3, 1.0)

    starts = []
    for _ in range(rounds):
        begin = time.perf_counter()
        group, actors = start()
        starts.append(time.perf_counter() - begin)
        if len(starts) < rounds:
            remove_placement_group(group)
            time.sleep(1)
    figures = {"start_s": starts}
    call = median_of(int(2000 * scale), lambda: ray.get(actors[0].ping.remote(7)))
    rates = []
    for _ in range(rounds):
        begin, calls = time.perf_counter(), int(10 * scale) * WINDOW
        for _ in range(calls // WINDOW):
            ray.get([actors[number % RANKS].ping.remote(number) for number in range(WINDOW)])
        rates.append(calls / (time.perf_counter() - begin))
    data = bytes(64 << 20)
    payload = median_of(int(20 * scale) or 2, lambda: ray.get(actors[0].ends.remote(data)))
    restarts = []
    for _ in range(rounds):
        restart.pid = ray.get(actors[0].pid.remote())
        restarts.append(restart(actors))
    remove_placement_group(group)
    time.sleep(1)
    items, ones, batches = int(4000 * scale), [], []
    # The processes of the tasks run before the clock does.
    ray.get([verify.remote(1) for _ in range(200)])
    for _ in range(rounds):
        begin = time.perf_counter()
        ray.get([verify.remote(1) for _ in range(items)])
        ones.append(items / (time.perf_counter() - begin))
        begin = time.perf_counter()
        ray.get([verify.remote(BATCH) for _ in range(items // BATCH)])
        batches.append(items // BATCH * BATCH / (time.perf_counter() - begin))
    client = JobSubmissionClient(options.dashboard)
    figures["job_s"] = [run_job(client) for _ in range(rounds)]
    figures |= {
        "call_us": call * 1e6, "pipelined_8_per_s": rates, "payload_64mib_ms": payload * 1e3, "restart_s": restarts,
        "verify_per_s": ones, "verify_batch_per_s": batches,
    }
    print(json.dumps(figures))


main()
