#!/usr/bin/env python3
"""OpenAI's own Python client, unmodified, against a model server: answers, tools, streams, errors, timeouts.

usage: openai_client.py --base-url http://127.0.0.1:PORT/v1 [--expect python|passthrough] [--record FILE]
       openai_client.py --control          starts the mock and the Python openai_model itself and tests that

The model server must front tests/python/mock_openai.py, whose answers and troubles the cases below ask for in the text of
the request. Each case returns what the client made of the answer: a value, or the class and status of the exception that
it raised. EXPECTED says what that must be. NeMo Gym's own server turns every upstream error into a 500, and after one 401
never asks its upstream again; a server that passes the upstream's status on lets the client raise the right class.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import openai

MODEL = "any"
LOOKUP = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}, "strict": False}


def chat_tool(tool):
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


# Case -> outcome, or (NeMo Gym's own server, a server that passes the upstream's status on). A set holds alternatives.
EXPECTED = {
    "responses_text": ["You said: hello Zürich ☂", "completed", True, True, 1700000000.0],
    "responses_items_and_options": ["You said: parts", 0.5, 0.9, 77, {"k": "v"}, False],
    "responses_tool_round_trip": ["function_call", "look_up", "what is it", "Told: forty-two"],
    "responses_extra_fields_kept": {"kept": True, "number": 9007199254740993, "float": 1e-07},
    "responses_same_bytes_twice": True,
    "responses_stream": [["response.created", "response.output_item.done", "response.completed"], "You said: stream please"],
    "responses_stream_helper": [True, "You said: stream please"],
    "responses_stream_tool": [["response.created", "response.output_item.done", "response.completed"], ["function_call"]],
    "responses_stream_failure": ["response.failed", "failed", True],
    "chat_text": ["You said: hello", "stop", True, "chat.completion"],
    "chat_tool_round_trip": ["tool_calls", "look_up", "Told: forty-two"],
    "chat_stream": ["You said: stream please", ["stop"], True, True],
    "chat_stream_tool": ["look_up", "what is it"],
    "chat_stream_failure": ("InternalServerError 500", "BadRequestError 400"),
    "wrong_type": "UnprocessableEntityError 422",
    "unknown_field": "UnprocessableEntityError 422",
    "chat_unknown_field": "UnprocessableEntityError 422",
    "chat_without_messages": "UnprocessableEntityError 422",
    "body_that_is_no_json": "UnprocessableEntityError 422",
    "unknown_route": "NotFoundError 404",
    "wrong_method": "APIStatusError 405",
    "upstream_400": ("InternalServerError 500", "BadRequestError 400"),
    "upstream_404": ("InternalServerError 500", "NotFoundError 404"),
    "upstream_422": ("InternalServerError 500", "UnprocessableEntityError 422"),
    "upstream_429": ("InternalServerError 500", "RateLimitError 429"),
    "upstream_500": "InternalServerError 500",
    "upstream_503": ("InternalServerError 500", "InternalServerError 503"),
    "chat_upstream_400": ("InternalServerError 500", "BadRequestError 400"),
    "chat_upstream_429": ("InternalServerError 500", "RateLimitError 429"),
    "upstream_garbage": ("InternalServerError 500", {"InternalServerError 500", "InternalServerError 502"}),
    "upstream_cut": ("InternalServerError 500", {"InternalServerError 500", "InternalServerError 502", "InternalServerError 503"}),
    "upstream_drops": ("APITimeoutError", {"InternalServerError 500", "InternalServerError 502", "InternalServerError 503"}),
    "client_timeout": "APITimeoutError",
    "slow_answer_in_time": "completed",
    "nobody_listens": "APIConnectionError",
    "answers_after_all_that": "You said: still there",
    "thirty_two_at_once": True,
    "upstream_401": ("InternalServerError 500", "AuthenticationError 401"),
    "upstream_403": ("InternalServerError 500", "PermissionDeniedError 403"),
    "answers_after_401": ("InternalServerError 500", "You said: still there"),
}


class Cases:
    """Each public method is one case; its name is the key in EXPECTED."""

    def __init__(self, base_url):
        # No retries by the client: a case must see the first answer.
        self.base_url = base_url
        self.client = openai.OpenAI(base_url=base_url, api_key="not-a-secret", max_retries=0, timeout=30)

    def responses_text(self):
        answer = self.client.responses.create(model=MODEL, input="hello Zürich ☂")
        return [answer.output_text, answer.status, answer.usage.total_tokens > 0, answer.id.startswith("resp_"), answer.created_at]

    def responses_items_and_options(self):
        answer = self.client.responses.create(
            model=MODEL,
            input=[{"role": "developer", "content": "be short"}, {"role": "user", "content": [{"type": "input_text", "text": "parts"}]}],
            temperature=0.5,
            top_p=0.9,
            max_output_tokens=77,
            metadata={"k": "v"},
            parallel_tool_calls=False,
        )
        options = [answer.temperature, answer.top_p, answer.max_output_tokens, answer.metadata, answer.parallel_tool_calls]
        return [answer.output_text, *options]

    def responses_tool_round_trip(self):
        first = self.client.responses.create(model=MODEL, input="what is it", tools=[LOOKUP])
        call = first.output[0]
        done = {"type": "function_call_output", "call_id": call.call_id, "output": "forty-two"}
        items = [{"role": "user", "content": "what is it"}, call.model_dump(), done]
        second = self.client.responses.create(model=MODEL, input=items, tools=[LOOKUP])
        return [call.type, call.name, json.loads(call.arguments)["question"], second.output_text]

    def responses_extra_fields_kept(self):
        answer = self.client.responses.create(model=MODEL, input="hello")
        return answer.model_extra.get("x_mock")

    def responses_same_bytes_twice(self):
        one, two = (self.client.responses.with_raw_response.create(model=MODEL, input="again").text for _ in range(2))
        return one == two

    def responses_stream(self):
        with self.client.responses.create(model=MODEL, input="stream please", stream=True) as stream:
            events = list(stream)
        return [[event.type for event in events], events[-1].response.output_text]

    def responses_stream_helper(self):
        """The client's accumulator checks the order of events; it must accept ours."""
        with self.client.responses.stream(model=MODEL, input="stream please") as stream:
            types = [event.type for event in stream]
            return [len(types) > 0, stream.get_final_response().output_text]

    def responses_stream_tool(self):
        with self.client.responses.create(model=MODEL, input="what is it", tools=[LOOKUP], stream=True) as stream:
            events = list(stream)
        return [[event.type for event in events], [item.type for item in events[-1].response.output]]

    def responses_stream_failure(self):
        with self.client.responses.create(model=MODEL, input="!mock status=400", stream=True) as stream:
            events = list(stream)
        return [events[-1].type, events[-1].response.status, events[-1].response.error is not None]

    def chat_text(self):
        answer = self.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        choice = answer.choices[0]
        return [choice.message.content, choice.finish_reason, answer.usage.total_tokens > 0, answer.object]

    def chat_tool_round_trip(self):
        tools = [chat_tool(LOOKUP)]
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "what is it"}]
        first = self.client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        message = first.choices[0].message
        call = message.tool_calls[0]
        said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "forty-two"}]
        second = self.client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        return [first.choices[0].finish_reason, call.function.name, second.choices[0].message.content]

    def chat_stream(self):
        messages = [{"role": "user", "content": "stream please"}]
        with self.client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        usage = chunks[-1].usage
        kinds = {chunk.object for chunk in chunks}
        return [text, reasons, usage is not None and usage.total_tokens > 0, kinds == {"chat.completion.chunk"}]

    def chat_stream_tool(self):
        messages = [{"role": "user", "content": "what is it"}]
        with self.client.chat.completions.create(model=MODEL, messages=messages, tools=[chat_tool(LOOKUP)], stream=True) as stream:
            deltas = [choice.delta for chunk in stream for choice in chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        arguments = "".join(call.function.arguments or "" for call in calls if call.function)
        return [calls[0].function.name, json.loads(arguments)["question"]]

    def chat_stream_failure(self):
        messages = [{"role": "user", "content": "!mock status=400"}]
        with self.client.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream:
            return [chunk.id for chunk in stream]

    def wrong_type(self):
        return self.client.responses.create(model=MODEL, input=7).id

    def unknown_field(self):
        return self.client.responses.create(model=MODEL, input="x", extra_body={"no_such_option": 1}).id

    def chat_unknown_field(self):
        extra = {"no_such_option": 1}
        return self.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], extra_body=extra).id

    def chat_without_messages(self):
        return self.client.chat.completions.create(model=MODEL, messages=None, extra_body={"messages": None}).id

    def body_that_is_no_json(self):
        options = {"headers": {"Content-Type": "application/json"}}
        return self.client.post("/responses", cast_to=object, content=b"{", options=options)

    def unknown_route(self):
        return self.client.embeddings.create(model=MODEL, input="x")

    def wrong_method(self):
        return self.client.get("/responses", cast_to=object)

    def upstream_400(self):
        return self.client.responses.create(model=MODEL, input="!mock status=400").id

    def upstream_404(self):
        return self.client.responses.create(model=MODEL, input="!mock status=404").id

    def upstream_422(self):
        return self.client.responses.create(model=MODEL, input="!mock status=422").id

    def upstream_429(self):
        return self.client.responses.create(model=MODEL, input="!mock status=429").id

    def upstream_500(self):
        return self.client.responses.create(model=MODEL, input="!mock status=500").id

    def upstream_503(self):
        return self.client.responses.create(model=MODEL, input="!mock status=503").id

    def chat_upstream_400(self):
        return self.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "!mock status=400"}]).id

    def chat_upstream_429(self):
        return self.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "!mock status=429"}]).id

    def upstream_garbage(self):
        return self.client.responses.create(model=MODEL, input="!mock garbage=1").id

    def upstream_cut(self):
        return self.client.responses.create(model=MODEL, input="!mock cut=1").id

    def upstream_drops(self):
        """NeMo Gym's server asks again for ever; one that gives up says so before the caller does."""
        return self.client.with_options(timeout=4).responses.create(model=MODEL, input="!mock drop=1").id

    def client_timeout(self):
        return self.client.with_options(timeout=0.5).responses.create(model=MODEL, input="!mock sleep_ms=3000").id

    def slow_answer_in_time(self):
        return self.client.responses.create(model=MODEL, input="!mock sleep_ms=1500").status

    def nobody_listens(self):
        return openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0).responses.create(model=MODEL, input="x").id

    def answers_after_all_that(self):
        return self.client.responses.create(model=MODEL, input="still there").output_text

    def thirty_two_at_once(self):
        async def burst():
            async with openai.AsyncOpenAI(base_url=self.base_url, api_key="x", max_retries=0, timeout=60) as client:
                answers = await asyncio.gather(*(client.responses.create(model=MODEL, input=f"n {n}") for n in range(32)))
            return [answer.output_text for answer in answers] == [f"You said: n {n}" for n in range(32)]

        return asyncio.run(burst())

    def upstream_401(self):
        """Near the end: it may close the server's way to its upstream for good."""
        return self.client.responses.create(model=MODEL, input="!mock status=401").id

    def upstream_403(self):
        return self.client.responses.create(model=MODEL, input="!mock status=403").id

    def answers_after_401(self):
        return self.client.responses.create(model=MODEL, input="still there").output_text


def outcome(case):
    began = time.monotonic()
    try:
        result = case()
    except openai.APIStatusError as error:
        result = f"{type(error).__name__} {error.status_code}"
        detail = error.response.text
    except (openai.OpenAIError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        result, detail = type(error).__name__, str(error)
    else:
        detail = None
    return result, detail, time.monotonic() - began


def names():
    return [name for name, value in vars(Cases).items() if callable(value) and not name.startswith("_")]


def run(base_url):
    cases = Cases(base_url)
    return {name: outcome(getattr(cases, name)) for name in names()}


def check(results, column):
    wrong = 0
    for name, (result, detail, seconds) in results.items():
        expected = EXPECTED[name]
        if isinstance(expected, tuple):
            expected = expected[("python", "passthrough").index(column)]
        good = result in expected if isinstance(expected, set) else result == expected
        wrong += not good
        print(f"{'right' if good else 'WRONG'}  {name} in {seconds:.2f} s: {json.dumps(result, ensure_ascii=False)}")
        if not good:
            print(f"       expected {expected!r}\n       {str(detail)[:500]}")
    print(f"--- {len(results) - wrong} of {len(results)} cases as expected ({column})")
    return 1 if wrong else 0


def control(processes):
    """The Python openai_model in front of the mock, started without a launcher: it reads its configuration from variables."""
    import sysconfig

    from processes import free_port, http_get, wait_until

    mock = processes.start("mock", [sys.executable, Path(__file__).with_name("mock_openai.py")])
    wait_until("the mock model", lambda: b"ready http" in mock.log.read_bytes(), 30, mock.check_alive)
    upstream = mock.log.read_text().split("ready ", 1)[1].split()[0]
    port = free_port()
    place = {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, "num_workers": None}
    model = {"openai_base_url": upstream, "openai_api_key": "not-a-secret", "openai_model": "mock"}
    head = {"host": "127.0.0.1", "port": free_port()}  # must be there, is not called
    config = {"head_server": head, "dry_run": False, "policy_model": {"responses_api_models": {"openai_model": {**place, **model}}}}
    folder = Path(sysconfig.get_paths()["purelib"])
    server = processes.start(
        "openai_model",
        [sys.executable, folder / "responses_api_models/openai_model/app.py"],
        NEMO_GYM_CONFIG_DICT=json.dumps(config),
        NEMO_GYM_CONFIG_PATH="policy_model",
        PYTHONPATH=str(folder),
    )
    wait_until("openai_model", lambda: http_get(f"http://127.0.0.1:{port}/")[0] != 0, 90, server.check_alive)
    return f"http://127.0.0.1:{port}/v1"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="of the model server under test, with /v1")
    parser.add_argument("--control", action="store_true", help="test NeMo Gym's own openai_model")
    parser.add_argument(
        "--expect", choices=["python", "passthrough"], help="what upstream errors become; default: passthrough, with --control python"
    )
    parser.add_argument("--record", help="write all outcomes to this JSON file")
    arguments = parser.parse_args()
    if bool(arguments.base_url) == arguments.control:
        parser.error("either --base-url or --control")
    from processes import Processes

    with tempfile.TemporaryDirectory(prefix="openai-client-") as folder:
        processes = Processes(folder)
        try:
            results = run(arguments.base_url or control(processes))
        finally:
            processes.end_all()
    if arguments.record:
        Path(arguments.record).write_text(json.dumps(results, indent=1, ensure_ascii=False))
    return check(results, arguments.expect or ("python" if arguments.control else "passthrough"))


if __name__ == "__main__":
    sys.exit(main())
