"""A real Prometheus scrapes a real cluster: a head, two workers, a node agent, and a collector.

    .ci/monitoring RGYM_EXAMPLES ON_NODES

- `/metrics` of every process passes `promtool check metrics`, and `/health` responds;
- the rules pass promtool, each alert has a unit test in which it fires, and two fire here too, at the rates of this test;
- every query of the dashboard returns data, or is in WITHOUT_DATA with its reason;
- every metric that a guide, an alert or the dashboard names moves while rollouts run, or is in WITHOUT_DATA;
- the command blocks of docs/monitoring.md run;
- one id is in the logs of all processes of a rollout, and OpenTelemetry's own package decodes the spans that they export.

The GPUs are those of an `nvidia-smi` that prints recorded figures.
"""

import http.server
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = ROOT / "examples/deploy/monitoring"
WAIT_S = 40

# Metrics without a sample here, and the reason. A query with one of them may be empty.
WITHOUT_DATA = {
    "gym_worker_": "metrics of a program with worker groups, which registers them itself",
    "gym_collective_": "metrics of ranks that meet, which a program with worker groups registers too",
    "gym_handler_stalls_total": "no handler blocks a thread",
    "gym_tool_errors_total": "counted once an agent has had a tool error",
    'status!="2xx"': "no request failed for a second or more",
    "gym:rollouts:per_minute_baseline": "needs five minutes of a collection; the unit test of the rules has them",
}

# Metrics that stay zero here, and the reason.
STAYS_ZERO = {
    "gym_sessions_open": "the environment `math` keeps no sessions",
}

NVIDIA_SMI = """#!/bin/sh
case $1 in
--query-gpu*) echo '0, GPU-8f2a, 61440, 81559, 94'; echo '1, GPU-91bc, 60000, 81559, 37' ;;
*) echo '1, 61440' ;;
esac
"""


def fail(text):
    sys.exit(f"monitoring: {text}")


def get(url, accept="*/*"):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait(what, holds):
    end = time.monotonic() + WAIT_S
    last = None
    while time.monotonic() < end:
        try:
            last = holds()
            if last:
                return last
        except (OSError, ValueError) as error:
            last = error
        time.sleep(0.1)
    fail(f"never came: {what} ({last})")


class Processes:
    """The processes of the test. Their logs are printed if it fails."""

    def __init__(self, folder, environment):
        self.folder, self.environment, self.running = folder, environment, {}

    def start(self, name, *command, **environment):
        log = open(self.folder / f"{name}.log", "w")
        self.running[name] = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=self.environment | environment
        )
        return self.running[name]

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def end(self, name):
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def end_all(self):
        for name in reversed(list(self.running)):
            self.end(name)


def promtool(*arguments, text=None):
    done = subprocess.run(["promtool", *map(str, arguments)], input=text, text=True, capture_output=True)
    return done.returncode, done.stdout + done.stderr


def check_metrics(name, url):
    page = get(url)
    status, said = promtool("check", "metrics", text=page)
    if status or said.strip():
        fail(f"promtool check metrics, {name}:\n{said}")
    # What Prometheus itself asks for.
    if not get(url, "application/openmetrics-text; version=1.0.0").rstrip().endswith("# EOF"):
        fail(f"{name}: no OpenMetrics")
    return page


def check_rules():
    for arguments in (["check", "rules", FILES / "rules.yml"], ["test", "rules", FILES / "rules_test.yml"],
                      ["check", "config", FILES / "prometheus.yml"]):
        status, said = promtool(*arguments)
        if status:
            fail(f"promtool {arguments[0]} {arguments[1]}:\n{said}")
    alerts = set(re.findall(r"- alert: (\w+)", (FILES / "rules.yml").read_text()))
    tests = re.split(r"(?=eval_time: )", (FILES / "rules_test.yml").read_text())
    fired = {re.search(r"alertname: (\w+)", test)[1] for test in tests if "exp_labels" in test}
    if alerts != fired:
        fail(f"alerts without a unit test in which they fire: {sorted(alerts - fired)}")
    print(f"monitoring: {len(alerts)} alerts, each fires in its unit test")


def queries():
    """The queries of the dashboard and of the rules, with the interval of this test."""
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "10s")


def start_prometheus(processes, folder, head, collector):
    """The files as they are, with the addresses and at the pace of this test."""
    config = (FILES / "prometheus.yml").read_text().replace("head:11000", head).replace("15s", "1s")
    (folder / "prometheus.yml").write_text(
        config + f"  - job_name: gym-collector\n    static_configs: [{{targets: ['{collector}'], labels: {{role: collector, process: pushing}}}}]\n"
    )
    rules = re.sub(r"(?m)^( +)for: \w+$", r"\1for: 0s", (FILES / "rules.yml").read_text())
    (folder / "rules.yml").write_text(rules)
    at = f"127.0.0.1:{free_port()}"
    processes.start("prometheus", "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
                    f"--web.listen-address={at}")
    return f"http://{at}/api/v1"


def ask(api, query):
    return json.loads(get(f"{api}/query?query={urllib.parse.quote(query)}"))["data"]["result"]


def check_queries(api):
    excused = 0
    for panel, query in queries():
        reason = next((why for part, why in WITHOUT_DATA.items() if part in query), None)
        if reason and not ask(api, query):
            excused += 1
            continue
        wait(f"data for `{query}` of the panel {panel}", lambda query=query: ask(api, query))
    print(f"monitoring: every query of the dashboard returns data, {excused} excepted for a written reason")


def check_moves(api):
    """Each metric that people are told of is more than zero at some time."""
    known = set(re.findall(r"`(gym_\w+)`", (ROOT / "docs/reference/metrics.md").read_text()))
    texts = [path.read_text() for path in [*(ROOT / "docs").glob("*.md"), *FILES.glob("*.json"), FILES / "rules.yml"]]
    named = {re.sub("_bucket$", "", name) for text in texts for name in re.findall(r"\bgym_\w+", text)} & known
    if len(named) < 20:
        fail(f"only {sorted(named)} are named")
    excused = {**WITHOUT_DATA, **STAYS_ZERO}
    moving = sorted(name for name in named if not any(part.startswith(name) or name.startswith(part) for part in excused))

    def still():
        series = {name: f"{name}_count" if name.endswith("_seconds") and ask(api, f"{name}_count") else name for name in moving}
        return [name for name in moving if not ask(api, f"max_over_time({series[name]}[10m]) > 0")]

    end, zero = time.monotonic() + WAIT_S, still()
    while zero and time.monotonic() < end:
        time.sleep(0.5)
        zero = still()
    if zero:
        fail(f"metrics that guides, alerts or the dashboard name stay zero: {zero}")
    print(f"monitoring: {len(moving)} metrics that guides, alerts and the dashboard name have moved")


def check_alert(api, name):
    firing = lambda: [alert for alert in json.loads(get(f"{api}/alerts"))["data"]["alerts"]
                      if alert["labels"]["alertname"] == name and alert["state"] == "firing"]
    alert = wait(f"the alert {name}", firing)[0]
    print(f"monitoring: {name} fires: {alert['annotations']['summary']}")


DECODE = """
import sys
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
for path in sys.argv[1:]:
    request = ExportTraceServiceRequest.FromString(open(path, 'rb').read())
    for resource in request.resource_spans:
        service = {a.key: a.value.string_value for a in resource.resource.attributes}['service.name']
        for scope in resource.scope_spans:
            for span in scope.spans:
                assert len(span.trace_id) == 16 and len(span.span_id) == 8, span
                assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano, span
                attributes = {a.key: a.value.string_value for a in span.attributes}
                print(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex() or '-', service, span.name,
                      attributes.get('server', '-'), attributes.get('attempt', '-').replace(' ', '_'))
"""


class SpanReceiver(http.server.BaseHTTPRequestHandler):
    """Keeps what is exported to it."""

    folder = None

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
            fail(f"an export to {self.path} as {self.headers['content-type']}")
        (self.folder / f"{time.monotonic_ns()}.spans").write_bytes(body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def check_traces(rgym, python):
    """A rollout whose servers are processes of their own: one id in all logs, from the task to the verification, and in the exported spans."""
    folder = pathlib.Path(tempfile.mkdtemp())
    receiver = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Receiver", (SpanReceiver,), {"folder": folder}))
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    processes = Processes(folder, dict(os.environ, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.server_port}"))
    logs = ["--log-format", "json", "-v"]
    config = ["--config", "examples/configs/quickstart.yaml", f"++head_server.port={port}"]
    servers = ["policy_model", "math", "math_simple_agent", "math_environment_server"]
    try:
        processes.start("head", rgym, "run", "--head-only", *config)
        wait("the head server", lambda: get(f"{url}/livez"))
        for name in servers:
            processes.start(name, rgym, "run", "--serve", name, "--head-url", url, *config, *logs, OTEL_SERVICE_NAME=name)
        wait("the servers", lambda: len(json.loads(get(f"{url}/server_instances"))) == len(servers))
        collecting = processes.start("collector", rgym, "collect", "--head-url", url, "--agent", "math_simple_agent", "--input",
                                     "examples/data/math.jsonl", "--limit", 5, "--output", folder / "out.jsonl", *logs, OTEL_SERVICE_NAME="collector")
        if collecting.wait(WAIT_S):
            fail(f"the collection ended with {collecting.returncode}: {processes.log('collector')}")
        for name in reversed(servers):
            processes.end(name)
        check_logs(processes)
        check_spans(folder, python)
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"── {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
        raise
    finally:
        processes.end_all()
        receiver.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def check_logs(processes):
    """Each attempt of the collector is found in the log of every server, under its id, with the routes of an episode."""
    def lines(name):
        for line in processes.log(name).splitlines():
            if line.startswith("{"):
                yield json.loads(line)

    attempts = {line["span"]["trace_id"] for line in lines("collector") if line["fields"].get("message") == "an attempt ended"}
    if len(attempts) != 5:
        fail(f"{len(attempts)} attempts in the log of the collector instead of 5")
    for name, routes in [("math_simple_agent", {"/run"}), ("policy_model", {"/v1/responses"}), ("math", {"/seed_session", "/verify"})]:
        found = {}
        for line in lines(name):
            if line["fields"].get("message") == "a call ended" and "span" in line:
                found.setdefault(line["span"]["trace_id"], set()).add(line["span"]["route"])
        for attempt in attempts:
            if not routes <= found.get(attempt, set()):
                fail(f"attempt {attempt} in the log of {name}: {found.get(attempt)} instead of {routes}")
    print("monitoring: one id is in the logs of collector, agent, model and resources, for each of 5 rollouts in 5 processes")


def check_spans(folder, python):
    files = sorted(folder.glob("*.spans"))
    done = subprocess.run([python, "-c", DECODE, *map(str, files)], text=True, capture_output=True)
    if done.returncode:
        fail(f"OpenTelemetry's package does not decode the export: {done.stderr}")
    spans = [line.split() for line in done.stdout.splitlines()]
    ids = {(trace, span): service for trace, span, _, service, *_ in spans}
    roots = [span for span in spans if span[2] == "-"]
    if len(roots) != 5 or {span[3] for span in roots} != {"collector"} or len(ids) != len(spans):
        fail(f"{len(roots)} first spans, {len(ids)} ids of {len(spans)} spans:\n{done.stdout}")
    for trace, span, parent, service, name, *_ in spans:
        expected = {"collector": None, "math_environment_server": "collector", "math_simple_agent": "math_environment_server"}.get(service, "math_simple_agent")
        if expected and ids.get((trace, parent)) != expected:
            fail(f"the span {name} of {service} has the parent {parent}, which is none of {expected}:\n{done.stdout}")
    print(f"monitoring: OpenTelemetry's package decodes {len(spans)} spans of 5 rollouts; each has the caller as its parent")


def main():
    rgym, on_nodes = (str(pathlib.Path(program).resolve()) for program in sys.argv[1:3])
    check_rules()
    check_traces(rgym, sys.argv[3])
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "nvidia-smi").write_text(NVIDIA_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    port = free_port()
    head, url = f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"
    environment = dict(os.environ, GYM_JOIN_SECRET="monitoring")
    environment.pop("HEAD_SERVER_URL", None)
    processes = Processes(folder, environment)
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": f"{folder}:{environment['PATH']}"}
    config = ["--config", "examples/configs/quickstart.yaml"]
    pushing = f"127.0.0.1:{free_port()}"
    collect = ["collect", "--head-url", url, "--agent", "math_simple_agent", "--input", "examples/data/math.jsonl", "--concurrency", 12, "--limit", 100,
               "--num-repeats", 100, "--progress", "none"]
    slow = "++policy_model.responses_api_models.scripted_model.latency_ms=[20,60]"
    passed = False
    try:
        processes.start("head", rgym, "run", "--head-only", *config, f"++head_server.port={port}", "--expected-workers", 4)
        wait("the head server", lambda: get(f"{url}/livez"))
        for name in ("worker-1", "worker-2"):
            processes.start(name, rgym, "run", "--worker", *config, slow, "--head-url", url, "--name", name, "--metrics-port", 0, "--pull-capacity", 3,
                            "--heartbeat-interval", 1, "--worker-timeout", 10, "--checks", "off", **gpus)
        processes.start("node", on_nodes, "node", "node-1", "--host", "127.0.0.1", **gpus, HEAD_SERVER_URL=url)
        api = start_prometheus(processes, folder, head, pushing)
        serving = lambda: [m for m in json.loads(get(f"{url}/cluster/members")) if m["state"] == "serving"]
        wait("two workers and a node", lambda: len(serving()) == 3)
        processes.start("pulled", rgym, *collect, "--output", folder / "pulled.jsonl")
        processes.start("pushing", rgym, *collect, "--output", folder / "pushed.jsonl", "--dispatch", "push",
                        "--metrics-port", pushing.rsplit(":", 1)[1])
        listed = lambda: json.loads(get(f"{url}/cluster/targets"))
        targets = wait("four processes in the list of the head server", lambda: listed() if len(listed()) == 4 else None)
        found = {group["labels"]["process"]: group["targets"][0] for group in targets}
        scraped = dict(found, head=head, pushing=pushing,
                       **{f"{name}'s own port": re.search(r"metrics at http://(\S+)/metrics", processes.log(name))[1]
                          for name in ("worker-1", "worker-2")})
        for name, address in scraped.items():
            wait(f"the metrics of {name}", lambda address=address: get(f"http://{address}/metrics"))
            check_metrics(name, f"http://{address}/metrics")
            # A head server that waits for workers says so with 503.
            if name != "head":
                get(f"http://{address}/health")
        print(f"monitoring: promtool accepts the metrics of {', '.join(sorted(scraped))}")
        wait("targets that are up", lambda: len(ask(api, "up == 1")) == 6)
        check_queries(api)
        check_moves(api)
        check_alert(api, "GymWorkersMissing")
        check_alert(api, "GymGpuUnderused")
        check_guide(folder, rgym, url, head, found["worker-1"])
        passed = True
    finally:
        processes.end_all()
        if not passed:
            for log in sorted(folder.glob("*.log")):
                print(f"── {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
    print("monitoring: passed")


def check_guide(folder, rgym, url, head, worker):
    """Runs the marked commands of the guide, with the addresses of this test."""
    guide = (ROOT / "docs/monitoring.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", guide, re.S)
    ran = 0
    for block in blocks:
        for line in block.strip().splitlines():
            if not line.startswith(("curl ", "promtool ")):
                continue
            line = line.replace("http://head:11000", url).replace("http://worker-1:8080", f"http://{worker}")
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=ROOT, text=True, capture_output=True)
            if done.returncode:
                fail(f"docs/monitoring.md, `{line}` ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr}")
            ran += 1
    if ran < 5:
        fail(f"only {ran} commands of docs/monitoring.md were found")
    print(f"monitoring: {ran} commands of docs/monitoring.md run")


main()
