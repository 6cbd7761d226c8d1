"""Rollouts over real engines, whose model is the committed tests/engines/tiny.gguf.

    python .ci/engines.py PROGRAM [--vllm] [--only CASE…]

The interpreter has `xllamacpp`; with --vllm it has vLLM, and the cases are those that need vLLM. Each case prints one line with its counts.
It ends with 1 if a case fails, after the other cases. All processes end with it, and all ports are free ones.
"""

import argparse
import collections
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from cluster import Failed

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENGINES = ROOT / "tests/engines"
sys.path.insert(0, str(ENGINES))
import from_gguf  # noqa: E402

MODEL = ENGINES / "tiny.gguf"
CONFIG = ROOT / "examples/configs/quickstart.yaml"
CONTEXT = 4_096
# The token that ends a turn.
END = 2
# A collection takes seconds; this ends one that hangs.
LIMIT = 180


def wait(what, ready, limit=30):
    """Waits for a condition, which only a poll can show, and returns its value."""
    began = time.monotonic()
    while not (value := ready()):
        if time.monotonic() - began > limit:
            raise Failed(f"{what}: not within {limit} s")
        time.sleep(0.05)
    return value


def expect(what, found, expected):
    if found != expected:
        raise Failed(f"{what}: {found}, not {expected}")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def request(url, body=None, method=None, limit=60):
    """Returns the status and the parsed body of a response."""
    content = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(url, content, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=limit) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode(errors="replace")


def tail(path, size=2_500):
    return path.read_text(errors="replace")[-size:] if path.exists() else ""


# ── the parts of a case: engines, a recording proxy, collections ──


class Process:
    """A child process with a log. `Tier` kills those that still run at the end of a case."""

    def __init__(self, log):
        self.log, self.child = log, None

    def spawn(self, *command, **options):
        with open(self.log, "ab") as log:
            # The standard input closes when this program ends, however it ends. The group has the children of the process.
            self.child = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                                          start_new_session=True, **options)

    def runs(self):
        return self.child is not None and self.child.poll() is None

    def kill(self):
        if self.runs():
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait(10)


class Engine(Process):
    """An engine at a port of its own, which it keeps when it starts again."""

    start_limit = None

    def __init__(self, log, context=CONTEXT):
        super().__init__(log)
        self.context, self.port = context, free_port()
        self.origin = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.origin}/v1"

    def start(self):
        self.launch()
        wait(f"the engine at {self.origin} serves", self.serves, self.start_limit)
        return self

    def serves(self):
        if not self.runs():
            raise Failed(f"the engine has ended: {tail(self.log)}")
        try:
            return request(f"{self.origin}/health", limit=5)[0] == 200
        except OSError:
            return False

    def freeze(self):
        self.child.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.child.send_signal(signal.SIGCONT)

    def prompt_of(self, row, tokens):
        """A row whose prompt has so many tokens, by the engine's own count."""
        row = json.loads(json.dumps(row))
        first, last = row["responses_create_params"]["input"]

        def count(words):
            last["content"] = "x" + " Bring" * words
            body = {"model": "tiny", "messages": [first, last], "max_tokens": 1}
            status, answer = request(f"{self.url}/chat/completions", body)
            return answer["usage"]["prompt_tokens"] if status == 200 else None

        # A word is a token.
        words = tokens - count(0)
        found = count(words)
        if found not in (tokens, None) or (tokens < self.context and found is None):
            raise Failed(f"a prompt of {tokens} tokens has {found}")
        return row


class Llama(Engine):
    """The server of llama.cpp: it answers as many requests at a time as it has slots, each with a context of its own."""

    start_limit = 30

    def launch(self):
        self.spawn(sys.executable, ENGINES / "llama_server.py", MODEL, self.port, "--context", self.context, "--slots", 16)


class Vllm(Engine):
    """A vLLM for CPUs, with the routes that an update of the weights uses."""

    # Three processes import torch, one after the other.
    start_limit = 600

    def launch(self):
        folder = self.log.parent / "model"
        subprocess.run([sys.executable, ENGINES / "from_gguf.py", MODEL, folder], check=True)
        environment = {
            **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.spawn(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "tiny",
                   "--host", "127.0.0.1", "--port", self.port, "--dtype", "float32", "--max-model-len", self.context, "--max-num-seqs", 64,
                   "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", env=environment)

    def metrics(self, name):
        """The values of a metric, by their labels."""
        found = {}
        for line in request(f"{self.origin}/metrics")[1].splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                labels, value = line.removeprefix(name).rsplit(" ", 1)
                found[labels] = float(value)
        return found

    def running(self):
        return sum(self.metrics("vllm:num_requests_running").values())

    def ends(self):
        """The numbers of requests that have ended, by their finish reasons."""
        return collections.Counter({labels.split('finished_reason="')[1].split('"')[0]: int(value)
                                    for labels, value in self.metrics("vllm:request_success_total").items()})

    def abort(self):
        """Aborts what runs, as an update of the weights does, and goes on a second later."""
        expect("POST /pause", request(f"{self.origin}/pause?mode=abort", {})[0], 200)
        time.sleep(1)
        expect("POST /resume", request(f"{self.origin}/resume", {})[0], 200)


class Proxy:
    """A proxy before an engine: it records what the engine has used, and answers what the client has asked for."""

    def __init__(self, engine):
        self.engine, self.calls, self.lock = engine, [], threading.Lock()

    def __enter__(self):
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            do_GET = do_POST = lambda handler: proxy.forward(handler)
            log_message = lambda *_: None

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 1_024

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def forward(self, handler):
        content = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        body = json.loads(content) if content else None
        asks = handler.path.endswith("/chat/completions") and not body.get("return_token_ids")
        status, answer = request(self.engine.origin + handler.path, {**body, "return_token_ids": True} if asks else body, handler.command)
        # The trial calls at the start are no turns.
        if content is None or not content.strip() or body.get("max_tokens") != 1:
            with self.lock:
                self.calls.append((handler.path, status, json.loads(json.dumps(answer))))
        if asks and status == 200:
            answer.pop("prompt_token_ids", None)
            for choice in answer["choices"]:
                choice.pop("token_ids", None)
        text = (json.dumps(answer) if isinstance(answer, (dict, list)) else answer).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(text)))
        handler.end_headers()
        try:
            handler.wfile.write(text)
        except BrokenPipeError:
            pass  # The client has given up, as for a collection that ends.

    def turns(self):
        """The ids and log probabilities of every chat completion, as the engine used them."""
        found = collections.Counter()
        for path, status, answer in self.calls:
            if path.endswith("/chat/completions") and status == 200:
                choice = answer["choices"][0]
                chances = [token["logprob"] for token in choice["logprobs"]["content"]]
                found[tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"]), tuple(chances)] += 1
        return found

    def finish_reasons(self):
        return collections.Counter(answer["choices"][0]["finish_reason"] for path, status, answer in self.calls
                                   if path.endswith("/chat/completions") and status == 200)

    def count(self, path):
        return sum(called.endswith(path) for called, _, _ in self.calls)


class Collection(Process):
    """A collection in a process of its own, over a block of the configuration for the model."""

    def __init__(self, tier, name, kind, block, rows, *options):
        super().__init__(tier.folder / f"{name}.log")
        self.name, self.output = name, tier.folder / f"{name}.jsonl"
        model, rows_file = tier.folder / f"{name}.yaml", tier.folder / f"{name}-rows.jsonl"
        # JSON is YAML.
        model.write_text(json.dumps({"policy_model": {"responses_api_models": {kind: {"entrypoint": "app.py", **block}}}}))
        rows_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tier.processes.append(self)
        self.spawn(tier.program, "collect", "--config", CONFIG, "--config", model, "~policy_model.responses_api_models.scripted_model",
                   "+head_server.port=0", "--input", rows_file, "--output", self.output, "--progress", "plain", *options, cwd=ROOT)

    def recorded(self):
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def until(self, rows):
        """Waits until so many rollouts are recorded, and returns how many are."""
        def ready():
            if not self.runs():
                raise Failed(f"{self.name} ended before {rows} rows: {tail(self.log)}")
            return self.recorded() >= rows
        wait(f"{self.name}: {rows} rows", ready, LIMIT)
        return self.recorded()

    def says(self, *parts):
        """Returns the first line of its output with all parts."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return next((line for line in lines if all(part in line for part in parts)), None)

    def end(self, status=0):
        try:
            ended = self.child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} did not end in {LIMIT} s: {tail(self.log)}") from None
        if ended != status:
            raise Failed(f"{self.name} ended with {ended}, not {status}: {tail(self.log)}")
        return self

    def lines(self, path):
        with open(path) as file:
            return [json.loads(line) for line in file]

    def rows(self):
        return self.lines(self.output)

    def failures(self):
        path = self.output.with_name(f"{self.name}_failures.jsonl")
        return self.lines(path) if path.exists() else []

    def complete(self, rollouts):
        """Every rollout is recorded once, in its first attempt, and none failed."""
        self.end()
        rows = self.rows()
        expect(f"{self.name}: failed attempts", collections.Counter(row["_ng_failure_class"] for row in self.failures()), collections.Counter())
        expect(f"{self.name}: recorded rollouts", len(rows), rollouts)
        expect(f"{self.name}: different rollouts", len({key(row) for row in rows}), rollouts)
        expect(f"{self.name}: attempts", {row["_gym_episode"]["attempts"] for row in rows}, {1})
        return rows


def key(row):
    return row["_ng_task_index"], row["_ng_rollout_index"]


def items(row, *types):
    return [item for item in row["response"]["output"] if item["type"] in types]


def texts(row):
    """What the model wrote, without identifiers."""
    return json.dumps([item.get("arguments") or item.get("content") for item in items(row, "message", "function_call")])


def truncated(rows):
    return collections.Counter(str(row["_gym_episode"]["truncated"]) for row in rows)


class Tier:
    """What the cases share: the program, a folder, an engine that no case disturbs, and the processes to be killed."""

    def __init__(self, program, folder, engine_class):
        self.program, self.folder, self.engine_class = program, folder, engine_class
        self.processes, self.shared, self.engines = [], None, 0

    def new_engine(self, **options):
        self.engines += 1
        engine = self.engine_class(self.folder / f"engine-{self.engines}.log", **options)
        self.processes.append(engine)
        return engine

    def engine(self):
        if self.shared is None:
            try:
                self.shared = self.new_engine().start()
            except Failed as failure:
                # No other case could run either.
                raise SystemExit(str(failure)) from failure
        return self.shared

    def end_case(self):
        """Kills what a case has left."""
        for process in self.processes:
            if process is not self.shared:
                process.kill()
        self.processes = [process for process in self.processes if process is self.shared]

    def collect(self, name, kind, block, rows, *options):
        return Collection(self, name, kind, block, rows, *options)

    def data(self, name, rows):
        with open(ROOT / f"examples/data/{name}.jsonl") as file:
            return [json.loads(line) for line, _ in zip(file, range(rows))]


def over_chat(*engines, **more):
    urls = [engine.url for engine in engines]
    return "vllm_model", {"base_url": urls if len(urls) > 1 else urls[0], "api_key": "none", "model": "tiny", **more}


def over_responses(engine, **more):
    return "openai_model", {"openai_base_url": engine.url, "openai_api_key": "none", "openai_model": "tiny", **more}


DIALECTS = {"chat": over_chat, "responses": over_responses}


def of_agent(name, option, value):
    return f"++{name}_simple_agent.responses_api_agents.simple_agent.{option}={value}"


# ── the cases of `engines` ──


def tools(tier):
    """Tools over several turns, in both dialects."""
    counts = []
    for dialect, over in DIALECTS.items():
        run = tier.collect(f"tools-{dialect}", *over(tier.engine()), tier.data("warehouse", 24), of_agent("warehouse", "max_steps", 6))
        rows = run.complete(24)
        calls, outputs = (sum(len(items(row, kind)) for row in rows) for kind in ("function_call", "function_call_output"))
        expect("tool calls of the episodes", sum(row["_gym_episode"]["tool_calls"] for row in rows), calls)
        expect("rollouts without a tool call", [key(row) for row in rows if not items(row, "function_call")], [])
        turns = sum(row["_gym_episode"]["turns"] for row in rows)
        if turns < 2 * len(rows):
            raise Failed(f"{turns} turns of {len(rows)} rollouts")
        counts.append(f"{dialect} {len(rows)} of 24 rollouts, {turns} turns, {calls} tool calls, {outputs} outputs")
    return "; ".join(counts)


def in_both_dialects(tier, name, engine, **more):
    """Starts a collection in each dialect over one engine, and waits until they have some rows."""
    runs = [tier.collect(f"{name}-{dialect}", *over(engine, **more), tier.data("warehouse", 24), of_agent("warehouse", "max_steps", 6))
            for dialect, over in DIALECTS.items()]
    wait(f"{name}: 6 rows", lambda: sum(run.recorded() for run in runs) >= 6, LIMIT)
    return runs


def rows_of(runs):
    """The recorded rows of collections of 24 rollouts, none of which has ended."""
    found = [run.recorded() for run in runs]
    if max(found) >= 24:
        raise Failed(f"a collection ended too early: {found} rows")
    return found


def killed(tier):
    """The only engine is killed during two collections, and starts again seconds later."""
    engine = tier.new_engine().start()
    runs = in_both_dialects(tier, "killed", engine, retry_backoff_max_ms=1_000)
    engine.kill()
    time.sleep(3)
    before = rows_of(runs)
    engine.start()
    for run in runs:
        run.complete(24)
    return f"chat and responses, 24 of 24 rollouts each, started again at rows {before}, after 3 s"


def two_engines(tier):
    """One of two engines behind a model server is killed, and does not return."""
    engines = [tier.new_engine().start() for _ in range(2)]
    run = tier.collect("two-engines", *over_chat(*engines), tier.data("warehouse", 24), "--num-repeats", 2, of_agent("warehouse", "max_steps", 6))
    run.until(8)
    calls = [connected(engine.port) for engine in engines]
    engines[0].kill()
    before = run.recorded()
    run.complete(48)
    if before >= 48 or not all(calls):
        raise Failed(f"killed at row {before}, with {calls} connections to the engines")
    return f"48 of 48 rollouts, one engine killed at row {before}, with {calls} connections to the two"


def overflow(tier):
    """Prompts one token below, at and above the context."""
    row = tier.data("choice", 1)[0]
    lengths = (CONTEXT - 1, CONTEXT, CONTEXT + 1)
    rows = [tier.engine().prompt_of(row, length) for length in lengths]
    counts = []
    for dialect, over in DIALECTS.items():
        found = sorted(tier.collect(f"overflow-{dialect}", *over(tier.engine()), rows).complete(3), key=key)
        reasons = [row["_gym_episode"]["truncated"] for row in found]
        if None in reasons:
            raise Failed(f"{dialect}: truncated at {lengths}: {reasons}")
        counts.append(f"{dialect} {reasons}")
    return f"3 of 3 rollouts truncated with {lengths} tokens: " + "; ".join(counts)


def cut(tier):
    """Answers that the limit of tokens cuts off are refused, if that is asked for."""
    counts = []
    for dialect, over in DIALECTS.items():
        # Without an end of its own, every answer reaches the limit.
        block = over(tier.engine(), extra_body={"ignore_eos": True})
        run = tier.collect(f"cut-{dialect}", *block, tier.data("choice", 8), "--max-output-tokens", 5, "--truncated", "fail", "--attempts", 1).end(3)
        expect(f"{dialect}: recorded rollouts", len(run.rows()), 0)
        expect(f"{dialect}: failed rollouts", collections.Counter(row["_ng_failure_class"] for row in run.failures()), {"truncated": 8})
        kept = tier.collect(f"cut-kept-{dialect}", *block, tier.data("choice", 8), "--max-output-tokens", 5).complete(8)
        expect(f"{dialect}: truncated", truncated(kept), {"max_output_tokens": 8})
        counts.append(f"{dialect} 8 of 8 refused, and truncated without the option")
    return "; ".join(counts)


def long_tool_call(tier):
    """Tool calls that the context cuts off are answers of the model, not failures of the engine."""
    # With a small context, and a preference for the digit 0, many calls have an expression without an end.
    engine, counts = tier.new_engine(context=320).start(), []
    for dialect, over in DIALECTS.items():
        block = over(engine, extra_body={"logit_bias": {str(token_id("0")): 2}})
        run = tier.collect(f"long-tool-call-{dialect}", *block, tier.data("math", 24), "--num-repeats", 4, of_agent("math", "max_steps", 4))
        rows = run.complete(96)
        is_cut = lambda row: row["_gym_episode"]["truncated"] == "max_output_tokens"
        in_call = [row for row in rows if is_cut(row) and row["response"]["output"][-1]["type"] == "function_call"]
        if not in_call:
            raise Failed(f"{dialect}: no tool call was cut off: {truncated(rows)}")
        counts.append(f"{dialect} 96 of 96 rollouts, {len(in_call)} calls cut off, truncated {dict(truncated(rows))}")
    return "; ".join(counts)


def token_id(text):
    """The id of a token of the model."""
    metadata, _ = from_gguf.read(MODEL)
    return metadata["tokenizer.ggml.tokens"].index(text)


def late_start(tier):
    """The engine starts six seconds after the collection."""
    engine = tier.new_engine()
    run = tier.collect("late-start", *over_chat(engine), tier.data("choice", 16))
    time.sleep(6)
    expect("rows before the engine starts", run.recorded(), 0)
    named = wait("the collection names the endpoint", lambda: run.says(engine.url, "unavailable"), 5)
    engine.start()
    run.complete(16)
    return f"16 of 16 rollouts, engine started after 6 s, meanwhile: {named.strip()[:110]}"


def in_flight(tier):
    """Many more requests than the engine answers at a time."""
    engine = tier.engine()
    run = tier.collect("in-flight", *over_chat(engine), tier.data("choice", 240), "--num-repeats", 2, "--concurrency", 256)
    wait("the first requests", lambda: connected(engine.port) >= 8)
    # Until all are in flight, none is answered.
    engine.freeze()
    try:
        wait("256 connections at a time", lambda: connected(engine.port) >= 256)
        connections = connected(engine.port)
    finally:
        engine.thaw()
    run.complete(480)
    return f"480 of 480 rollouts, {connections} connections at a time"


def connected(port):
    """The number of established connections to a port, as their clients see them."""
    suffix = f":{port:04X}"
    lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(1 for _, _, remote, state, *_ in map(str.split, lines) if remote.endswith(suffix) and state == "01")


def seeds(tier):
    """The same seeds give the same texts, and other seeds other ones."""
    counts = []
    for dialect, over in DIALECTS.items():
        # One at a time: the sums of a batch depend on what else is in it.
        options = ["--num-repeats", 6, "--add-seed", "--concurrency", 1, "--max-output-tokens", 40, of_agent("math", "max_steps", 1)]
        runs = [tier.collect(f"seeds-{dialect}-{number}", *over(tier.engine()), tier.data("math", 4), *options).complete(24) for number in (1, 2)]
        first, second = ({key(row): texts(row) for row in rows} for rows in runs)
        expect(f"{dialect}: equal in two runs with the same seeds", sum(first[one] == second[one] for one in first), 24)
        distinct = len({(task, text) for (task, _), text in first.items()})
        if distinct <= 4:
            raise Failed(f"{dialect}: the seeds have no effect: {distinct} different texts of 4 tasks")
        counts.append(f"{dialect} 24 of 24 equal in two runs, {distinct} different texts")
    return "; ".join(counts)


def frozen(tier):
    """An engine that accepts requests and never answers is named, with the age of the oldest call. A busy one answers GET /models."""
    engine = tier.new_engine().start()
    runs = in_both_dialects(tier, "frozen", engine, probe_after_seconds=5)
    engine.freeze()
    try:
        before, began = rows_of(runs), time.monotonic()
        # An earlier request to GET /models may have been answered, and the next one follows ten seconds later.
        parts = [f"{engine.url} has ", "without a response", "no response to GET /models"]
        lines = [wait(f"{run.name} names the engine", lambda: run.says(*parts), 40) for run in runs]
        seconds = time.monotonic() - began
    finally:
        engine.thaw()
    ages = [int(re.search(r"without a response\D*(\d+) s", line)[1]) for line in lines]
    if min(ages) < 5:
        raise Failed(f"no age of at least 5 s: {lines}")
    for run in runs:
        run.complete(24)
    return (f"chat and responses, 24 of 24 rollouts each, frozen at rows {before}, named after {seconds:.0f} s "
            f"with ages of {' and '.join(map(str, ages))} s")


LLAMA_CASES = {
    "tools": tools, "killed": killed, "two-engines": two_engines, "overflow": overflow, "cut": cut, "long-tool-call": long_tool_call,
    "late-start": late_start, "in-flight": in_flight, "seeds": seeds, "frozen": frozen,
}


# ── the cases of `engines-vllm` ──


def turns_of(rows):
    """The ids and log probabilities of every turn, as they are recorded."""
    found = collections.Counter()
    for row in rows:
        turns = [item for item in row["response"]["output"] if "generation_token_ids" in item]
        expect(f"{key(row)}: turns with ids", len(turns), row["_gym_episode"]["turns"])
        for item in turns:
            found[tuple(item["prompt_token_ids"]), tuple(item["generation_token_ids"]), tuple(item["generation_log_probs"])] += 1
    return found


def recorded_as_used(tier, name, rows, *options, **block):
    """Compares the turns of a collection with those of the engine, for both ways to the ids. Returns the turns, and text for the result."""
    counts = []
    for in_answer in (True, False):
        with Proxy(tier.engine()) as proxy:
            keys = {"return_token_id_information": True, "request_prompt_and_generation_token_ids": in_answer, **block}
            run = tier.collect(f"{name}-{'answer' if in_answer else 'tokenize'}", *over_chat(proxy, **keys), rows, *options)
            recorded, used = turns_of(run.complete(len(rows))), proxy.turns()
            wrong = recorded - used
            if wrong or used - recorded:
                example = next(((len(ids), len(written)) for ids, written, _ in wrong), None)
                raise Failed(f"{run.name}: {wrong.total()} of {recorded.total()} turns are not those of the engine, which had {used.total()}; "
                             f"the first has (prompt, generation) ids {example}, those of the engine {[(len(a), len(b)) for a, b, _ in used][:3]}")
            counts.append(f"{recorded.total()} of {used.total()} turns equal with ids "
                          + ("in the answer" if in_answer else f"by {proxy.count('/tokenize')} calls of /tokenize"))
    return recorded, ", ".join(counts)


def token_ids(tier):
    """Ids and log probabilities of every turn, with tools, are those that the engine has used."""
    turns, counts = recorded_as_used(tier, "token-ids", tier.data("warehouse", 24), of_agent("warehouse", "max_steps", 6))
    expect("turns without the token that ends them", sum(generation[-1] != END for _, generation, _ in turns), 0)
    return counts


def log_probabilities(tier):
    """The log probabilities of generated tokens are those that the engine computes for the same tokens as a prompt."""
    block = over_chat(tier.engine(), return_token_id_information=True)
    rows = tier.collect("log-probabilities", *block, tier.data("warehouse", 8), of_agent("warehouse", "max_steps", 4)).complete(8)
    values, difference = 0, 0.0
    for prompt, generation, chances in turns_of(rows):
        body = {"model": "tiny", "prompt": [*prompt, *generation], "max_tokens": 1, "prompt_logprobs": 0}
        status, answer = request(f"{tier.engine().url}/completions", body)
        expect("POST /completions", status, 200)
        computed = answer["choices"][0]["prompt_logprobs"][len(prompt):]
        for token, chance, position in zip(generation, chances, computed, strict=True):
            difference, values = max(difference, abs(position[str(token)]["logprob"] - chance)), values + 1
    if difference > 1e-3 or not values:
        raise Failed(f"{values} log probabilities differ by up to {difference}")
    return f"{values} log probabilities, the largest difference is {difference:.2g}"


def abort_chat(tier):
    """Three updates of the weights abort what runs; each aborted turn is requested again."""
    engine = tier.engine()
    before = engine.ends()
    with Proxy(engine) as proxy:
        block = over_chat(proxy, return_token_id_information=True, retry_backoff_max_ms=1_000)
        run = tier.collect("abort-chat", *block, tier.data("warehouse", 240), "--num-repeats", 2, of_agent("warehouse", "max_steps", 6))
        moments = []
        for part in (60, 180, 300):
            moments.append(run.until(part))
            wait("requests run", lambda: engine.running() >= 16, 20)
            engine.abort()
        rows = run.complete(480)
    turns = turns_of(rows)
    expect("turns that the engine has not generated", (turns - proxy.turns()).total(), 0)
    ends, answers = engine.ends() - before, proxy.finish_reasons()
    if not ends["abort"]:
        raise Failed("nothing was aborted")
    reasons = collections.Counter(turn.get("finish_reason") for row in rows for turn in row["response"]["_gym_turns"])
    expect("finish reasons", set(reasons) - {"stop", "tool_calls"}, set())
    expect("truncated", set(truncated(rows)) - {"None", "max_steps"}, set())
    # vLLM calls an aborted answer `tool_calls` if it has a complete call: only the token that ends the turn is missing.
    expect("turns without their end", sum(generation[-1] != END for _, generation, _ in turns.elements()), 0)
    hidden = ends["abort"] - answers["abort"]
    return (f"480 of 480 rollouts, none failed, none cut, paused at rows {moments}: {ends['abort']} requests aborted, "
            f"of which {hidden} said `tool_calls`, and all were requested again")


def abort_responses(tier):
    """The same over the Responses dialect, where vLLM calls an aborted answer complete: none is recorded as a complete one."""
    engine, tokens = tier.engine(), 300
    before = engine.ends()
    # Every answer that is not aborted has all tokens.
    block = over_responses(engine, retry_backoff_max_ms=1_000, extra_body={"ignore_eos": True})
    run = tier.collect("abort-responses", *block, tier.data("choice", 48), "--num-repeats", 4, "--max-output-tokens", tokens, "--attempts", 1,
                       "--concurrency", 80)
    for _ in range(3):
        wait("requests run", lambda: engine.running() >= 16 or not run.runs(), 30)
        time.sleep(0.5)
        engine.abort()
    status, rows, failures = run.child.wait(LIMIT), run.rows(), run.failures()
    ends = engine.ends() - before
    if not ends["abort"]:
        raise Failed("nothing was aborted")
    expect("recorded and failed rollouts", len(rows) + len(failures), 192)
    is_short = lambda row: row["response"]["usage"]["output_tokens"] < tokens
    is_marked = lambda row: row["_gym_episode"].get("completion_unverified", False)
    faked = [row for row in rows if is_short(row) and not is_marked(row)]
    failed = dict(collections.Counter(row["_ng_failure_class"] for row in failures))
    counts = (f"{len(rows)} of 192 rollouts recorded, failed {failed}, {sum(map(is_short, rows))} cut, {sum(map(is_marked, rows))} unverified; "
              f"{ends['abort']} requests aborted, {ends.total() - len(rows) - len(failures)} requested again")
    if faked:
        raise Failed(f"{len(faked)} answers that were cut by an abort are recorded as complete; {counts}")
    # The engine counts what it aborts, so every answer is checked.
    expect(f"unverified ({counts})", sum(map(is_marked, rows)), 0)
    expect(f"the status ({counts})", status, 0)
    return counts


def continue_final(tier):
    """A message of the assistant that the model continues: the ids are those of the prompt that the engine has used."""
    rows = tier.data("choice", 8)
    for row in rows:
        row["responses_create_params"]["input"].append({"role": "assistant", "content": "I compared"})
    return recorded_as_used(tier, "continue-final", rows, continue_final_assistant_message=True)[1]


VLLM_CASES = {
    "token-ids": token_ids, "log-probabilities": log_probabilities, "abort-chat": abort_chat, "abort-responses": abort_responses,
    "exact-context": overflow, "continue-final": continue_final,
}


def run_cases(tier, cases):
    """Runs every case, and returns the names of those that failed."""
    failed = []
    for name, case in cases.items():
        began = time.monotonic()
        try:
            result = case(tier)
        except (Failed, OSError, subprocess.TimeoutExpired) as failure:
            failed.append(name)
            result = f"FAILED: {failure}"
        finally:
            tier.end_case()
        print(f"{name}: {result} ({time.monotonic() - began:.1f} s)", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--vllm", action="store_true", help="the cases that need vLLM")
    parser.add_argument("--only", nargs="+", metavar="CASE", help=f"of {', '.join(LLAMA_CASES)}; with --vllm of {', '.join(VLLM_CASES)}")
    options = parser.parse_args()
    name, cases, engine = ("engines-vllm", VLLM_CASES, Vllm) if options.vllm else ("engines", LLAMA_CASES, Llama)
    chosen = options.only or list(cases)
    if unknown := set(chosen) - set(cases):
        parser.error(f"no case {', '.join(unknown)}; there are: {', '.join(cases)}")
    # The processes end also if this one is asked to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"gym-{name}-"))
    tier = Tier(options.program.resolve(), folder, engine)
    try:
        failed = run_cases(tier, {case: cases[case] for case in cases if case in chosen})
    finally:
        for process in tier.processes:
            process.kill()
    if failed:
        print(f"{name}: failed: {', '.join(failed)}; the files are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}: passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
