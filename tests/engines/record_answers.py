"""Records raw answers of an engine that serves tiny.gguf, for the tests of the gate (tests/data/engines).

    python record_answers.py vllm|llamacpp ORIGIN VERSION > ../data/engines/ENGINE.json

vLLM needs VLLM_SERVER_DEV_MODE=1. Both serve the model as `tiny` with a context of 4,096 tokens.
"""

import json
import pathlib
import sys
import threading
import time
import urllib.error
import urllib.request

CONTEXT = 4_096
TOOL = {
    "name": "move_boxes",
    "description": "Moves boxes.",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
# The model was trained on such tasks, so it ends its answer.
TASKS = pathlib.Path(__file__).resolve().parents[2] / "examples/data/choice.jsonl"
TASK = json.loads(TASKS.open().readline())["responses_create_params"]["input"]
engine, origin, version = sys.argv[1:]
answers = []


def send(path, body=None):
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(origin + path, content, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def keep(name, path, request, answer):
    status, body = answer
    if path == "/v1/models":
        # Not the place of the model on the machine.
        models = json.loads(body)
        for model in models["data"]:
            model.pop("root", None)
        body = json.dumps(models)
    answers.append({"name": name, "path": path, "request": request, "status": status, "body": body})


def record(name, path, request=None, shown=None):
    keep(name, path, shown or request, send(path, request))


def messages(text):
    return text if isinstance(text, list) else [{"role": "user", "content": text}]


def chat(text, **more):
    return {"model": "tiny", "messages": messages(text), "stream": False, **more}


def responses(text, **more):
    return {"model": "tiny", "input": messages(text), "stream": False, **more}


def with_tool(request):
    tool = {"type": "function", "function": TOOL} if "messages" in request else {"type": "function", **TOOL}
    return {**request, "tools": [tool]}


def text_of(tokens):
    """Returns a text whose chat prompt has exactly so many tokens."""
    count = lambda text: json.loads(send(CHAT, chat(text, max_tokens=1))[1])["usage"]["prompt_tokens"]
    base = count("x")
    text = "x" + " Bring" * (tokens - base)
    if tokens < CONTEXT:
        assert count(text) == tokens
    return text


def aborted(name, path, request):
    """Records an answer that ends because the engine is paused."""
    sent = threading.Thread(target=lambda: record(name, path, request))
    sent.start()
    time.sleep(0.5)
    send("/pause?mode=abort", {})
    sent.join()
    send("/resume", {})


record("models", "/v1/models")
for dialect, path, make, limit in [("chat", CHAT, chat, "max_tokens"), ("responses", RESPONSES, responses, "max_output_tokens")]:
    record(f"{dialect}: whole", path, make(TASK, temperature=0, **{limit: 400}))
    record(f"{dialect}: cut by the limit", path, make("Say yes.", temperature=0, **{limit: 3}))
    record(f"{dialect}: with a tool", path, with_tool(make("Say yes.", temperature=0, **{limit: 1})))
    for tokens in (CONTEXT, CONTEXT + 1):
        record(f"{dialect}: prompt of {tokens} tokens", path, make(text_of(tokens)), make("(a long text)"))
if engine == "vllm":
    ids = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    record("chat: token ids", CHAT, chat("Say yes.", temperature=0, max_tokens=4, **ids))
    patterns = {"max_pattern_size": 2, "min_count": 3, "min_pattern_size": 1}
    record("chat: repetition", CHAT, chat("Say yes.", ignore_eos=True, allowed_token_ids=[43], repetition_detection=patterns))
    aborted("chat: aborted", CHAT, chat("Say yes.", ignore_eos=True, max_tokens=2_000))
    aborted("responses: aborted", RESPONSES, responses("Say yes.", ignore_eos=True, max_output_tokens=2_000))
    status, metrics = send("/metrics")
    kept = [line for line in metrics.splitlines() if "vllm:request_success" in line]
    keep("metrics", "/metrics", None, (status, "\n".join(kept) + "\n"))
    record("is_paused", "/is_paused")
    record("is_sleeping", "/is_sleeping")
else:
    ids = {"logprobs": True, "top_logprobs": 0}
    record("chat: token ids", CHAT, chat("Say yes.", temperature=0, max_tokens=4, **ids))
    call = {"type": "function_call", "call_id": "c", "name": "move_boxes", "arguments": '{"count": 00000'}
    output = {"type": "function_call_output", "call_id": "c", "output": "wrong"}
    broken = responses([*messages("Move boxes."), call, output], max_output_tokens=4)
    record("responses: a call that was cut off, sent back", RESPONSES, with_tool(broken))
json.dump({"engine": engine, "version": version, "answers": answers}, sys.stdout, indent=1)
print()
