"""What the mock model says: a pure function of the conversation.

The model has no memory and no randomness. The digest of the task's text (and of the per-repeat seed, when there is one)
picks a script; how many tool outputs the conversation already holds says how far the script has come; what those outputs
say goes into later turns. So two drivers that send equal conversations get equal answers, and a tool that answers
differently shows up in the rows. Nulls, key order and item ids of the request play no part.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field


@dataclass
class Conversation:
    """The parts of a request that the answer may depend on."""

    system: str = ""
    user: str = ""
    seed: str = ""
    tools: tuple = ()
    outputs: list = field(default_factory=list)

    def digest(self, *more):
        text = json.dumps([self.system, self.user, self.seed, self.tools, self.outputs, more], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def choice(self):
        """Two numbers that stay the same over all turns of one rollout: which script, and which variant of it."""
        raw = hashlib.sha256(f"{self.user}\x00{self.seed}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(raw[:4], "big"), int.from_bytes(raw[4:8], "big")


@dataclass
class Turn:
    """One model answer: items are ("call", name, arguments text), ("text", text) or ("think", text)."""

    items: list
    incomplete: str | None = None
    usage: bool = True


def call(name, arguments):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ("call", name, text)


def say(text):
    return Turn([("text", text)])


# Each makes the tool loop report an "invalid tool call arguments" of another kind; none is JSON to a strict reader.
UNPARSABLE = [
    '{"city": "Par',
    "{'city': 'Paris'}",
    '{"city": Paris}',
    '{"city" "Paris"}',
    '{"city": "Paris",}',
    '{"city": "Paris"} and more',
    '{"city": "Pa\nris"}',
    '{"city": "Pa\\qris"}',
    '{"city": "\\u12"}',
    '{"city": ',
    "[1, 2",
    "nul",
    "{",
    "get_weather(city=Paris)",
    "Zürich: {",
    " ",
    "",
]

# JSON, but no object: what a tool call with such arguments puts on the wire differs from case to case.
NO_OBJECT = ["[]", "null", "3", '"Paris"', "[1]", "true", "0", "false", '""']


def city_of(user):
    found = re.search(r"(?:in|for|of) ([^\W\d_][^?,.!()]*?)(?: on day| at|[?,.!(]|$)", user)
    return found.group(1).strip() if found else "Nowhere"


def last_output(conversation):
    return conversation.outputs[-1] if conversation.outputs else ""


def weather(conversation, variant):
    """Scripts of the single tool call environment, name -> turns."""
    city = city_of(conversation.user)
    end = say(f"It said: {last_output(conversation)}")
    right = Turn([call("get_weather", {"city": city})])
    bad = UNPARSABLE[variant % len(UNPARSABLE)]
    return {
        "right": [right, end],
        "right_with_thought": [Turn([("think", "I should look."), ("text", "Let me look."), right.items[0]]), end],
        "no_tool": [say("I would rather not say.")],
        "missing_argument": [Turn([call("get_weather", {"town": city})]), end],
        "argument_of_wrong_type": [Turn([call("get_weather", {"city": [7, None, {"a": city}, ["x"]][variant % 4]})]), end],
        "argument_null": [Turn([call("get_weather", {"city": None})]), end],
        "extra_argument": [Turn([call("get_weather", {"city": city, "unit": "C", "days": 1e2})]), end],
        "unknown_tool": [Turn([call("get_forecast", {"city": city})]), end],
        "unknown_tool_then_right": [Turn([call("weather", {})]), right, end],
        "unparsable": [Turn([call("get_weather", bad)]), end],
        "unparsable_then_right": [Turn([call("get_weather", bad)]), right, end],
        "no_object": [Turn([call("get_weather", NO_OBJECT[variant % len(NO_OBJECT)])]), end],
        "no_arguments": [Turn([call("get_weather", {})]), end],
        "several_calls": [
            Turn([right.items[0], call("get_time", {}), call("get_weather", bad), call("get_weather", {"city": "Oslo ☂"})]),
            end,
        ],
        "many_steps": [right] * (3 + variant % 4) + [end],
        "cut_off_text": [Turn([("text", "The weather in")], incomplete="max_output_tokens")],
        "cut_off_call": [Turn([right.items[0]], incomplete="max_output_tokens")],
        "filtered": [right, Turn([("text", "")], incomplete="content_filter")],
        "empty": [Turn([])],
        "without_usage": [Turn([("text", "Cold.")], usage=False)],
        "empty_without_usage": [right, Turn([], usage=False)],
        "thought_only": [Turn([("think", "Hm.")])],
        "escapes": [Turn([call("get_weather", '{"city": "Z\\u00fcrich \\ud83c\\udf02 \\"quoted\\" \\\\ \\/ \\t"}')]), end],
    }


def counter(conversation, variant):
    """Scripts of the session state environment."""
    amounts = [int(number) for number in re.findall(r"add (-?\d+)", conversation.user)] or [1]
    add = [call("increment_counter", {"count": amount}) for amount in amounts]
    steps = [Turn([item]) for item in add]
    read = Turn([call("get_counter_value", {})])
    end = say(f"The count: {last_output(conversation)}")
    wrong_type = ["five", "", [1], {"n": 1}, 2.5, None, "1.5", {}][variant % 8]
    lax = [str(amounts[0]), float(amounts[0]), f" {amounts[0]} ", f"+{amounts[0]}"][variant % 4]
    bad = UNPARSABLE[variant % len(UNPARSABLE)]
    return {
        "right": [*steps, read, end],
        "right_in_one_turn": [Turn([*add, *read.items]), end],
        "right_without_reading": [*steps, end],
        "no_tool": [say("I count nothing.")],
        "wrong_amount": [Turn([call("increment_counter", {"count": amounts[0] + 1})]), *steps[1:], read, end],
        "one_too_few": [*steps[:-1], read, end],
        "one_too_many": [*steps, steps[0], read, end],
        "added_as_wrong_type": [Turn([call("increment_counter", {"count": wrong_type})]), *steps[1:], read, end],
        "wrong_type_then_right": [Turn([call("increment_counter", {"count": wrong_type})]), *steps, read, end],
        "added_as_text_or_float": [Turn([call("increment_counter", {"count": lax})]), *steps[1:], read, end],
        "added_true": [Turn([call("increment_counter", {"count": True})]), *steps, read, end],
        "missing_argument": [Turn([call("increment_counter", {"amount": 1})]), *steps, read, end],
        "unknown_tool": [Turn([call("decrement_counter", {"count": 1})]), *steps, read, end],
        "unparsable_then_right": [Turn([call("increment_counter", bad)]), *steps, read, end],
        "no_object": [Turn([call("increment_counter", NO_OBJECT[variant % len(NO_OBJECT)])]), *steps, read, end],
        "read_with_arguments": [*steps, Turn([call("get_counter_value", {"which": "all"})]), end],
        "read_between": [steps[0], read, *steps[1:], read, end],
        "cut_off_first": [Turn([add[0]], incomplete="max_output_tokens")],
        "cut_off_last": [*steps[:-1], Turn([add[-1]], incomplete="max_output_tokens")],
        "empty_at_end": [*steps, Turn([])],
    }


def synonyms(conversation, variant):
    """Scripts of the multi-step environment. Every extraction that stands last is well formed (its verifier insists)."""
    pairs = re.findall(r"The term '([^']*)' has a synonym '([^']*)'", conversation.system)
    words = re.findall(r"[a-z]+", conversation.user.lower())
    term = next((term for term, _ in pairs if term.lower() in words), "")
    wanted = [synonym for of, synonym in pairs if of == term]
    values = []
    for output in conversation.outputs:
        try:
            values.append(int(json.loads(output)["synonym_value"]))
        except (ValueError, KeyError, TypeError):
            pass
    ask = [call("get_synonym_value", {"synonym": word}) for word in wanted]
    steps = [Turn([item]) for item in ask]

    def extract(numbers):
        return Turn([call("extract_synonym_values", {"synonym_values": numbers})])

    end = say(f"Extracted: {last_output(conversation)}")
    mine = sum(map(ord, term))
    bad = UNPARSABLE[variant % len(UNPARSABLE)]
    other = [word for of, word in pairs if of != term][variant % 3]
    wrong_list = [["Hot"], "711", {"a": 1}, None, [1.5], [[1]]][variant % 6]
    return {
        "right": [*steps, extract(values), end],
        "right_in_one_turn": [Turn(ask), extract(values), end],
        "right_with_thought": [*steps, Turn([("think", f"{len(values)} values."), *extract(values).items]), end],
        "wrong_order": [*steps, extract(values[::-1]), end],
        "one_missing": [*steps, extract(values[:-1]), end],
        "one_twice": [*steps, extract(values + values[:1]), end],
        "wrong_term": [Turn([call("get_synonym_value", {"synonym": other})]), extract(values), end],
        "minefield": [*steps, extract([*values, mine]), end],
        "minefield_only": [Turn([call("get_synonym_value", {"synonym": term})]), extract(values), end],
        "nothing_extracted": [*steps, extract([]), end],
        "no_extraction": [*steps, say("I forgot to extract.")],
        "no_tool": [say("There is no synonym.")],
        "extracted_twice": [*steps, extract([1, 2, 3]), extract(values), end],
        "spoiled_at_the_end": [*steps, extract(values), extract([0]), end],
        "missing_argument": [Turn([call("get_synonym_value", {"word": term})]), *steps, extract(values), end],
        "argument_of_wrong_type": [Turn([call("get_synonym_value", {"synonym": 3})]), *steps, extract(values), end],
        "list_of_wrong_type": [
            *steps,
            Turn([call("extract_synonym_values", {"synonym_values": wrong_list})]),
            extract(values),
            end,
        ],
        "unparsable_value": [Turn([call("get_synonym_value", bad)]), *steps, extract(values), end],
        "unparsable_extraction": [*steps, Turn([call("extract_synonym_values", bad)]), extract(values), end],
        "unknown_tool": [Turn([call("list_synonyms", {"term": term})]), *steps, extract(values), end],
        "cut_off": [steps[0], Turn([("text", "Now I")], incomplete="max_output_tokens")],
        "empty_at_end": [*steps, extract(values), Turn([])],
    }


def graded_call(conversation, variant):
    """Scripts of the multi-reward environment: only a rollout that ends without a message is formatted well."""
    city = city_of(conversation.user)
    right = call("get_weather", {"city": city})
    bad = UNPARSABLE[variant % len(UNPARSABLE)]
    quiet = Turn([])
    end = say(f"Done: {last_output(conversation)}")
    return {
        "perfect": [Turn([right]), quiet],
        "perfect_cut_off": [Turn([right], incomplete="max_output_tokens")],
        "perfect_with_thought": [Turn([("think", "One call."), right]), Turn([("think", "Enough.")])],
        "right_but_talks": [Turn([right]), end],
        "talks_first": [Turn([("text", "Let me look."), right]), quiet],
        "wrong_city": [Turn([call("get_weather", {"city": city + "ville"})]), quiet],
        "wrong_city_and_talks": [Turn([call("get_weather", {"city": "Atlantis"})]), end],
        "wrong_case": [Turn([call("get_weather", {"city": city.upper()})]), quiet],
        "missing_argument": [Turn([call("get_weather", {"place": city})]), quiet],
        "argument_of_wrong_type": [Turn([call("get_weather", {"city": [city]})]), quiet],
        "extra_argument": [Turn([call("get_weather", {"city": city, "unit": "K"})]), quiet],
        "unknown_tool": [Turn([call("get_forecast", {"city": city})]), quiet],
        "unparsable": [Turn([call("get_weather", bad)]), quiet],
        "unparsable_then_right": [Turn([call("get_weather", bad)]), Turn([right]), quiet],
        "no_object": [Turn([call("get_weather", NO_OBJECT[variant % len(NO_OBJECT)])]), quiet],
        "two_calls": [Turn([right, right]), quiet],
        "wrong_then_right": [Turn([call("get_weather", {"city": "Atlantis"})]), Turn([right]), quiet],
        "no_call": [say("It is sunny.")],
        "nothing": [quiet],
    }


def chat(conversation, variant):
    """Without a tool that we know there is one script: an answer that quotes the question."""
    if conversation.tools:
        arguments = {"question": conversation.user, "n": variant % 7}
        return {"call": [Turn([call(conversation.tools[0], arguments)]), say(f"Told: {last_output(conversation)}")]}
    return {"echo": [say(f"You said: {conversation.user}")]}


def environment_of(conversation):
    tools = set(conversation.tools)
    if "increment_counter" in tools:
        return "example_session_state_mgmt", counter
    if "get_synonym_value" in tools:
        return "example_multi_step", synonyms
    if "get_weather" in tools:
        if "exactly one" in conversation.system:
            return "example_tool_call_multireward", graded_call
        return "example_single_tool_call", weather
    return "chat", chat


def answer(conversation):
    """The next turn, and `environment:script` for the statistics."""
    environment, scripts_of = environment_of(conversation)
    which, variant = conversation.choice()
    scripts = scripts_of(conversation, variant)
    name = sorted(scripts)[which % len(scripts)]
    seen = len(conversation.outputs)
    for turn in scripts[name]:
        calls = sum(item[0] == "call" for item in turn.items)
        if seen < calls or calls == 0 or turn.incomplete:
            return turn, f"{environment}:{name}"
        seen -= calls
    return say("There is nothing left to do."), f"{environment}:{name}"
