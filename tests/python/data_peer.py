#!/usr/bin/env python3
"""The reference implementations of the formats that a collection reads and writes beside JSONL.

usage: data_peer.py scalars DIR     what TensorBoard's own reader finds in the directory, as one JSON object: tag -> [[step, value], …]

       data_peer.py parquet DIR     writes Parquet files with Arrow's own writer, and prints their rows as JSON, one per line

Run it with the interpreter that .ci/python-data prints.
"""

import json
import sys


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [[event.step, event.value] for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def parquet(folder):
    """Two shards of rows with every kind of column; returns the rows as a collection must read them."""
    import datetime
    import decimal
    from pathlib import Path

    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("call_id", pa.string())])
    params = pa.struct([("input", pa.list_(message)), ("temperature", pa.float64()), ("tools", pa.list_(pa.string()))])
    schema = pa.schema(
        [
            ("responses_create_params", params),
            ("agent_ref", pa.struct([("name", pa.string())])),
            ("big", pa.int64()),
            ("unsigned", pa.uint64()),
            ("small", pa.int8()),
            ("double", pa.float64()),
            ("single", pa.float32()),
            ("half", pa.float16()),
            ("flag", pa.bool_()),
            ("text", pa.string()),
            ("kind", pa.dictionary(pa.int32(), pa.string())),
            ("bytes", pa.binary()),
            ("price", pa.decimal128(20, 2)),
            ("whole", pa.decimal128(38, 0)),
            ("day", pa.date32()),
            ("hour", pa.time64("us")),
            ("utc_ms", pa.timestamp("ms", "UTC")),
            ("utc_us", pa.timestamp("us", "UTC")),
            ("naive_us", pa.timestamp("us")),
            ("naive_ns", pa.timestamp("ns")),
            ("json", pa.json_(pa.string())),
            ("nested", pa.list_(pa.list_(pa.int32()))),
            ("one", pa.list_(pa.struct([("x", pa.int64())]))),
            ("large", pa.large_list(pa.large_string())),
            ("map", pa.map_(pa.string(), pa.int64())),
            ("numbers", pa.map_(pa.int32(), pa.string())),
            ("list_of_maps", pa.list_(pa.map_(pa.string(), pa.struct([("y", pa.float64())])))),
        ]
    )
    agent = {"name": "agent"}
    moment = datetime.datetime(2024, 2, 29, 23, 59, 58, 123456)
    utc = moment.replace(tzinfo=datetime.timezone.utc)
    full = {
        "responses_create_params": {
            "input": [{"role": "user", "content": "ä \"q\"\n", "call_id": None}, {"role": "tool", "content": None, "call_id": "c"}],
            "temperature": 0.1,
            "tools": [],
        },
        "agent_ref": agent,
        "big": 2**63 - 1,
        "unsigned": 2**64 - 1,
        "small": -128,
        "double": 1e300,
        "single": 0.1,
        "half": 0.5,
        "flag": True,
        "text": "",
        "kind": "b",
        "bytes": b"\x00\xff",
        "price": decimal.Decimal("-0.05"),
        "whole": decimal.Decimal("12345678901234567890123456789012345678"),
        "day": moment.date(),
        "hour": moment.time(),
        "utc_ms": utc.replace(microsecond=123000),
        "utc_us": utc,
        "naive_us": moment,
        "naive_ns": moment,
        "json": '{"a": [1, null,\n 1E5]}',
        "nested": [[1, None], [], None],
        "one": [{"x": 1}, None, {"x": None}],
        "large": ["x", None],
        "map": [("k", 1), ("", None)],
        "numbers": [(-7, "v")],
        "list_of_maps": [[("k", {"y": 1.5})], [], None],
    }
    expected = dict(full)
    expected["responses_create_params"] = {
        "input": [{"role": "user", "content": "ä \"q\"\n"}, {"role": "tool", "call_id": "c"}],
        "temperature": 0.1,
        "tools": [],
    }
    expected.update(
        single=0.10000000149011612,
        bytes="AP8=",
        # The digits of a decimal are compared as a text.
        price="-0.05",
        whole="12345678901234567890123456789012345678",
        day="2024-02-29",
        hour="23:59:58.123456",
        utc_ms="2024-02-29T23:59:58.123Z",
        utc_us="2024-02-29T23:59:58.123456Z",
        naive_us="2024-02-29T23:59:58.123456",
        naive_ns="2024-02-29T23:59:58.123456000",
        json={"a": [1, None, 1e5]},
        one=[{"x": 1}, None, {}],
        map={"k": 1, "": None},
        numbers={"-7": "v"},
        list_of_maps=[{"k": {"y": 1.5}}, {}, None],
    )
    # All that may be absent is null; what is not finite is null too.
    bare = {key: None for key in full} | {"responses_create_params": {"input": []}, "agent_ref": agent, "double": float("nan")}
    shards = [[full, bare], [bare], [full]]
    for number, (rows, codec) in enumerate(zip(shards, ["snappy", "zstd", "none"])):
        table = pa.Table.from_pylist(rows, schema)
        name = f"train-{number:05}-of-{len(shards):05}.parquet"
        pq.write_table(table, Path(folder) / name, compression=codec, row_group_size=1, data_page_version=f"{1 + number % 2}.0")
    gone = {"responses_create_params": {"input": []}, "agent_ref": agent, "double": None}
    return [expected if row is full else gone for rows in shards for row in rows]


def main():
    match sys.argv[1:]:
        case ["scalars", folder]:
            print(json.dumps(scalars(folder)))
        case ["parquet", folder]:
            for row in parquet(folder):
                print(json.dumps(row))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
