"""Tests of compare.py: every kind of change must be reported, and nothing else must be.

usage: compare.py self-test     (the rows are made here; no file of another run is needed)
"""

import contextlib
import copy
import io
import json
import tempfile
import traceback
from pathlib import Path

from compare import beside, compare

EXPANDED = {
    "responses_create_params": {
        "background": None,
        "input": [
            {"content": "hello", "role": "user", "type": "message", "phase": None},
            {
                "id": "msg_0",
                "content": [{"annotations": [], "text": "hi", "type": "output_text", "logprobs": None}],
                "role": "assistant",
                "status": "completed",
                "type": "message",
                "phase": None,
            },
        ],
        "temperature": 0.5,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "stream": None,
    },
    "response": {
        "id": "resp_1",
        "created_at": 1700000000.0,
        "error": None,
        "model": "mock",
        "object": "response",
        "output": [
            {"id": "fc_1", "call_id": "call_1", "name": "get", "arguments": "{}", "type": "function_call", "status": "completed"},
            {"id": None, "call_id": "call_1", "output": "x", "type": "function_call_output", "status": None},
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"name": "get", "parameters": {}, "strict": True, "type": "function", "defer_loading": None, "description": ""}],
        "usage": None,
        "x_extra": {"number": 9007199254740993},
    },
    "reward": 1.0,
    "mask_sample": False,
    "failure_kind": None,
    "failure_reason": None,
    "score": 0.0,
    "_ng_task_index": 0,
    "_ng_rollout_index": 0,
    "agent_ref": {"name": "agent"},
}


def own_text():
    """The same rollout as EXPANDED from a server that keeps the row's own text."""
    row = copy.deepcopy(EXPANDED)
    params, response = row["responses_create_params"], row["response"]
    row["responses_create_params"] = {"temperature": 0.5, "input": params["input"]}
    params["input"][0] = {"role": "user", "content": "hello"}
    for key in ("phase", "type"):
        del params["input"][1][key]
    del params["input"][1]["content"][0]["logprobs"]
    for key in ("error", "usage"):
        del response[key]
    for key in ("id", "status"):
        del response["output"][1][key]
    del response["tools"][0]["defer_loading"]
    for key in ("mask_sample", "failure_kind", "failure_reason"):
        del row[key]
    return dict(reversed(row.items()))


def changed(change):
    row = copy.deepcopy(EXPANDED)
    change(row)
    return row


def with_id(value, one, other):
    return json.loads(json.dumps(value).replace(one, other))


SECOND = changed(lambda row: row.update(_ng_rollout_index=1))
EQUAL = {
    "the same rows": [EXPANDED, SECOND],
    "another order of rows": [SECOND, EXPANDED],
    "keys at their default missing": [own_text(), SECOND],
    "other ids that link the same items": [with_id(with_id(EXPANDED, "call_1", "call_9"), "resp_1", "r"), SECOND],
    "another time": [changed(lambda row: row["response"].update(created_at=5)), SECOND],
    "the course of the episode": [changed(lambda row: row.update(_gym_episode={"turns": 1, "seconds": 0.25})), SECOND],
    "an integer that was a float": [changed(lambda row: row.update(reward=1)), SECOND],
}
DIFFERENT = {
    "a changed reward": (".reward", [changed(lambda row: row.update(reward=0.0)), SECOND]),
    "a row missing": ("rollout 1", [EXPANDED]),
    "a row more": ("rollout 2", [EXPANDED, SECOND, changed(lambda row: row.update(_ng_rollout_index=2))]),
    "a row twice": ("second row", [EXPANDED, EXPANDED, SECOND]),
    "a field without default missing": (".score", [changed(lambda row: row.pop("score")), SECOND]),
    "an extra field": (".extra", [changed(lambda row: row.update(extra=None)), SECOND]),
    "true for one": (".reward", [changed(lambda row: row.update(reward=True)), SECOND]),
    "a default changed": (".mask_sample", [changed(lambda row: row.update(mask_sample=True)), SECOND]),
    "zero where the default is false": (".mask_sample", [changed(lambda row: row.update(mask_sample=0)), SECOND]),
    "null where the default is not": (
        ".parallel_tool_calls",
        [changed(lambda row: row["responses_create_params"].update(parallel_tool_calls=None)), SECOND],
    ),
    "an option lost": (".temperature", [changed(lambda row: row["responses_create_params"].pop("temperature")), SECOND]),
    "a tool output changed": ("output[1].output", [changed(lambda row: row["response"]["output"][1].update(output="y")), SECOND]),
    "an item lost": ("output.length", [changed(lambda row: row["response"]["output"].pop()), SECOND]),
    "a call id that links nothing": (
        "call_id",
        [changed(lambda row: row["response"]["output"][1].update(call_id="call_2")), SECOND],
    ),
    "a number above 2^53 rounded": (
        ".x_extra.number",
        [changed(lambda row: row["response"]["x_extra"].update(number=9007199254740992)), SECOND],
    ),
    "a torn line": ("Unterminated|Expecting|delimiter", None),
}
AGGREGATE = [{"agent_ref": {"name": "a"}, "agent_metrics": {"mean/reward": 0.5, "std/reward": None}, "group_level_metrics": [{"n": 1}]}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def outcome(*arguments, **options):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        equal = compare(*arguments, **options)
    return equal, printed.getvalue()


def check(folder):
    left = write(folder / "left.jsonl", [EXPANDED, SECOND])
    right = folder / "right.jsonl"
    for name, rows in EQUAL.items():
        equal, text = outcome("rows", left, write(right, rows))
        assert equal, f"{name} must be equal:\n{text}"
    for name, (place, rows) in DIFFERENT.items():
        if rows is None:
            right.write_text(json.dumps(EXPANDED) + "\n" + json.dumps(SECOND)[:-30], encoding="utf-8")
        else:
            write(right, rows)
        for pair in ((left, right), (right, left)):
            equal, text = outcome("rows", *pair)
            assert not equal, f"{name} must be reported"
            assert any(word in text for word in place.split("|")), f"{name} must name {place}:\n{text}"
    write(right, [with_id(EXPANDED, "resp_1", "r"), SECOND])
    assert not outcome("rows", left, right, ids=True)[0], "another id must be reported when ids count"
    assert not outcome("rows", left, folder / "nowhere.jsonl")[0], "a missing file must be reported"
    assert not outcome("rows", write(folder / "e1", []), write(folder / "e2", []))[0], "two empty files prove nothing"

    inputs = write(folder / "inputs", [{"a": 1, "b": {"c": True, "d": [1.5]}}, {"a": 2}])
    cases = {
        "key order": [{"a": 1, "b": {"d": [1.5], "c": True}}, {"a": 2}],
        "line order": [{"a": 2}, {"a": 1, "b": {"c": True, "d": [1.5]}}],
        "a value": [{"a": 1, "b": {"c": 1, "d": [1.5]}}, {"a": 2}],
        "a line": [{"a": 1, "b": {"c": True, "d": [1.5]}}],
        "a key": [{"a": 1, "b": {"c": True, "d": [1.5], "e": None}}, {"a": 2}],
    }
    for name, rows in cases.items():
        assert not outcome("materialized", inputs, write(right, rows))[0], f"{name} must be reported"
    spaced = folder / "spaced"
    spaced.write_text('{ "a":1.0,"b":{"c":true,"d":[15e-1]}}\n{"a":2}', encoding="utf-8")
    equal, text = outcome("materialized", inputs, spaced)
    assert equal, f"white space and number form are not content:\n{text}"

    def aggregate(entries):
        path = folder / f"aggregate{len(list(folder.iterdir()))}"
        path.write_text(json.dumps(entries), encoding="utf-8")
        return path

    base = aggregate(AGGREGATE)

    def metric(name, value):
        entries = copy.deepcopy(AGGREGATE)
        entries[0]["agent_metrics"][name] = value
        return aggregate(entries)

    assert outcome("aggregate", base, metric("mean/reward", 0.5 + 5e-10))[0], "within 1e-9 is equal"
    assert not outcome("aggregate", base, metric("mean/reward", 0.5 + 5e-9))[0], "beyond 1e-9 must be reported"
    assert not outcome("aggregate", base, metric("std/reward", 0.0))[0], "null is not zero"
    assert not outcome("aggregate", base, metric("max/reward", 1.0))[0], "an extra metric must be reported"
    assert not outcome("aggregate", base, aggregate(AGGREGATE * 2))[0], "an extra agent must be reported"
    assert beside("x/out.jsonl", "_failures.jsonl") == Path("x/out_failures.jsonl")


def main():
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(Path(folder))
        except AssertionError:
            traceback.print_exc()
            return 1
    print(f"compare: {len(EQUAL)} equal and {len(DIFFERENT)} different rows, inputs and aggregates judged right")
    return 0
