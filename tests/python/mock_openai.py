#!/usr/bin/env python3
"""A model endpoint in OpenAI's dialects (Responses and Chat Completions) whose answers are a pure function of the request.

usage: mock_openai.py [--host 127.0.0.1] [--port 0] [--delay-ms 0]

Prints `ready http://host:port/v1` once it listens. What it says is in script.py; ids derive from a digest of the
conversation and every timestamp is fixed, so equal conversations get equal bytes, whoever asks and however often.

A task whose text holds `!mock WORD=VALUE ...` gets trouble instead of an answer:
    status=429      that status with an error body in OpenAI's form (`code=insufficient_quota` and `type=…` go into it)
    sleep_ms=2000   the answer comes later
    drop=1          the connection closes without an answer
    garbage=1       200 with a body that is no JSON
    cut=1           200 whose body ends before its announced length

Two routes are for the test, not for a client: `POST /control/delay?ms=N` slows every answer down (never changes one), and
`GET /control/stats` counts requests per script.
"""

import argparse
import asyncio
import collections
import json
import re
import signal

from aiohttp import web

from script import Conversation, answer

CREATED = 1_700_000_000
STATS = web.AppKey("stats", collections.Counter)
DELAY = web.AppKey("delay", dict)


def text_of(content):
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return ""


def seed_of(metadata):
    try:
        return str(json.loads(metadata["extra_body"])["seed"])
    except (KeyError, TypeError, ValueError):
        return ""


def from_responses(body):
    items = body.get("input") or []
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    conversation = Conversation(
        system=body.get("instructions") or "",
        seed=seed_of(body.get("metadata")),
        tools=tuple(tool.get("name", "") for tool in body.get("tools") or []),
    )
    for item in items:
        if item.get("type") == "function_call_output":
            conversation.outputs.append(text_of(item.get("output")))
        elif item.get("role") in ("system", "developer"):
            conversation.system += text_of(item.get("content"))
        elif item.get("role") == "user":
            conversation.user = text_of(item.get("content"))
    return conversation


def from_chat(body):
    conversation = Conversation(
        seed=seed_of(body.get("metadata")),
        tools=tuple((tool.get("function") or {}).get("name", "") for tool in body.get("tools") or []),
    )
    for message in body.get("messages") or []:
        text = text_of(message.get("content"))
        if message.get("role") == "tool":
            conversation.outputs.append(text)
        elif message.get("role") in ("system", "developer"):
            conversation.system += text
        elif message.get("role") == "user":
            conversation.user = text
    return conversation


def counts_of(conversation, turn):
    asked = 20 + (len(conversation.system) + len(conversation.user)) // 4 + sum(len(o) // 4 + 9 for o in conversation.outputs)
    said = 3 + sum(sum(len(text) for text in item[1:]) // 4 + 2 for item in turn.items)
    thought = sum(len(item[1]) // 4 + 1 for item in turn.items if item[0] == "think")
    return asked, said, thought


def responses_body(body, conversation, turn):
    output = []
    for index, item in enumerate(turn.items):
        digest = conversation.digest("item", index)[:24]
        if item[0] == "call":
            output.append(
                {
                    "type": "function_call",
                    "id": f"fc_{digest}",
                    "call_id": f"call_{digest}",
                    "name": item[1],
                    "arguments": item[2],
                    "status": "completed",
                }
            )
        elif item[0] == "think":
            summary = [{"type": "summary_text", "text": item[1]}]
            output.append({"type": "reasoning", "id": f"rs_{digest}", "summary": summary})
        else:
            output.append(
                {
                    "type": "message",
                    "id": f"msg_{digest}",
                    "role": "assistant",
                    "status": "incomplete" if turn.incomplete else "completed",
                    "content": [{"type": "output_text", "text": item[1], "annotations": []}],
                }
            )
    asked, said, thought = counts_of(conversation, turn)
    answered = {
        "id": f"resp_{conversation.digest('response')[:32]}",
        "object": "response",
        "created_at": CREATED,
        "status": "incomplete" if turn.incomplete else "completed",
        "error": None,
        "incomplete_details": {"reason": turn.incomplete} if turn.incomplete else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": body.get("model"),
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "x_mock": {"kept": True, "number": 9007199254740993, "float": 1e-7},
    }
    if turn.usage:
        answered["usage"] = {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": asked // 3},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": asked + said,
        }
    return answered


def chat_body(body, conversation, turn):
    texts = [item[1] for item in turn.items if item[0] == "text"]
    calls = [
        {
            "id": f"call_{conversation.digest('item', index)[:24]}",
            "type": "function",
            "function": {"name": item[1], "arguments": item[2]},
        }
        for index, item in enumerate(turn.items)
        if item[0] == "call"
    ]
    message = {"role": "assistant", "content": "".join(texts) or None, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    finish = {"max_output_tokens": "length", "content_filter": "content_filter"}.get(turn.incomplete)
    asked, said, thought = counts_of(conversation, turn)
    answered = {
        "id": f"chatcmpl-{conversation.digest('response')[:32]}",
        "object": "chat.completion",
        "created": CREATED,
        "model": body.get("model"),
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": finish or ("tool_calls" if calls else "stop"),
            }
        ],
        "system_fingerprint": None,
    }
    if turn.usage:
        answered["usage"] = {
            "prompt_tokens": asked,
            "completion_tokens": said,
            "total_tokens": asked + said,
            "prompt_tokens_details": {"cached_tokens": asked // 3},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }
    return answered


def error_body(status, words):
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    return {
        "error": {
            "message": f"mock error {status}",
            "type": words.get("type", kinds.get(status, "server_error")),
            "param": None,
            "code": words.get("code"),
        }
    }


async def answer_with(request, read, write):
    try:
        body = json.loads(await request.text())
        conversation = read(body)
    except (ValueError, AttributeError, TypeError) as error:
        return web.json_response({"error": {"message": f"mock: {error}", "type": "invalid_request_error"}}, status=400)
    words = dict(re.findall(r"(\w+)=(\S+)", conversation.user.partition("!mock ")[2]))
    delay_ms = request.app[DELAY]["ms"] + int(words.get("sleep_ms", 0))
    if delay_ms:
        await asyncio.sleep(delay_ms / 1000)
    if "drop" in words:
        request.transport.close()
        return web.Response()
    if "status" in words:
        status = int(words["status"])
        request.app[STATS][f"status {status}"] += 1
        return web.json_response(error_body(status, words), status=status)
    if "garbage" in words:
        return web.Response(text="<html>this is no JSON", content_type="text/html")
    turn, name = answer(conversation)
    request.app[STATS][name] += 1
    text = json.dumps(write(body, conversation, turn), ensure_ascii=False)
    if "cut" in words:
        response = web.StreamResponse(headers={"Content-Length": str(len(text) + 100), "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(text.encode()[:40])
        request.transport.close()
        return response
    return web.Response(text=text, content_type="application/json")


async def responses(request):
    return await answer_with(request, from_responses, responses_body)


async def chat_completions(request):
    return await answer_with(request, from_chat, chat_body)


async def models(_request):
    return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model", "created": CREATED, "owned_by": "test"}]})


async def set_delay(request):
    request.app[DELAY]["ms"] = int(request.query["ms"])
    return web.json_response(request.app[DELAY])


async def stats(request):
    return web.json_response(dict(sorted(request.app[STATS].items())))


def application(delay_ms=0):
    app = web.Application(client_max_size=1 << 30)
    app[STATS] = collections.Counter()
    app[DELAY] = {"ms": delay_ms}
    app.router.add_post("/v1/responses", responses)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/control/delay", set_delay)
    app.router.add_get("/control/stats", stats)
    return app


async def serve(host, port, delay_ms):
    runner = web.AppRunner(application(delay_ms), access_log=None, keepalive_timeout=75, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=4096)
    await site.start()
    address = site._server.sockets[0].getsockname()
    print(f"ready http://{address[0]}:{address[1]}/v1", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-ms", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.host, arguments.port, arguments.delay_ms))
