"""The page of a head server in a real browser: `tests/python/page.py PROGRAM [--screenshots FOLDER]`.

PROGRAM is `gym-examples` or another program with the quickstart's servers. The browser is Chromium, driven over the WebDriver protocol,
which is JSON over HTTP. Prints what was checked; ends with 1 at the first difference.
"""

import argparse
import base64
import http.client
import json
import os
import pathlib
import re
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIMIT = 60


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(what, check, limit=LIMIT):
    """Waits until `check` returns something true."""
    end, last, problem = time.monotonic() + limit, None, None
    while time.monotonic() < end:
        try:
            last = check()
        except (OSError, http.client.HTTPException) as error:
            last = None
            problem = error
        if last:
            return last
        time.sleep(0.1)
    raise SystemExit(f"not within {limit} s: {what}; last: {last!r} {problem or str()}")


def call(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    text = None if body is None else json.dumps(body)
    connection.request(method, path, text, {"content-type": "application/json"} if text else {})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text else None


class Browser:
    def __init__(self, width, height):
        self.port = free_port()
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={self.port}", "--log-level=SEVERE"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until("chromedriver", lambda: call(self.port, "GET", "/status")[1]["value"]["ready"])
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},{height}"]
        options = {"args": arguments}
        session = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}}
        self.session = self.send("POST", "/session", session)["sessionId"]

    def send(self, method, path, body=None):
        status, reply = call(self.port, method, path, body)
        if status != 200:
            raise SystemExit(f"{method} {path}: {reply}")
        return reply["value"]

    def at(self, method, path, body=None):
        return self.send(method, f"/session/{self.session}{path}", body)

    def open(self, url):
        self.at("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        return self.at("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector="body"):
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def click(self, selector, text=None):
        """Clicks the first element that matches, with this text."""
        script = "const e = [...document.querySelectorAll(arguments[0])].find(e => arguments[1] === null || e.textContent.includes(arguments[1])); if (!e) return false; e.click(); return true"
        until(f"{selector} with {text!r}", lambda: self.run(script, selector, text))

    def shows(self, selector, *texts):
        """Waits until the element has all texts."""
        return until(f"{selector} shows {texts}", lambda: (found := self.text(selector)) and all(text in found for text in texts) and found)

    def errors(self):
        return [entry["message"] for entry in self.at("POST", "/se/log", {"type": "browser"}) if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]

    def screenshot(self, path):
        if path:
            path.write_bytes(base64.b64decode(self.at("GET", "/screenshot")))

    def close(self):
        # Ends Chromium, which a driver that is killed leaves behind.
        call(self.port, "DELETE", f"/session/{self.session}")
        self.driver.terminate()
        self.driver.wait(10)


class Head:
    """A head server with the servers of the quickstart, as one process."""

    def __init__(self, program, folder, latency):
        self.program, self.folder, self.port = program, folder, free_port()
        # The model takes its time, so that rollouts are seen in flight.
        (folder / "slow.yaml").write_text(f"policy_model: {{responses_api_models: {{scripted_model: {{latency_ms: {latency}}}}}}}\n")

    def start(self):
        command = [self.program, "run", "--config", ROOT / "examples/configs/quickstart.yaml", "--config", "slow.yaml", f"++head_server.port={self.port}"]
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=open(self.folder / "head.log", "a"), stderr=subprocess.STDOUT)
        until("the head server", lambda: call(self.port, "GET", "/health")[0] == 200)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def collect(self, tasks, agent, output, *arguments):
        command = [self.program, "collect", "--head-url", f"http://127.0.0.1:{self.port}", "--agent", agent, "--input", tasks]
        command += ["--output", output, "--progress", "none", *arguments]
        return subprocess.Popen(command, cwd=self.folder, stdout=open(self.folder / "collect.log", "a"), stderr=subprocess.STDOUT)


def state(head):
    return call(head.port, "GET", "/ui/state")[1]


def check(name, condition, detail=""):
    if not condition:
        raise SystemExit(f"{name}: FAILED {detail}")
    print(f"{name}: ok", flush=True)


def play(program, folder, shot, running):
    head = Head(program, folder, "[30, 2500]")
    running.append(head)
    head.start()
    browser = Browser(1200, 900)
    running.append(browser)
    browser.open(f"http://127.0.0.1:{head.port}/ui")
    browser.shows("#overview", "No collection has reported")
    browser.screenshot(shot("rest.png"))
    check("the page at rest", not browser.errors(), browser.errors())

    # One task has no options, which its verifier rejects.
    rows = [json.loads(line) for line in (ROOT / "examples/data/choice.jsonl").read_text().splitlines()]
    rows = [dict(rows[0], answer="none of them")] + rows[:150]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    collect = head.collect("tasks.jsonl", "choice_simple_agent", "results/a.jsonl", "--num-repeats", "8", "--concurrency", "100", "--attempts", "1")
    running.append(collect)
    browser.shows("#overview", "results/a.jsonl", "running", "In flight, oldest first", "per second")
    first = browser.run("return document.querySelector('.figures b').textContent")
    until("the figures move", lambda: browser.run("return document.querySelector('.figures b').textContent") != first)
    browser.shows("#overview", "Ended last", "queue and network")
    check("a lane for each rollout", until("lanes", lambda: browser.run("return document.querySelectorAll('.lane i.seed').length > 3 && document.querySelectorAll('.lane i.model').length > 3 && document.querySelectorAll('.lane i.verify').length > 3")))
    wait = until("what a rollout waits on", lambda: browser.run("return [...document.querySelectorAll('#overview tr')].find(e => e.innerText.includes('policy_model'))?.innerText"))
    check("the phase of a rollout and what it waits on", re.search(r"\tmodel [0-9.]+ m?s", wait), wait)
    browser.screenshot(shot("load.png"))
    check("a running collection", collect.poll() is None)

    browser.click("#tabs a", "Rollouts")
    until("rollouts", lambda: browser.run("return shown.length > 20"))
    browser.run("document.querySelector('#list button').click()")
    conversation = browser.shows("#rollout", "rollout ", "assistant")
    check("a rollout as a conversation, read by its collector", "user" in conversation, conversation)
    check("its lane and where its time went", re.search(r"queue and network .* %\s*seed .* %\s*model .* %\s*verify .* %", conversation), conversation)
    link = browser.run("return location.href")
    browser.screenshot(shot("conversation.png"))
    browser.open("about:blank")
    browser.open(link)
    check("the link of a rollout", browser.shows("#rollout", "assistant").splitlines()[0] != "")

    choose = "by('class').value = arguments[0]; document.querySelector('form').dispatchEvent(new Event('input'))"
    until("both rewards", lambda: browser.run("return new Set(data.rollouts.map(r => r.label.reward)).size > 1"))
    browser.run(choose, "+")
    browser.run("document.querySelector('#histogram button').click()")
    bounds = browser.run("return [Number(by('min').value), Number(by('max').value)]")
    inside = "return shown.length > 0 && shown.length < data.rollouts.length && shown.every(r => r.label.reward >= arguments[0] && r.label.reward <= arguments[1])"
    check("a bar of the histogram filters", browser.run(inside, *bounds), bounds)
    browser.run("by('min').value = by('max').value = ''")
    browser.run(choose, "=")
    until("groups with equal rewards", lambda: browser.run("return shown.length > 0 && shown.every(isEqual)"))
    print("groups with equal rewards: ok")
    browser.run(choose, "")

    collect.wait(2 * LIMIT)
    browser.click("#tabs a", "Overview")
    found = browser.shows("#overview", "finished, 8 failed", "Failed attempts (no reward)")
    failed = next(iter(state(head)["collections"]))["failures"]
    check("failures apart from rewards, with their causes", failed and all(name in found for name in failed) and " × " in found, found)
    browser.click("details > summary")
    seen = browser.text("#live")
    until("an update", lambda: browser.text("#live") != seen)
    check("an update keeps what is open", browser.run("return document.querySelector('details').open"))
    browser.screenshot(shot("failures.png"))
    lines = (folder / "results/a.jsonl").read_text().splitlines()
    check("the page counts what the file has", f"{len(lines)} of 1208 recorded" in found, found)

    head.kill()
    browser.shows("#live", "does not respond")
    head.start()
    browser.shows("#live", "updated")
    collect = head.collect("tasks.jsonl", "choice_simple_agent", "results/b.jsonl", "--num-repeats", "2", "--concurrency", "100", "--attempts", "1")
    running.append(collect)
    browser.shows("#overview", "results/b.jsonl")
    browser.click("#tabs a", "Rollouts")
    until("rollouts of the new head server", lambda: browser.run("return data.rollouts.some(r => !data.rollouts[0] || r.collection === state.collections[0].id)"))
    check("a restart of the head server", True)
    collect.wait(LIMIT)

    # Members and rollouts in numbers that no cluster of this machine has.
    for number in range(1000):
        member = {"name": f"node-{number}", "incarnation": 1, "host": "10.0.0.1", "heartbeat_ms": 30000, "timeout_ms": 300000, "reconnect_ms": 100}
        status, reply = call(head.port, "POST", "/cluster/join", member)
        if status != 200:
            raise SystemExit(f"join: {status} {reply}")
    browser.click("#tabs a", "Cluster")
    until("1,000 members", lambda: browser.run("return document.querySelectorAll('#cluster table tr').length > 1000"))
    drawn = browser.run("const began = performance.now(); cluster(); return performance.now() - began")
    browser.screenshot(shot("members.png"))
    fill = """
        data.rollouts = Array.from({length: 1e6}, (_, n) => ({collection: 'c', label: {task: n >> 3, repeat: n & 7, attempt: 0, agent: 'a' + n % 3, reward: (n * 7919 % 100) / 100, class: n % 50 ? null : 'tool_error'}, seconds: 1}));
        regroup(); by('agent').selectedIndex = 0; by('min').value = 0.5; by('class').value = '+';
        const times = [];
        for (let round = 0; round < 5; round++) { const began = performance.now(); filter(); times.push(performance.now() - began); }
        return [shown.length, times.sort((a, b) => a - b)[2]]"""
    count, filtered = browser.run(fill)
    check("a filter over a million rollouts", count == sum(1 for n in range(1_000_000) if n % 50 and (n * 7919 % 100) / 100 >= 0.5), count)
    print(f"figures: 1,000 members drawn in {drawn:.0f} ms; a million rollouts filtered in {filtered:.0f} ms (median of 5)")
    check("no error in the console", not [e for e in browser.errors() if "/ui/" not in e], browser.errors())

    from_files(program, folder, browser, shot)

    phone = Browser(390, 800)
    running.append(phone)
    for view in ["overview", "rollouts", "cluster"]:
        phone.open("about:blank")
        phone.open(f"http://127.0.0.1:{head.port}/ui#{view}")
        phone.shows("#live", "updated")
        phone.screenshot(shot(f"phone-{view}.png"))
        check(f"{view} on a phone does not scroll sideways", phone.run("return document.documentElement.scrollWidth <= innerWidth"))


def from_files(program, folder, browser, shot):
    """The same page from files alone: `view --html`, with tokens, lanes and a million rollouts."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "</script> yes"}]}
    trained = dict(message, generation_token_ids=[5, 6, 7], generation_log_probs=[-0.01, -2.5, None])
    logprobs = [{"token": "</script>", "logprob": -0.1}, {"token": " yes", "logprob": -3}]
    spoken = dict(message, content=[dict(message["content"][0], logprobs=logprobs)])
    row = {"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}, "reward": 1.0, "response": {"output": [trained, spoken]}}
    row["_gym_episode"] = {"turns": 2, "phases": "seed 0+100000, model 100000+600000, tool 700000+50000, verify 750000+50000", "seconds": 1.0}
    with open(folder / "million.jsonl", "w") as file:
        file.write(json.dumps(row) + "\n")
        for n in range(1, 1_000_000):
            file.write('{"_ng_task_index":%d,"_ng_rollout_index":%d,"agent_ref":{"name":"a%d"},"reward":%s}\n' % (n >> 3, n & 7, n % 3, (n * 7919 % 100) / 100))
    began = time.monotonic()
    shown = subprocess.run([program, "view", "million.jsonl", "--html", "million.html", "--limit", "100"], cwd=folder, capture_output=True, text=True, check=True)
    written = time.monotonic() - began
    check("a page of a file", "100 rollouts; 999900 more are listed without their conversations" in shown.stdout, shown.stdout)
    browser.open("about:blank")
    began = time.monotonic()
    browser.open((folder / "million.html").as_uri())
    browser.shows("#count", "1000000 of 1000000 rollouts")
    opened = time.monotonic() - began
    lane = browser.shows("#rollout", "rollout 0-0", "queue and network 200 ms, 20 %", "model 600 ms, 60 %", "tool 50 ms", "verify 50 ms")
    check("the lane of a rollout of a file", "</script> yes" in lane, lane)
    browser.click("#tokens")
    found = browser.run("return [...document.querySelectorAll('.tokens span')].map(e => [e.textContent, e.title, e.style.background !== ''])")
    texts, titles, colored = zip(*found)
    check("tokens with their probability", texts == ("5", "6", "7", "</script>", " yes") and titles[1] == "token 6, logprob -2.500, probability 8.21 %" and colored == (True, True, False, True, True), found)
    browser.screenshot(shot("tokens.png"))
    timed = """
        for (const [id, value] of Object.entries(arguments[0])) by(id).value = value;
        const times = [];
        for (let round = 0; round < 5; round++) { const began = performance.now(); filter(); times.push(performance.now() - began); }
        return [shown.length, times.sort((a, b) => a - b)[2]]"""
    count, filtered = browser.run(timed, {"min": 0.5})
    check("a filter by reward", count == 1 + sum(1 for n in range(1, 1_000_000) if (n * 7919 % 100) / 100 >= 0.5), count)
    count, searched = browser.run(timed, {"min": "", "text": "77-3"})
    check("a filter by text", count == len([n for n in range(1_000_000) if "77-3" in f"{n >> 3}-{n & 7}"]), count)
    check("a rollout without its conversation says how to show it", "rgym view million.jsonl " in browser.text("#rollout"), browser.text("#rollout"))
    size = (folder / "million.html").stat().st_size / 1e6
    print(f"figures: a page of a million rollouts: written in {written:.1f} s, {size:.0f} MB, opened in {opened:.1f} s; filtered by reward in {filtered:.0f} ms, by text in {searched:.0f} ms (medians of 5)")
    check("no error in the console of the file", not [e for e in browser.errors() if "/ui/" not in e], browser.errors())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--screenshots", type=pathlib.Path)
    options = parser.parse_args()
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    running = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            play(os.path.abspath(options.program), pathlib.Path(folder), lambda name: options.screenshots and options.screenshots / name, running)
        except BaseException:
            for log in ["head.log", "collect.log"]:
                path = pathlib.Path(folder) / log
                print(f"-- {log}\n{path.read_text()[-2000:] if path.exists() else ''}")
            raise
        finally:
            for one in reversed(running):
                one.close() if hasattr(one, "close") else one.kill()


if __name__ == "__main__":
    main()
