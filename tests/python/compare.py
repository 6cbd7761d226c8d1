#!/usr/bin/env python3
"""Compares what two collections wrote, as the contract between the two implementations asks for it.

usage: compare.py rows A.jsonl B.jsonl [--ids]         rollouts: equal rewards, equal rows
       compare.py materialized A.jsonl B.jsonl         materialized inputs: equal as JSON, key order and line order included
       compare.py aggregate A.json B.json              aggregate metrics: equal, numbers to 1e-9
       compare.py collection A.jsonl B.jsonl [--ids]   all three, for the files that belong to two outputs
       compare.py self-test

Run it with the interpreter that has nemo-gym: which keys have a default, and which, is asked of its own models.

Rows are matched by (_ng_task_index, _ng_rollout_index), so their order plays no part; neither does the order of keys
within one. A key that is missing equals a key at its schema's default: a server that expands defaults and one that keeps
the row's own text write equal rows. Only keys with a declared default in the model that NeMo Gym itself picks for the
value are treated so; a missing key without one, another type (true is not 1) or an unknown extra key is a difference.
Timestamps count for nothing, nor does the course of an episode, which only our collector writes. Of ids (id, call_id) only what they link counts, unless --ids asks for equal ones.
"""

import argparse
import collections
import copy
import json
import math
import sys
from pathlib import Path

TOLERANCE = 1e-9
SHOWN = 12
IDS = ("id", "call_id")
TIMES = ("created_at", "completed_at")
EPISODE = "_gym_episode"
MISSING = "(missing)"


class Unreadable(Exception):
    """A file that is not what it should be; the text names file and line."""


def read_rows(path, pairs=False):
    rows = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line:
            try:
                rows.append(json.loads(line, object_pairs_hook=list_of_pairs if pairs else None))
            except ValueError as error:
                raise Unreadable(f"{path}:{number}: {error}") from error
    return rows


def list_of_pairs(pairs):
    return ("object", tuple(pairs))


def keyed(rows, path):
    found = {}
    for number, row in enumerate(rows, 1):
        try:
            key = (row["_ng_task_index"], row["_ng_rollout_index"])
        except (TypeError, KeyError) as error:
            raise Unreadable(f"{path}:{number}: a row without {error}") from error
        if key in found:
            raise Unreadable(f"{path}:{number}: a second row for task {key[0]}, rollout {key[1]}")
        found[key] = row
    return found


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def differences(left, right, path="", tolerance=0.0):
    """Yields (path, left, right) for each place where two JSON values differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            if key not in left or key not in right:
                yield f"{path}.{key}", left.get(key, MISSING), right.get(key, MISSING)
            else:
                yield from differences(left[key], right[key], f"{path}.{key}", tolerance)
    elif isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            yield f"{path}.length", len(left), len(right)
        for index, (one, other) in enumerate(zip(left, right)):
            yield from differences(one, other, f"{path}[{index}]", tolerance)
    elif is_number(left) and is_number(right):
        if left != right and not (math.isnan(left) and math.isnan(right)):
            if not abs(left - right) <= tolerance * max(1.0, abs(left), abs(right)):
                yield path, left, right
    elif type(left) is not type(right) or left != right:
        yield path, left, right


def without_defaults(raw, typed):
    """`raw` without the keys that stand at the default of the model that `typed`, its validated form, belongs to."""
    from pydantic import BaseModel

    if isinstance(raw, dict) and isinstance(typed, BaseModel):
        fields = {}
        for name, field in type(typed).model_fields.items():
            fields[field.alias or name] = (name, field)
            fields.setdefault(name, (name, field))
        kept = {}
        for key, value in raw.items():
            name, field = fields.get(key, (key, None))
            if field is not None and not field.is_required():
                default = field.get_default(call_default_factory=True)
                if type(default) is type(value) and default == value:
                    continue
            kept[key] = without_defaults(value, getattr(typed, name, None))
        return kept
    if isinstance(raw, dict) and isinstance(typed, dict):
        return {key: without_defaults(value, typed.get(key)) for key, value in raw.items()}
    if isinstance(raw, list) and isinstance(typed, (list, tuple)) and len(raw) == len(typed):
        return [without_defaults(one, other) for one, other in zip(raw, typed)]
    return raw


def linked_ids(value, names):
    """Replaces each id by the order in which it first appears, so that only which ids are the same one is left."""
    if isinstance(value, dict):
        out = {}
        for key, inner in value.items():
            if key in IDS and isinstance(inner, str):
                out[key] = names.setdefault(inner, f"id {len(names)}")
            else:
                out[key] = linked_ids(inner, names)
        return out
    if isinstance(value, list):
        return [linked_ids(inner, names) for inner in value]
    return value


def canonical(row, ids):
    from nemo_gym.base_resources_server import BaseVerifyResponse
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from pydantic import ValidationError

    row = copy.deepcopy(row)
    row.pop(EPISODE, None)
    for name, field in BaseVerifyResponse.model_fields.items():
        if not field.is_required() and name in row and row[name] is field.get_default():
            del row[name]
    models = {"responses_create_params": NeMoGymResponseCreateParamsNonStreaming, "response": NeMoGymResponse}
    for key, model in models.items():
        if key in row:
            try:
                row[key] = without_defaults(row[key], model.model_validate(row[key]))
            except ValidationError as error:
                # Left as it is, with the reason on top of the differences that follow from it.
                row[key] = {"(against the schema)": str(error), **row[key]} if isinstance(row[key], dict) else str(error)
    if isinstance(row.get("response"), dict):
        for key in TIMES:
            row["response"].pop(key, None)
        if not ids:
            # Sorted first: the order of keys must not decide which id is seen first.
            row["response"] = linked_ids(json.loads(json.dumps(row["response"], sort_keys=True)), {})
    return row


def compare_rows(left_path, right_path, ids=False):
    left, right = keyed(read_rows(left_path), left_path), keyed(read_rows(right_path), right_path)
    found = []
    for key in sorted(left.keys() | right.keys()):
        place = f"task {key[0]} rollout {key[1]}"
        if key not in left or key not in right:
            found.append((place, MISSING if key not in left else "a row", MISSING if key not in right else "a row"))
            continue
        one, other = canonical(left[key], ids), canonical(right[key], ids)
        # The reward first, whatever else differs: it is what a reader looks for.
        every = sorted(differences(one, other), key=lambda item: item[0] != ".reward")
        found.extend((place + " " + path, a, b) for path, a, b in every)
    return found, len(left)


def compare_materialized(left_path, right_path):
    left, right = read_rows(left_path, pairs=True), read_rows(right_path, pairs=True)
    plain = read_rows(left_path), read_rows(right_path)
    found = []
    if len(left) != len(right):
        found.append(("lines", len(left), len(right)))
    for number, (one, other) in enumerate(zip(left, right), 1):
        if not same(one, other):
            inner = list(differences(plain[0][number - 1], plain[1][number - 1]))
            found.extend((f"line {number} {path}", a, b) for path, a, b in inner)
            if not inner:
                found.append((f"line {number}", f"keys {key_order(one)}", f"keys {key_order(other)}"))
    return found, len(left)


def same(left, right):
    """Equality of values read with list_of_pairs; true and 1 are two things."""
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if is_number(left) and is_number(right):
        return left == right
    return type(left) is type(right) and left == right


def key_order(value):
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "object":
        return "{" + " ".join(f"{key}{key_order(inner)}" for key, inner in value[1]) + "}"
    if isinstance(value, list):
        return "[" + "".join(key_order(inner) for inner in value) + "]"
    return ""


def compare_aggregate(left_path, right_path):
    sides = []
    for path in (left_path, right_path):
        try:
            entries = json.loads(Path(path).read_text(encoding="utf-8"))
            # The collector's own count, which NeMo Gym's does not write.
            entries = [{key: entry[key] for key in entry if key != "_gym_coverage"} for entry in entries]
            sides.append(sorted(entries, key=lambda entry: json.dumps(entry["agent_ref"], sort_keys=True)))
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise Unreadable(f"{path}: no list of aggregate metrics: {error!r}") from error
    return list(differences(*sides, tolerance=TOLERANCE)), len(sides[0])


def beside(output, suffix):
    output = Path(output)
    return output.with_name(output.stem + suffix)


def report(title, found, count, left, right):
    """Prints one line when all is equal, else the places: the first few in full, then how often each kind of place."""
    if not found:
        print(f"equal    {title}: {count} compared")
        return True
    print(f"DIFFERS  {title}: {len(found)} places\n  A {left}\n  B {right}")
    for path, one, other in found[:SHOWN]:
        print(f"  {path}\n    A {shorten(one)}\n    B {shorten(other)}")
    if len(found) > SHOWN:
        kinds = collections.Counter(kind_of(path) for path, _, _ in found)
        print("  all places, by kind:")
        for kind, times in kinds.most_common(30):
            print(f"    {times:6} x {kind}")
    return False


def kind_of(path):
    for digit in "0123456789":
        path = path.replace(digit, "#")
    while "##" in path:
        path = path.replace("##", "#")
    return path


def shorten(value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else text[:300] + f" … ({len(text)} characters)"


def compare(kind, left, right, ids=False, title=None):
    """Compares and prints; the kind is one of rows, materialized, aggregate."""
    title = title or kind
    functions = {"materialized": compare_materialized, "aggregate": compare_aggregate}
    try:
        found, count = compare_rows(left, right, ids) if kind == "rows" else functions[kind](left, right)
    except Unreadable as error:
        print(f"DIFFERS  {title}: {error}")
        return False
    if count == 0 and not found:
        print(f"DIFFERS  {title}: both are empty")
        return False
    return report(title, found, count, left, right)


def compare_collection(left, right, ids=False, title="collection"):
    results = [
        compare("rows", left, right, ids, f"{title}: rows"),
        compare(
            "materialized",
            beside(left, "_materialized_inputs.jsonl"),
            beside(right, "_materialized_inputs.jsonl"),
            title=f"{title}: materialized inputs",
        ),
        compare(
            "aggregate",
            beside(left, "_aggregate_metrics.json"),
            beside(right, "_aggregate_metrics.json"),
            title=f"{title}: aggregate metrics",
        ),
    ]
    return all(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["rows", "materialized", "aggregate", "collection", "self-test"])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--ids", action="store_true", help="ids must be equal, not only link the same items")
    arguments = parser.parse_args()
    if arguments.kind == "self-test":
        import compare_test

        return compare_test.main()
    if len(arguments.files) != 2:
        parser.error("two files to compare, please")
    if arguments.kind == "collection":
        return 0 if compare_collection(*arguments.files, arguments.ids) else 1
    return 0 if compare(arguments.kind, *arguments.files, arguments.ids) else 1


if __name__ == "__main__":
    sys.exit(main())
