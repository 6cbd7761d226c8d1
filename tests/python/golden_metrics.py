"""Writes gym-client/tests/data/metrics/*.jsonl with what NeMo Gym 0.7.0 computes.

Run with an interpreter that has nemo-gym 0.7.0 installed:

    python tests/python/golden_metrics.py gym-client/tests/data/metrics
"""

import json
import random
import sys
import warnings
from pathlib import Path

import orjson
from nemo_gym.reward_profile import (
    add_avg_sample_std_dev,
    compute_aggregate_metrics,
    compute_pass_majority_metrics,
    compute_subset_metrics,
    highest_k_metrics,
)
from scipy import stats

warnings.simplefilter("ignore")


def row(task, rollout, **fields):
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, **fields}


def stripped(result):
    """What the collector leaves of a result before it asks for the statistics."""
    dropped = ("response", "responses_create_params", "ng_agent_observations", "ng_model_call_capture", "ng_trajectory")
    entry = {k: v for k, v in result.items() if k not in dropped}
    response = result.get("response") or {}
    kept = {k: response[k] for k in ("usage", "incomplete_details") if response.get(k) is not None}
    if kept:
        entry["response"] = kept
    return entry


def usage(n):
    return {"input_tokens": 10 + n, "output_tokens": 3 * n, "total_tokens": 10 + 4 * n, "input_tokens_details": {"cached_tokens": n}}


def full(task, rollout, rng):
    n = rng.randrange(50)
    return row(
        task,
        rollout,
        responses_create_params={"input": "Größe 😀", "temperature": 0.5},
        response={"id": "r", "output": [{"type": "message"}], "usage": usage(n), "incomplete_details": {"reason": "max"} if n % 3 == 0 else None},
        reward=rng.choice([0.0, 1.0, 0.25]),
        set_overlap=rng.random(),
        accuracy=rng.random() < 0.5,
        note="text",
        ng_trajectory={"turns": []},
        ng_perf={
            "prompt_tokens": n,
            "completion_tokens": n + 1,
            "num_turns": 1 + n % 4,
            "total_latency_ms": 100.5 + n,
            "token_observability_coverage": n % 2,
        },
    )


def cases():
    rng = random.Random(7)
    yield "empty", []
    yield "single_rollout", [row(0, 0, reward=1.0, steps=3)]
    yield "single_task", [row(0, k, reward=[1.0, 0.0, 0.5][k]) for k in range(3)]
    yield "single_repeat", [row(t, 0, reward=rng.random(), steps=t) for t in range(6)]
    yield "whole_numbers", [row(t, k, reward=t ^ k, steps=3 * t - k) for t in range(3) for k in range(2)]
    yield "missing_rollouts", [row(t, k, reward=rng.random()) for t in range(5) for k in range(4) if (t * 4 + k) % 3]
    yield "uneven_repeats", [row(t, k, reward=rng.random(), n=k) for t in range(6) for k in range(1 + t % 4)]
    yield "bools_and_nulls", [
        row(0, 0, reward=1.0, correct=True, score=None, late=2),
        row(0, 1, reward=None, correct=False, score=0.5),
        row(1, 0, reward=0.0, correct=None, score="high"),
        row(1, 1, reward=0.5, correct=True),
    ]
    yield "column_in_one_row", [row(0, 0, reward=1.0), row(0, 1, reward=0.0, extra=5), row(1, 0, reward=0.5), row(1, 1, reward=1.0)]
    yield "no_numbers", [row(0, 0, note="a"), row(0, 1, note="b")]
    yield "constant", [row(t, k, reward=0.1) for t in range(3) for k in range(3)]
    yield "multi_reward", [
        row(t, k, reward=0.5, reward_components={"a": 1.0}, format_reward=float(k), answer_reward=rng.random())
        for t in range(4)
        for k in range(3)
    ]
    yield "unicode", [row(t, k, reward=float(k), **{"größe": t, "😀": 0.5, "ﬀ": 2, "Z": 1, "a": k}) for t in range(2) for k in range(2)]
    yield "usage_shadows_fields", [
        row(0, 0, total_tokens=1, reward=1.0, _hidden=3, response={"usage": {"total_tokens": 9, "reward": 4, "_x": 2}}),
        row(0, 1, total_tokens=1, reward=1.0, response={"usage": {"total_tokens": None, "zz": True}}),
    ]
    yield "duplicates", [row(0, 0, reward=1.0), row(0, 0, reward=0.0)]
    yield "masked", [row(t, k, reward=rng.random(), mask_sample=(t + k) % 3 == 0) for t in range(4) for k in range(3)]
    yield "fully_masked_task", [row(t, k, reward=rng.random(), mask_sample=t == 1) for t in range(3) for k in range(2)]
    yield "all_masked", [row(0, k, reward=1.0, mask_sample=True) for k in range(2)]
    yield "sparse_indices", [row(t, k, reward=rng.random()) for t in (90, 7, 1000000) for k in (4, 0)]
    yield "without_indices", [{"reward": 0.5}]
    yield "excluded_suffixes", [row(t, k, **{"x/p5": 1.0 * k, "y_ci_lower": 2.0, "z/max": k, "std/q": 1, "ok": k}) for t in range(2) for k in range(2)]
    yield "forms_of_numbers", [row(0, 0, reward=1e5, small=1e-7), row(0, 1, reward=-0.0, small=123456789012)]
    yield "perf", [full(t, k, rng) for t in range(3) for k in range(3)] + [row(3, 0, reward=1.0)]
    yield "perf_sparse", [row(0, 0, reward=1.0, ng_perf={"num_turns": 0, "completion_tokens": 1.5}), row(0, 1, reward=1.0, ng_perf=None)]
    shuffled = [full(t, k, rng) for t in range(10) for k in range(4)]
    rng.shuffle(shuffled)
    yield "completion_order", shuffled


def write(path, lines):
    with path.open("wb") as f:
        for line in lines:
            f.write(orjson.dumps(line) + b"\n")
    print(path)


def aggregate_lines():
    for name, rows in cases():
        ordered = sorted(rows, key=lambda r: (r.get("_ng_task_index", 0), r.get("_ng_rollout_index", 0)))
        request = [stripped(r) for r in ordered]
        line = {"name": name, "rows": rows, "request": {"verify_responses": request}}
        try:
            line["expected"] = json.loads(compute_aggregate_metrics(request).model_dump_json())
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"
        yield line


def custom_lines():
    """A benchmark's own metrics, merged into the others."""
    rows = [row(t, k, reward=float(t == k), mask_sample=t == 2 and k == 0) for t in range(3) for k in range(2)]
    own = {"mean/own": 0.5, "mean/reward": 7.0, "pass@1/accuracy": 50.0}
    per_task = [{"_ng_task_index": 1, "own": [1, "x"], "num_rollouts": 9}, {"_ng_task_index": 5, "own": 1}]
    result = compute_aggregate_metrics(rows, compute_metrics_fn=lambda tasks: {**own, "per_task_metrics": per_task})
    yield {
        "request": {"verify_responses": rows},
        "overall": own,
        "per_task": per_task,
        "expected": json.loads(result.model_dump_json()),
    }


def pass_at_k_lines():
    rng = random.Random(11)

    def tasks(sizes, scorer, answers):
        return [
            [{**scorer(), "answer": rng.choice(answers), "level": ["easy", "hard", None][t % 3]} for _ in range(n)]
            for t, n in enumerate(sizes)
        ]

    binary = lambda: {"reward": float(rng.randrange(2))}  # noqa: E731
    real = lambda: {"reward": rng.random(), "other": rng.random() < 0.5}  # noqa: E731
    partial = lambda: {"reward": rng.random()} if rng.random() < 0.7 else {"other": 1.0}  # noqa: E731
    for name, grouped in (
        ("none", []),
        ("binary", tasks([4, 4, 4], binary, ["a", "b", None])),
        ("uneven", tasks([1, 5, 3, 2], binary, ["a", None])),
        ("real", tasks([3, 3, 3, 3], real, ["x", "y"])),
        ("partial", tasks([2, 4, 3], partial, ["x", None])),
        ("many", tasks([64] * 5, binary, ["a", "b", "c"])),
    ):
        score = lambda r: {k: r[k] for k in ("reward", "other") if k in r}  # noqa: E731
        for answers in (False, True):
            key = "answer" if answers else None
            metrics, scores, names, k = compute_pass_majority_metrics(grouped, score, key)
            add_avg_sample_std_dev(metrics, scores, names, k)
            yield {
                "name": name,
                "answers": answers,
                "tasks": grouped,
                "metrics": metrics,
                "subsets": compute_subset_metrics(grouped, "level", score, key),
                "highest": highest_k_metrics(metrics, "pass@1[avg-of-{k}]", exclude_names=["no_answer"]),
            }


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "aggregate.jsonl", aggregate_lines())
    write(folder / "custom.jsonl", custom_lines())
    write(folder / "pass_at_k.jsonl", pass_at_k_lines())
    degrees = [*range(1, 60), 99, 100, 500, 999, 1000, 1999, 2000, 2001, 2002, 5000, 10000, 123457, 1000000]
    write(folder / "student_t.jsonl", ({"degrees": n, "t": float(stats.t.ppf(0.975, n))} for n in degrees))


main()
