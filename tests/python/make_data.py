#!/usr/bin/env python3
"""Writes data/*.jsonl: 240 tasks for each of the five example environments, in their own row format.

usage: make_data.py        (run it again after a change; the files are kept in the repository)

Right and wrong outcomes come from the scripts that the task's text picks (script.py); some rows also ask for the
impossible. A few rows are written differently on purpose: text instead of a list as input, content in parts, sampling
options, metadata, fields that no server declares, a number above 2^53, two equal lines.
"""

import json
import random
from pathlib import Path

ROWS = 240
CITIES = (
    "Paris Tokyo Oslo Lima Cairo Quito Zürich Kyoto Accra Hanoi Lagos Turin Perth Delhi Seoul Porto Łódź Bogotá 北京 São_Paulo"
).split()


def function(name, parameters, description="", required=None):
    schema = {
        "type": "object",
        "properties": parameters,
        "required": list(parameters) if required is None else required,
        "additionalProperties": False,
    }
    return {"name": name, "parameters": schema, "strict": True, "type": "function", "description": description}


def vary(row, index):
    """The unusual spellings, the same share of them in each environment."""
    params = row["responses_create_params"]
    if index % 40 == 7:
        params["temperature"] = 0.7
        params["top_p"] = 1
        params["max_output_tokens"] = 512
    if index % 40 == 17:
        params["metadata"] = {"note": "Zürich ☂ \u2028", "empty": ""}
        params["parallel_tool_calls"] = False
    if index % 40 == 23:
        user = params["input"][-1]
        user["content"] = [{"type": "input_text", "text": user["content"]}]
    if index % 40 == 29:
        params["tool_choice"] = "auto"
        params["user"] = None
        row["note"] = {"not declared": [1, 2.50, None, True, 9007199254740993]}
    if index % 40 == 31:
        params["input"].insert(-1, {"role": "user", "content": "hello"})
        params["input"].insert(-1, {"role": "assistant", "content": "Hello, what can I do?"})
    return row


def weather_rows(rng):
    asks = [
        "what's it like in {}?",
        "going out in {} on day {n}",
        "humidity in {}?",
        "weather for {}, please",
        "how cold is it in {} at {n}:00",
    ]
    tool = function("get_weather", {"city": {"type": "string", "description": ""}})
    system = "You are a helpful personal assistant that aims to be helpful and reduce any pain points the user has."
    for index in range(ROWS):
        text = asks[index % len(asks)].format(rng.choice(CITIES).replace("_", " "), n=index) + f" (no. {index})"
        params = {"input": [{"content": system, "role": "developer"}, {"content": text, "role": "user"}], "tools": [tool]}
        if index % 80 == 11:
            params = {"input": text, "instructions": system, "tools": [tool]}
            yield {"responses_create_params": params}
        else:
            yield vary({"responses_create_params": params}, index)


def graded_rows(rng):
    asks = ["what's the weather in {}?", "how hot is it in {} on day {n}", "tell me the forecast for {}.", "is it raining in {} at {n}:00"]
    tool = function(
        "get_weather",
        {"city": {"type": "string", "description": "The city to get the weather for."}},
        "Get the current weather for a city.",
    )
    system = (
        "You are a helpful assistant. When the user asks about the weather, respond with exactly one get_weather tool call "
        "and no other text."
    )
    for index in range(ROWS):
        city = rng.choice(CITIES).replace("_", " ")
        text = asks[index % len(asks)].format(city, n=index) + f" (no. {index})"
        params = {"input": [{"content": system, "role": "developer"}, {"content": text, "role": "user"}], "tools": [tool]}
        row = {"responses_create_params": params, "expected_call": {"name": "get_weather", "arguments": {"city": city}}}
        if index % 30 == 3:
            row["expected_call"]["arguments"]["city"] = "Atlantis"
        if index % 60 == 14:
            row["expected_call"] = {"name": "get_weather"}
        if index % 60 == 44:
            del row["expected_call"]
        yield vary(row, index)


def counter_rows(rng):
    tools = [
        function("increment_counter", {"count": {"type": "integer", "description": ""}}),
        function("get_counter_value", {}),
    ]
    for index in range(ROWS):
        amounts = [rng.randrange(-9, 90) or 1 for _ in range(1 + index % 4)]
        start = rng.randrange(0, 50)
        if index % 60 == 9:
            start = 9007199254740993
        text = " then ".join(f"add {amount}" for amount in amounts) + f" then get the count (no. {index})"
        row = {
            "responses_create_params": {"input": [{"content": text, "role": "user"}], "tools": tools},
            "expected_count": start + sum(amounts) + (1 if index % 12 == 5 else 0),
            "initial_count": start,
        }
        yield vary(row, index)


GROUPS = {
    "Hot": ["Blazing", "Warm"],
    "Cold": ["Frosty", "Icy", "Chilly"],
    "Happy": ["Cheerful", "Pleased"],
    "Loud": ["Noisy", "Blaring", "Ear-splitting"],
    "Rich": ["Well-off"],
    "Quiet": ["Hushed", "Peaceful", "Low"],
    "Old": ["Historic", "Vintage", "Elderly", "Älter"],
    "Fast": ["Brisk", "Hasty"],
}


def synonym_rows(rng):
    def returns(name, kind, text):
        inner = {"type": kind, "title": name.replace("_", " ").title(), "description": text}
        schema = {"properties": {name: inner}, "type": "object", "required": [name]}
        return f"\nThis operation returns a value that conforms to the following JSON Schema: {json.dumps(schema)}\n"

    tools = [
        function(
            "get_synonym_value",
            {"synonym": {"type": "string", "title": "Synonym", "description": "The synonym to get the value for."}},
            "Get the synonym value for a synonym." + returns("synonym_value", "integer", "The value for this synonym."),
        ),
        function(
            "extract_synonym_values",
            {"synonym_values": {"items": {"type": "integer"}, "type": "array", "title": "Synonym Values", "description": "The values."}},
            "Extract the synonym values you retrieved." + returns("success", "boolean", "Success."),
        ),
    ]
    for index in range(ROWS):
        pairs = [(term, synonym) for term, words in GROUPS.items() for synonym in words]
        rng.shuffle(pairs)
        term = rng.choice(list(GROUPS))
        expected = [synonym for of, synonym in pairs if of == term]
        lines = "\n".join(f"The term '{of}' has a synonym '{synonym}'." for of, synonym in pairs)
        system = (
            "# Instructions\nYou extract values. Find the term that the user's question is about, get the value of each of its synonyms in "
            f"the order of the list, then extract all of them.\n\n# Available synonyms\n{lines}\n"
        )
        text = f"Why would somebody say that a place is {term.lower()}? (no. {index})"
        params = {
            "input": [{"role": "system", "content": system}, {"role": "user", "content": text}],
            "tools": tools,
            "parallel_tool_calls": False,
        }
        values = [sum(map(ord, word)) for word in expected]
        if index % 15 == 6:
            values = values[::-1] + [1]
        yield vary(
            {
                "id": index,
                "responses_create_params": params,
                "expected_synonyms": expected,
                "expected_synonym_values": values,
                "minefield_label": term,
                "minefield_label_value": sum(map(ord, term)),
            },
            index,
        )


def conversation_rows(rng):
    """Of no, some and more follow-ups than the agent's limit of turns; an empty one is no message."""
    for index in range(ROWS):
        cities = [rng.choice(CITIES).replace("_", " ") for _ in range(index % 8)]
        follow_ups = [f"And {city}? (no. {index})" for city in cities]
        if index % 20 == 13:
            follow_ups[0] = ""
        last = follow_ups[-1] if follow_ups else f"no. {index}"
        row = {
            "responses_create_params": {"input": [{"role": "user", "content": f"Name a city. (no. {index})"}]},
            "follow_ups": follow_ups,
            "expected_answer": ["", last.upper(), "Atlantis"][index % 3],
        }
        if index % 80 == 11:
            row["responses_create_params"]["input"] = f"Name a city. (no. {index})"
            yield row
        else:
            yield vary(row, index)


def main():
    folder = Path(__file__).resolve().parent / "data"
    folder.mkdir(exist_ok=True)
    sources = {
        "example_single_tool_call": weather_rows,
        "example_multi_step": synonym_rows,
        "example_session_state_mgmt": counter_rows,
        "example_tool_call_multireward": graded_rows,
        "example_multi_turn_gymnasium": conversation_rows,
    }
    for name, rows in sources.items():
        lines = [json.dumps(row, ensure_ascii=index % 2 == 0) for index, row in enumerate(rows(random.Random(name)))]
        lines[-1] = lines[1]  # equal lines are one task with two rollouts
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
