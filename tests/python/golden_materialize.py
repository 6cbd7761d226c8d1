"""Writes gym-client/tests/data/materialize.jsonl: inputs, options, and the rows that NeMo Gym 0.7.0 makes of them.

Run with an interpreter that has nemo-gym 0.7.0 installed:

    python tests/python/golden_materialize.py gym-client/tests/data/materialize.jsonl
"""

import contextlib
import io
import json
import sys
import tempfile
import warnings
from pathlib import Path

import orjson
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from omegaconf import OmegaConf

warnings.simplefilter("ignore")

PLAIN = [
    '{"responses_create_params": {"input": "a", "temperature": 1E0}, "id": 1, "agent_ref": {"name": "x", "type": "t"}}',
    '{"id":2,"responses_create_params":{"input":[]},"agent_ref":{"name":"y"},"größe":"😀","z":[1e5,{"k":null}]}',
    '{"responses_create_params":{"input":"c","metadata":{"m":"1"}},"agent_ref":{"name":"x"}}',
]
SOURCED = [
    '{"responses_create_params":{"input":"a"},"task_source":"alpha"}',
    '{"responses_create_params":{"input":"b"},"task_source":"beta","agent_ref":{"name":"x"}}',
    '{"agent_ref":null,"responses_create_params":{"input":"c"},"task_source":"alpha"}',
    '{"responses_create_params":{"input":"d"},"agent_ref":{},"task_source":"beta"}',
]
TASKS = [
    '{"task_id":{"taskset":"ts","task_id":"7"},"task_input":{"a":1}}',
    '{"responses_create_params":{"input":"b"},"agent_ref":{"name":"x"}}',
]
PROMPT = """user: "Q: {question}\\nA) {options[0]} {{literal}} {n:>4} {score:.2f} {meta[key]!r} {flag} {none} {options}"
system: "You are {role}."
"""
FILLED = (
    '{"question":"Was ist größer?","options":["x","it\'s","\\"q\\""],"n":7,"score":2.675,"meta":{"key":"v\\u200b"},'
    '"flag":true,"none":null,"role":"kind","agent_ref":{"name":"x"}%s}'
)


def lines(rows, end="\n"):
    return "\n".join(rows) + end


def cases():
    yield "plain", lines(PLAIN), {}
    yield "limit", lines(PLAIN), {"limit": 2}
    yield "limit_zero_is_none", lines(PLAIN), {"limit": 0}
    yield "limit_before_bad_line", lines([PLAIN[0], "{broken"]), {"limit": 1}
    yield "repeats", lines(PLAIN), {"num_repeats": 3}
    yield "interleaved", lines(PLAIN + PLAIN[:1]), {"num_repeats": 2, "interleave_repeats": True}
    yield "per_agent", lines(PLAIN), {"num_repeats": {"x": 2, "_default": 1}}
    yield "per_agent_missing", lines(PLAIN), {"num_repeats": {"x": 2}}
    yield "duplicates", lines([PLAIN[0], PLAIN[1], PLAIN[0], PLAIN[0]]), {"num_repeats": 2}
    yield "duplicate_without_line_end", lines([PLAIN[0], PLAIN[0], PLAIN[0]], end=""), {}
    yield "carriage_returns", PLAIN[0] + "\r\n" + PLAIN[0] + "\n" + PLAIN[1] + "\r\n", {}
    yield "equal_but_for_space", lines([PLAIN[2], PLAIN[2] + " "]), {}
    yield "given_indices", lines(
        [
            '{"_ng_task_index":1,"responses_create_params":{},"agent_ref":{"name":"x"}}',
            PLAIN[0],
            PLAIN[1],
            '{"_ng_rollout_index":9,"_ng_task_index":123456789,"responses_create_params":{},"agent_ref":{"name":"x"}}',
            PLAIN[2],
        ]
    ), {"num_repeats": 2}
    yield "seed", lines(
        PLAIN
        + [
            '{"responses_create_params":{"metadata":{"extra_body":"{\\"top_k\\":5,\\"s\\":\\"é😀\\",\\"f\\":1e-5,\\"seed\\":0,\\"l\\":[1,{}]}","z":"1"},"input":"q"},"agent_ref":{"name":"x"}}',
            '{"responses_create_params":{"metadata":null},"agent_ref":{"name":"x"}}',
        ]
    ), {"num_repeats": 2, "num_repeats_add_seed": True}
    yield "overrides", lines(PLAIN), {"responses_create_params": {"temperature": 0.5, "metadata": {"n": "2"}, "top_p": 0.9}}
    yield "overrides_and_seed", lines(PLAIN), {"responses_create_params": {"metadata": {"n": "2"}}, "num_repeats_add_seed": True}
    yield "agent", lines(PLAIN), {"agent_name": "z"}
    yield "agent_for_bare_rows", lines(['{"responses_create_params":{"input":"ü"}}', PLAIN[0]]), {"agent_name": "x"}
    yield "agent_map", lines(PLAIN + SOURCED), {"agent_map": {"x": "y", "alpha": "w", "_default": "d"}}
    yield "agent_map_partial", lines(PLAIN), {"agent_map": {"y": "w"}}
    yield "task_source", lines(SOURCED), {"num_repeats": 2}
    yield "task_source_interleaved", lines(SOURCED), {"num_repeats": {"alpha": 2, "_default": 1}, "interleave_repeats": True}
    yield "fan_out", lines(PLAIN), {"fan_out": {"x": ["p", "x", "q"]}, "num_repeats": {"q": 2, "x": 1, "_default": 1}}
    yield "fan_out_source", lines(SOURCED), {"fan_out": {"alpha": ["p", "q"]}, "num_repeats": 2}
    yield "fan_out_interleaved", lines(PLAIN), {"fan_out": {"x": ["p", "q"]}, "num_repeats": 2, "interleave_repeats": True}
    yield "prompt", lines([FILLED % "", FILLED % ',"responses_create_params":{"tools":[],"input":[],"t":1}']), {"prompt": PROMPT, "agent_name": "w"}
    yield "prompt_and_overrides", lines([FILLED % ""]), {"prompt": "user: '{question}'", "responses_create_params": {"t": 1}, "num_repeats_add_seed": True}
    yield "prompt_conflict", lines(PLAIN), {"prompt": "user: '{id}'"}
    yield "prompt_missing_field", lines(PLAIN[1:2]), {"prompt": "user: '{nothing}'"}
    yield "tasks", lines(TASKS), {"environment_server_routes": {"ts": "env"}, "num_repeats": 2}
    yield "tasks_without_route", lines(TASKS), {}
    yield "legacy", lines(PLAIN + SOURCED[:1]), {"environment_routing_mode": "legacy", "environment_server_name": "env", "num_repeats": {"env": 3, "_default": 2}}
    yield "no_agent", lines([PLAIN[0], '{"responses_create_params":{}}']), {}
    yield "no_params", lines([PLAIN[0], '{"agent_ref":{"name":"x"}}']), {}
    yield "blank_line", lines([PLAIN[0], "", PLAIN[1]]), {}
    yield "broken_line", lines([PLAIN[0], '{"a":']), {}
    yield "not_an_object", lines([PLAIN[0], "[1]"]), {}
    yield "empty", "", {}
    yield "repeated_keys", lines(['{"a":1,"responses_create_params":{"t":1},"a":2,"responses_create_params":{"t":3,"u":4},"agent_ref":{"name":"x"}}']), {"responses_create_params": {"t": 9}}


SERVERS = OmegaConf.create({name: {"responses_api_agents": {"simple_agent": {}}} for name in ("alpha", "beta")})


def materialize(folder, text, options):
    options = dict(options)
    source = folder / "input.jsonl"
    source.write_bytes(text.encode())
    if "prompt" in options:
        (folder / "prompt.yaml").write_text(options.pop("prompt"))
        options["prompt_config"] = str(folder / "prompt.yaml")
    config = RolloutCollectionConfig(input_jsonl_fpath=str(source), output_jsonl_fpath="unused", **options)
    rows = RolloutCollectionHelper()._preprocess_rows_from_config(config)
    RolloutCollectionHelper.resolve_task_sources([row for row in rows if "_ng_environment_server" not in row], SERVERS)
    return [orjson.dumps(row).decode() for row in rows]


def main():
    with tempfile.TemporaryDirectory() as folder, open(sys.argv[1], "wb") as out:
        # A new folder for each case: prompt files are cached by path.
        for number, (name, text, options) in enumerate(cases()):
            place = Path(folder) / str(number)
            place.mkdir()
            line = {"name": name, "input": text, "options": options}
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    line["expected"] = materialize(place, text, options)
            except Exception as error:
                line["error"] = type(error).__name__
                print(name, type(error).__name__, error, file=sys.stderr)
            out.write(orjson.dumps(line) + b"\n")


main()
