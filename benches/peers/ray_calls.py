"""Ray's figures for the worker-call benchmark: starts a private single-node Ray, measures, prints one JSON object, stops it.

    python ray_calls.py [--quick]

Times in microseconds, rates per second. Needs `ray` and `numpy`; `.ci/ray-peer` makes such an environment.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
import numpy
import ray

WORKERS = 8
PIPELINE_WINDOW = 1000


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def latency(call, count):
    """p50 and p99 of `count` calls, one after the other."""
    for _ in range(max(2, count // 20)):
        call()
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return {"p50_us": percentile(times, 0.50), "p99_us": percentile(times, 0.99), "count": count}


def rate(call, count, rounds=3):
    """The median over rounds of calls a second when `call(n)` makes n of them."""
    rates = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call(count)
        rates.append(count / (time.perf_counter() - begin))
    return statistics.median(rates)


@ray.remote(num_cpus=0)
class Worker:
    def ping(self):
        return None

    def echo(self, value):
        return value

    def length(self, value):
        return len(value)

    def ends(self, value):
        return int(value[0]) + int(value[-1])


def windows(count):
    while count > 0:
        yield min(count, PIPELINE_WINDOW)
        count -= PIPELINE_WINDOW


def measure(quick):
    scale = 0.2 if quick else 1.0
    workers = [Worker.remote() for _ in range(WORKERS)]
    ray.get([worker.ping.remote() for worker in workers])
    first = workers[0]
    figures = {"call": latency(lambda: ray.get(first.ping.remote()), int(3000 * scale))}

    def pipelined(targets):
        def run(count):
            for window in windows(count):
                ray.get([targets[i % len(targets)].ping.remote() for i in range(window)])
        return run

    figures["pipelined_1_per_s"] = rate(pipelined([first]), int(5000 * scale))
    figures["pipelined_8_per_s"] = rate(pipelined(workers), int(8000 * scale))

    parts = [os.urandom(1024) for _ in workers]
    figures["fan_out_8"] = latency(
        lambda: ray.get([worker.length.remote(part) for worker, part in zip(workers, parts)]), int(400 * scale))

    for name, size, count in (("echo_1mib", 1 << 20, 200), ("echo_64mib", 64 << 20, 10)):
        value = numpy.random.randint(0, 255, size, dtype=numpy.uint8)
        figures[name] = latency(lambda: ray.get(first.echo.remote(value)), max(4, int(count * scale)))

    shards = numpy.array_split(numpy.zeros((256 if quick else 1024) << 20, dtype=numpy.uint8), WORKERS)
    begin = time.perf_counter()
    ray.get([worker.ends.remote(shard) for worker, shard in zip(workers, shards)])
    elapsed = time.perf_counter() - begin
    figures["shard_to_8"] = {"bytes": sum(shard.nbytes for shard in shards), "seconds": elapsed}
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the calls")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=3 << 30, _temp_dir=scratch,
                 log_to_driver=False, logging_level="ERROR")
        try:
            print(json.dumps(measure(arguments.quick)))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
