"""Records what NeMo Gym's own example environments answer, for the Rust ports to be compared with.

    python examples/tests/python/golden_envs.py          # rewrites examples/tests/data/nemo/*.jsonl
    python examples/tests/python/golden_envs.py --check  # fails if they differ from what is committed

Two more sources of calls are not committed; they are written to a folder and replayed from it:

    python examples/tests/python/golden_envs.py --rollouts FOLDER   # the rollouts that come with the originals
    python examples/tests/python/golden_envs.py --random SEED FOLDER  # 1,500 random calls of each kind
    NEMO_RECORDED=FOLDER cargo test -p gym-examples --test nemo_ports

Needs an interpreter with nemo-gym 0.7.0. The servers run in-process through FastAPI's test client. Bodies and replies are
kept as texts, because the spelling of numbers and the order of keys are part of what is compared.
"""

import importlib
import itertools
import json
import random
import sys
from pathlib import Path
from unittest.mock import MagicMock

from fastapi.testclient import TestClient
from nemo_gym.server_utils import ServerClient

TARGET = Path(__file__).resolve().parent.parent / "data" / "nemo"

WEATHER_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": ""}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def call(name, arguments, call_id="call_1"):
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(text, call_id="call_1"):
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def message(text):
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def reasoning(text):
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}]}


def verify(items, tools=(), **task):
    body = {
        "responses_create_params": {"input": [{"role": "user", "content": "hello"}], "tools": list(tools)},
        "response": {
            "id": "resp_1",
            "created_at": 0.0,
            "model": "m",
            "object": "response",
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        },
    }
    return ("/verify", json.dumps({**body, **task}, ensure_ascii=False))


CITIES = [
    '{"city":"San Francisco"}',
    '{"city":""}',
    '{"city":"Zürich \\"old\\" \\\\ \\u0001\\u007f / 東京 \\ud83c\\udf26"}',
    '{ "city" : "x", "other": [1, 2] }',
    "{}",
    '{"City":"x"}',
    '{"city":null}',
    '{"city":5}',
    '{"city":1E5}',
    '{"city":["a", {"b": 1.50}]}',
    '{"city":true}',
    '{"town":"x","n":12345678901234567890123,"f":[1e22,1e-7,0.0001,123456789012345680.0,-0.0,1e16]}',
    '{"city":"a","city":7}',
]

COUNTS = [
    "5",
    "-3",
    "0",
    "5.0",
    "5.5",
    "true",
    "null",
    "[1]",
    '{"a":1E5}',
    "1e16",
    "1e20",
    "12345678901234567890123",
    '"7"',
    '" 1_000 "',
    '"5.0"',
    '"5.00"',
    '"5.5"',
    '"5."',
    '".0"',
    '"+5"',
    '"-0"',
    '"007"',
    '"--5"',
    '"- 5"',
    '"1e3"',
    '"0x10"',
    '"_1"',
    '"1_"',
    '"1__0"',
    '""',
    '"five"',
    '"\\u0665"',
]

LISTS = [
    "[1, 2, 3]",
    "[]",
    '"a"',
    "null",
    '{"a":1}',
    '[1, "b", 2.5, null, "4", 5.0, true, [6]]',
    "7",
]

SYNONYMS = ['{"synonym":"Outperform"}', '{"synonym":""}', '{"synonym":"\\u00e9\\ud83c\\udf26"}', '{"synonym":9}', "{}"]

WEATHER_ANSWERS = [
    [],
    [message("It is cold.")],
    [call("get_weather", {"city": "San Francisco"})],
    [call("get_weather", {"city": "San Francisco"}), output("cold"), message("It is cold.")],
    [reasoning("hm"), call("get_weather", "not json")],
    [call("get_weather", "[1]")],
    [call("get_weather", "")],
    [call("get_weather", {})],
    [call("get_weather", {"city": "Oslo"}), call("get_weather", {"city": "San Francisco"}, "call_2")],
    [call("get_Weather", {"city": "San Francisco"})],
    [call("other", {"city": "San Francisco"}), call("get_weather", {"city": "San Francisco"}, "call_2")],
    [call("get_weather", {"city": "San Francisco", "unit": 1.0}), message("")],
    [call("get_weather", '{"city": "Oslo", "city": "San Francisco"}')],
    [output("{}")],
]


def single_tool_call():
    yield [("/get_weather", body) for body in CITIES]
    yield [verify(items, [WEATHER_TOOL]) for items in WEATHER_ANSWERS]
    yield [("/get_wether", "{}")]


def multi_step():
    yield [("/get_synonym_value", body) for body in SYNONYMS]
    yield [("/extract_synonym_values", '{"synonym_values":%s}' % values) for values in LISTS] + [
        ("/extract_synonym_values", '{"values":[1]}')
    ]
    task = {
        "id": 0,
        "expected_synonym_values": [711, 407, 711],
        "expected_synonyms": ["Blazing", "Warm", "Blazing"],
        "minefield_label": "Hot",
        "minefield_label_value": 299,
    }
    answers = [
        [],
        [message("711, 407, 711")],
        [call("extract_synonym_values", {"synonym_values": [711, 407, 711]})],
        [call("extract_synonym_values", {"synonym_values": [407, 711, 711]})],
        [call("extract_synonym_values", {"synonym_values": [711, 407]})],
        [call("extract_synonym_values", {"synonym_values": [711]})],
        [call("extract_synonym_values", {"synonym_values": [711, 407, 711, 299]})],
        [call("extract_synonym_values", {"synonym_values": []})],
        [call("extract_synonym_values", {"synonym_values": [711.0, 407, 711.0]})],
        [call("extract_synonym_values", {"synonym_values": ["711", "407", "711"]})],
        [call("extract_synonym_values", {"synonym_values": ["Hot"]})],
        [call("extract_synonym_values", {"synonym_values": "Hot"})],
        [call("extract_synonym_values", {"synonym_values": [711.5]})],
        [call("extract_synonym_values", {"synonym_values": [[711]]})],
        [call("extract_synonym_values", {"synonym_values": None})],
        [call("extract_synonym_values", {"synonym_values": 5})],
        [call("extract_synonym_values", {"synonym_values": {}})],
        [call("extract_synonym_values", {"values": [711]})],
        [call("extract_synonym_values", "[711]")],
        [call("extract_synonym_values", "not json")],
        [
            call("extract_synonym_values", {"synonym_values": [711, 407, 711]}),
            output('{"success":true}'),
            call("extract_synonym_values", {"synonym_values": [1]}, "call_2"),
            message("done"),
        ],
        [call("get_synonym_value", {"synonym": "Warm"}), output('{"synonym_value":407}')],
    ]
    yield [verify(items, **task) for items in answers]
    booleans = {**task, "expected_synonym_values": [1, 0]}
    yield [verify([call("extract_synonym_values", {"synonym_values": [True, False]})], **booleans)]
    yield [verify([], **{**task, "expected_synonym_values": []})]
    yield [verify([], **{**task, "expected_synonym_values": ["1", 2.0, True], "id": "5", "minefield_label_value": "1"})]
    yield [verify([], **{key: value for key, value in task.items() if key != "minefield_label"})]


def session_state_mgmt():
    def add(count):
        return ("/increment_counter", '{"count":%s}' % count)

    value, seed = ("/get_counter_value", "{}"), '{"initial_count":%s}'
    yield list(itertools.chain.from_iterable((add(count), value) for count in COUNTS)) + [
        ("/increment_counter", "{}"),
        ("/increment_counter", '{"Count":1}'),
        value,
    ]
    yield [("/seed_session", seed % 3), add(1), add(2), value, verify([], expected_count=6), verify([], expected_count=7)]
    yield [("/seed_session", seed % 3), ("/seed_session", seed % 50), value]
    yield [add(4), ("/seed_session", seed % 3), value, ("/get_counter_value", '{"any":"thing"}')]
    yield [verify([], expected_count=0), value, verify([], expected_count=0), verify([], expected_count=False)]
    yield [("/seed_session", seed % '"12"'), value, verify([], expected_count="12"), verify([], expected_count=12.0)]
    yield [("/seed_session", "{}"), value, ("/seed_session", seed % "null"), ("/seed_session", seed % '"x"'), value]
    yield [verify([], expected_count="x"), verify([])]


def tool_call_multireward():
    yield [("/get_weather", body) for body in CITIES]
    expected = {"name": "get_weather", "arguments": {"city": "San Francisco"}}
    yield [verify(items, [WEATHER_TOOL], expected_call=expected) for items in WEATHER_ANSWERS]
    yield [verify(items, [], expected_call=expected) for items in WEATHER_ANSWERS]
    yield [verify(items, [WEATHER_TOOL]) for items in WEATHER_ANSWERS[:4]]
    optional = {**WEATHER_TOOL, "parameters": {"type": "object", "properties": {}}}
    wanted = [
        {"name": "get_weather"},
        {"name": "get_weather", "arguments": None},
        {"name": "get_weather", "arguments": {"city": 1}},
        {"name": "get_weather", "arguments": {"city": [1, {"a": 0}]}},
        {"name": "get_weather", "arguments": {"city": None}},
        {"arguments": {"city": "x"}},
    ]
    answers = [{"city": 1}, {"city": 1.0}, {"city": True}, {"city": "1"}, {"city": [True, {"a": 0.0}]}, {}]
    for call_wanted in wanted:
        yield [verify([call("get_weather", a)], [optional], expected_call=call_wanted) for a in answers]


SERVERS = {
    "single_tool_call": ("example_single_tool_call", "SimpleWeatherResourcesServer", single_tool_call),
    "multi_step": ("example_multi_step", "ExampleMultiStepResourcesServer", multi_step),
    "session_state_mgmt": ("example_session_state_mgmt", "StatefulCounterResourcesServer", session_state_mgmt),
    "tool_call_multireward": (
        "example_tool_call_multireward",
        "ToolCallMultiRewardResourcesServer",
        tool_call_multireward,
    ),
}


def rollouts(module_name):
    """The rollouts that come with a server: seed, every tool call in order, verify."""
    data = Path(importlib.import_module("resources_servers").__path__[0]) / module_name / "data"

    def read(name):
        return [json.loads(line) for line in (data / name).read_text(encoding="utf-8").splitlines()]

    def question(row):
        return row["responses_create_params"]["input"][-1]["content"]

    tasks = {question(row): row for row in read("example.jsonl")}
    for rollout in read("example_rollouts.jsonl"):
        # They are in an older form: without task keys, with nulls where a value must be now.
        row = {**rollout, **tasks[question(rollout)]}
        defaults = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        row["response"].update({key: value for key, value in defaults.items() if row["response"].get(key) is None})
        calls = [("/" + item["name"], item["arguments"]) for item in row["response"]["output"] if item["type"] == "function_call"]
        yield [("/seed_session", json.dumps(tasks[question(rollout)])), *calls, ("/verify", json.dumps(row))]


class Random:
    """Draws bodies that are nearly right."""

    TEXTS = [
        *["", "5", "-5", " 7 ", "1_0", "x", "5.0", "5.10", "+0", "00", "\u00e9", "\u2028", 'a\\b"c', "\t3\n", "\u00a04", "1e5"],
        *["0x1", "\uff19", "-", "+", "_", "1_", "- 1", "5.0 ", "--1", "+-1", "-_1", "1._0", "1_0.0", "0.0", "-0.0", ".", "5.0.0"],
    ]
    # What our JSON values cannot hold in a verdict; tool arguments are read as text and can have them.
    EXTREMES = ["-0", "9223372036854775808", "-9223372036854775809", "12345678901234567890123"]

    def __init__(self, seed, extremes):
        self.draw, self.extremes = random.Random(seed), extremes

    def number(self):
        draw = self.draw
        kind = draw.randrange(7)
        if kind == 0:
            most = 10 ** draw.randrange(1, 15)
            return str(draw.randrange(-most, most))
        if kind == 1:
            return repr(draw.uniform(-1, 1) * 10 ** draw.randrange(-30, 40))
        if kind == 2:
            return f"{draw.randrange(-99, 99)}e{draw.randrange(-20, 25)}"
        if kind == 3:
            sign = draw.choice(["+", "-", ""])
            return f"{draw.randrange(-99, 99)}.{draw.randrange(0, 1000):0{draw.randrange(1, 6)}d}E{sign}{draw.randrange(0, 22)}"
        if kind == 4:
            return draw.choice(["0.0", "-0.0", "9.3e18", "9.2e18", "-9.223372036854775808e18", "9007199254740993.0", "0.1e1"])
        return draw.choice(self.EXTREMES) if kind == 5 and self.extremes else str(draw.randrange(-100, 100))

    def value(self, depth=0):
        draw = self.draw
        kind = draw.randrange(9)
        if kind < 3:
            return self.number()
        if kind == 4:
            return draw.choice(["true", "false", "null"])
        if kind == 5 and depth < 3:
            return "[" + draw.choice([",", " , "]).join(self.value(depth + 1) for _ in range(draw.randrange(4))) + "]"
        if kind == 6 and depth < 3:
            keys = draw.sample(["a", "b", "\u00e9"], draw.randrange(3))
            return "{" + ", ".join(f"{json.dumps(key)}: {self.value(depth + 1)}" for key in keys) + "}"
        return json.dumps(draw.choice(self.TEXTS), ensure_ascii=draw.random() < 0.5)

    def body(self, key):
        draw = self.draw
        keys = ([key] if draw.random() < 0.85 else []) + draw.sample(["x", "y", "z"], draw.randrange(2))
        draw.shuffle(keys)
        separator = draw.choice([",", ", "])
        return "{" + separator.join(f"{json.dumps(key)}{draw.choice([':', ': '])}{self.value()}" for key in keys) + "}"

    def values(self):
        return '{"synonym_values":[%s]}' % ",".join(self.value() for _ in range(self.draw.randrange(5)))

    def integers(self):
        draw = self.draw
        odd = ["2.0", "true", "false", "null", '"2"', '"x"', "1.5", "[1]"]
        items = [draw.choice(odd) if draw.random() < 0.3 else str(draw.randrange(4)) for _ in range(draw.randrange(5))]
        return '{"synonym_values":[%s]}' % ",".join(items)

    def items(self):
        draw = self.draw
        for _ in range(draw.randrange(4)):
            arguments = draw.choice([self.body("city"), self.body("city"), "no", "[]"])
            yield draw.choice([message("x"), call(draw.choice(["get_weather", "f"]), arguments), output("z")])


def random_calls(module_name, seed, count=1500):
    multireward = module_name == "example_tool_call_multireward"
    source = Random(seed, extremes=not multireward)
    draw = source.draw
    if module_name == "example_session_state_mgmt":
        yield [("/increment_counter", source.body("count")) for _ in range(count)] + [("/get_counter_value", "{}")]
        return
    if module_name == "example_multi_step":
        yield [("/extract_synonym_values", source.values()) for _ in range(count)]
        yield [("/get_synonym_value", source.body("synonym")) for _ in range(count)]
        for _ in range(count):
            task = {
                "id": 1,
                "expected_synonym_values": [draw.randrange(4) for _ in range(draw.randrange(1, 4))],
                "expected_synonyms": [],
                "minefield_label": draw.choice(["x", "2"]),
                "minefield_label_value": draw.randrange(4),
            }
            yield [verify([call("extract_synonym_values", source.integers())], **task)]
        return
    yield [("/get_weather", source.body("city")) for _ in range(count)]
    for _ in range(count if multireward else 0):
        arguments = json.loads(draw.choice([source.body("city"), '{"city":1}', '{"city":true}', "{}"]))
        tools = [WEATHER_TOOL] if draw.random() < 0.7 else []
        yield [verify(list(source.items()), tools, expected_call={"name": "get_weather", "arguments": arguments})]


def record(module_name, class_name, sessions):
    """The calls of each session, with what the server answers."""
    module = importlib.import_module(f"resources_servers.{module_name}.app")
    config = getattr(module, class_name + "Config")(host="0.0.0.0", port=8080, entrypoint="", name="")
    app = getattr(module, class_name)(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()
    for number, calls in enumerate(sessions):
        # A client of its own is a session of its own: it keeps the cookie.
        client = TestClient(app, raise_server_exceptions=False)
        for path, body in calls:
            reply = client.post(path, content=body.encode(), headers={"content-type": "application/json"})
            line = {"session": number, "path": path, "body": body, "status": reply.status_code, "reply": reply.text}
            yield json.dumps(line, ensure_ascii=False)


def main():
    arguments = sys.argv[1:]
    sources = {"--rollouts": rollouts, "--random": lambda module_name: random_calls(module_name, int(arguments[1]))}
    extra = sources.get(arguments[0]) if arguments else None
    target = Path(arguments[-1]) if extra else TARGET
    differs = []
    for name, (module_name, class_name, sessions) in SERVERS.items():
        calls = extra(module_name) if extra else sessions()
        text = "".join(line + "\n" for line in record(module_name, class_name, calls))
        path = target / f"{name}.jsonl"
        if arguments == ["--check"]:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                differs.append(name)
        else:
            target.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path.name}: {text.count(chr(10))} calls")
    if differs:
        sys.exit(f"not what the servers answer now: {', '.join(differs)}")


if __name__ == "__main__":
    main()
