"""Checks the JSON schemas of configurations and cluster files with a reference validator.

    RGYM=… RGYM_EXAMPLES=… python config_schema.py

Every configuration in the repository is accepted, wrong ones are rejected at the wrong key, and what a file may leave out or replace
by an interpolation is accepted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]

MODEL = {"entrypoint": "app.py", "openai_base_url": "http://127.0.0.1:8000/v1", "openai_model": "m"}
AGENT = {
    "entrypoint": "app.py",
    "model_server": {"type": "responses_api_models", "name": "policy_model"},
    "resources_server": {"type": "resources_servers", "name": "math"},
}


def agent(**keys):
    return {"a": {"responses_api_agents": {"simple_agent": {**AGENT, **keys}}}}


def model(**keys):
    return {"m": {"responses_api_models": {"openai_model": {**MODEL, **keys}}}}


def vllm(**keys):
    return {"m": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py", "base_url": "u", "model": "m", **keys}}}}


ACCEPTED = [
    {},
    agent(max_steps=4),
    agent(max_steps=None),
    agent(max_steps="${steps}"),
    agent(max_steps="???"),
    agent(max_steps="12"),
    agent(skip_verification="${oc.env:SKIP,false}"),
    agent(skip_verification="yes"),
    agent(tool_output_bytes_max={"search": 100, "_default": "${limit}"}),
    agent(model_server="${default_model}"),
    agent(resources_server={"_copy": "b.responses_api_agents.simple_agent.resources_server"}),
    agent(token_id_capture=False),
    agent(datasets=[{"name": "d", "type": "example", "jsonl_fpath": "d.jsonl", "more": 1}]),
    # A file that overrides one key of another file, and one that inherits from a server.
    {"a": {"responses_api_agents": {"simple_agent": {"max_steps": 3}}}},
    {"a": {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "_inherit_from": "b.responses_api_agents.simple_agent"}}}},
    {"a": {"_copy": "b", "responses_api_agents": {"simple_agent": {"max_steps": 3}}}},
    # A Python server reads keys that only it knows.
    {"a": {"responses_api_agents": {"swe_agents": {"entrypoint": "app.py", "anything": {"at": ["all"]}}}}},
    # Variables.
    {"policy_model_name": "m", "numbers": [1, 2], "nested": {"a": {"b": 1}}},
    {"head_server": {"host": "127.0.0.1", "port": 0}, "transport": "rdma, http", "require_transport": "rdma"},
    {"transport": ["shm", "http"], "num_repeats": {"a": 4, "_default": 1}},
    model(max_concurrent_requests="${oc.env:LIMIT,8}"),
    vllm(base_url=["u", "v"], use_completions_api=False),
]

REJECTED = [
    (agent(max_step=4), "max_step"),
    (agent(max_steps="many"), "max_steps"),
    (agent(max_steps=-1), "max_steps"),
    (agent(tool_errors="ignore"), "tool_errors"),
    (agent(skip_verification="maybe"), "skip_verification"),
    (agent(model_server="policy_model"), "model_server"),
    (agent(model_server={"type": "responses_api_model", "name": "m"}), "model_server"),
    (agent(model_server={"type": "responses_api_models", "name": "m", "nam": 1}), "model_server"),
    (agent(datasets=[{"name": "d", "type": "exemple", "jsonl_fpath": "d.jsonl"}]), "datasets"),
    (agent(port=70_000), "port"),
    ({"a": {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py"}}}}, "model_server"),
    ({"a": {"resources_servers": {"math": {"entrypoint": "app.py", "domain": "maths"}}}}, "domain"),
    ({"a": {"resources_servers": {"math": {"entrypoint": "app.py"}}}}, "domain"),
    (model(openai_model=3), "openai_model"),
    (model(openai_modle="m"), "openai_modle"),
    (model(retry_backoff_ms="soon"), "retry_backoff_ms"),
    (vllm(use_completions_api=True), "use_completions_api"),
    (vllm(reasoning_field="reason"), "reasoning_field"),
    ({"port_range_low": "low"}, "port_range_low"),
    ({"transport": "rmda"}, "transport"),
    ({"require_transport": ["rdma"]}, "require_transport"),
    ({"num_repeats": 0}, "num_repeats"),
    ({"environment_routing_mode": "any"}, "environment_routing_mode"),
]

CLUSTER = {"cluster": {"bundle_ct_per_node_list": [2]}}
CLUSTER_ACCEPTED = [CLUSTER, {**CLUSTER, "policy": {"load_balancing_strategy": "least_outstanding", "memory_limit": "8GB"}}]
CLUSTER_REJECTED = [
    ({}, "cluster"),
    ({"cluster": {"bundle_ct_per_node_list": 2}}, "bundle_ct_per_node_list"),
    ({**CLUSTER, "policy": {"memory_limt": 1}}, "memory_limt"),
    ({**CLUSTER, "policy": {"load_balancing_strategy": "any"}}, "load_balancing_strategy"),
]


def names(error):
    """The keys of an error and of its causes: those of the path, and those that a message quotes."""
    yield from (str(key) for key in error.absolute_path)
    yield error.message
    for cause in error.context or []:
        yield from names(cause)


def check(validator, accepted, rejected):
    for name, value in accepted:
        errors = [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(value)]
        assert not errors, f"{name} must be accepted: {errors}"
    for value, key in rejected:
        errors = list(validator.iter_errors(value))
        assert errors, f"must be rejected for {key}: {value}"
        named = [text for error in errors for text in names(error)]
        assert any(text == key or f"'{key}'" in text for text in named), f"{key} is not named: {named}"


def validator_of(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def main():
    files = sorted(ROOT.glob("examples/configs/**/*.yaml")) + sorted(ROOT.glob("tests/python/configs/**/*.yaml"))
    clusters = [path for path in files if path.name == "worker_groups.yaml"]
    files = [path for path in files if path not in clusters]
    assert len(files) > 5 and clusters, files
    read = [(path.name, yaml.safe_load(path.read_text())) for path in files]
    written = [(f"case {at}", value) for at, value in enumerate(ACCEPTED)]
    for program in (os.environ["RGYM"], os.environ["RGYM_EXAMPLES"]):
        printed = subprocess.run([program, "config", "schema"], check=True, capture_output=True, text=True, timeout=60)
        check(validator_of(json.loads(printed.stdout)), read + written, REJECTED)
    clusters = [(path.name, yaml.safe_load(path.read_text())) for path in [*clusters, ROOT / "examples/configs/cluster.json"]]
    written = [(f"cluster {at}", value) for at, value in enumerate(CLUSTER_ACCEPTED)]
    schema = json.loads((ROOT / "docs/reference/cluster.schema.json").read_text())
    check(validator_of(schema), clusters + written, CLUSTER_REJECTED)
    rejected = len(REJECTED) + len(CLUSTER_REJECTED)
    print(f"configuration schemas: {len(read)} files and {len(ACCEPTED)} cases accepted, {rejected} cases rejected")


if __name__ == "__main__":
    sys.exit(main())
