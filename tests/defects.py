#!/usr/bin/env python3
"""Puts known defects back, one at a time, and reports which test finds each of them.

    tests/defects.py                  all defects
    tests/defects.py WORD…            those whose name contains a word

A defect is one replaced text in one file, or several if two places guard against it, and the tests that must then fail. The script works on a copy of the last commit in a
separate work tree, so it changes nothing here. Exit status 1: a defect passed its tests, or its text is no longer in the file.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Enough for each of the defects of the disk; the rarest needs about 250.
SIMULATION = (
    "--profile simulation -p gym-server --no-default-features --test simulation -- no_seed_loses_doubles_or_invents_an_outcome"
    " --exact"
)
SEEDS = "2000"
TIMEOUT_SECONDS = 1200

COLLECT = "gym-client/src/collect"
# Name, file, old text, new text, arguments of `cargo test`.
DEFECTS = [
    # Rows that were acknowledged, and their inputs, survive a power failure.
    ("rows-are-synced-instead-of-written-again", f"{COLLECT}/ledger/jsonl/recovery.rs",
     "self.files.rewrite(self.path, self.from, &self.pieces).await?;", "self.files.append(self.path, &[], true).await?;", SIMULATION),
    ("rows-are-acknowledged-before-the-sync", f"{COLLECT}/ledger/jsonl/writer.rs",
     "files.append(path, &lines.pieces, true).await", "files.append(path, &lines.pieces, false).await", SIMULATION),
    ("inputs-are-not-synced", f"{COLLECT}/chunks.rs",
     "files.append(path, &[], true).await?;", "files.append(path, &[], false).await?;", SIMULATION),
    # An engine's error is no reward.
    ("any-error-about-max-tokens-is-an-overflow", "gym-server/src/model/vllm/overflow.rs",
     "(coded || exceeds(&text)).then_some(text)",
     "(coded || text.contains(\"max_tokens\") || text.contains(\"context length\")).then_some(text)",
     "-p gym-server --lib model::vllm"),
    ("a-response-without-its-field-is-a-response", "gym-server/src/model/upstream/mod.rs",
     "if object.get(key).is_none_or(|list| list.first() != Some(&b'[')) {", "if object.get(key).is_some_and(|list| list.first() != Some(&b'[')) {",
     "-p gym-server --lib model::"),
    # A broken tool is no reward.
    ("a-broken-tool-goes-to-the-model", "gym-core/src/server/tool_errors.rs",
     "            _ => Err(error),\n        }\n    }\n}", "            _ => Ok((response, Some(ToolErrorCause::Server))),\n        }\n    }\n}",
     "-p gym-server --lib agent::"),
    # Nothing is replaced without leave.
    ("an-existing-output-is-replaced", f"{COLLECT}/collector.rs",
     ("(ExistingOutput::Reject, Some(first)) => Err(output_exists(first)),", "let overwrites = options.existing == ExistingOutput::Overwrite;"),
     ("(ExistingOutput::Reject, Some(_)) => Ok(existing),", "let overwrites = options.existing != ExistingOutput::Resume;"),
     "-p gym-server --test cli -- results_and_inputs_are_replaced_only_if_asked"),
    ("files-are-compared-by-path", f"{COLLECT}/files.rs",
     "if let Ok(found) = std::fs::metadata(&path) {", "if let Ok(found) = std::fs::metadata(\"\") {", "-p gym-client --lib collect::files"),
    ("the-input-may-be-an-output", f"{COLLECT}/collector.rs",
     "files.check_distinct(input, self.events.as_deref())?;", "let _ = files.check_distinct(input, self.events.as_deref());",
     "-p gym-server --test cli -- results_and_inputs_are_replaced_only_if_asked"),
    # A resumed collection requests the recorded rows.
    ("resume-ignores-all-changes", f"{COLLECT}/collector.rs",
     "ExistingOutput::Resume if resumes || recorded => compare_rows(&files, &partial).await,", "", "-p gym-server --test cli -- a_resumed_collection_may_grow_but_not_change"),
    ("resume-ignores-changed-values", f"{COLLECT}/resume.rs",
     "if !same_scalar(old, new) {", "if was.is_none() && !same_scalar(old, new) {", "-p gym-client --lib collect::resume"),
    ("resume-ignores-fewer-repeats", f"{COLLECT}/resume.rs",
     "differences.repeats.add(row.key, was.line)", "{}", "-p gym-client --lib collect::resume"),
    ("resume-ignores-fewer-tasks", f"{COLLECT}/resume.rs",
     "differences.tasks.add(row.key, was.line)", "{}", "-p gym-client --lib collect::resume"),
    # No two incarnations of a rank are alive.
    ("the-watchdog-ignores-the-lease", "gym-client/src/launch/process/watchdog.rs",
     "() = lease_ended(lease) => {}", "() = async { let _ = lease; std::future::pending::<()>().await } => {}",
     "-p gym-client --test workers -- ranks_of_a_stopped_node"),
    ("ranks-move-before-the-lease-ends", "gym-client/src/group/provision/nodes/state.rs",
     "join_all(lost.iter().map(|host| hosts[*host].fenced())).await;", "let _ = (&lost, NodeLink::fenced);",
     "-p gym-client --test workers -- ranks_of_a_killed_node"),
    ("a-lease-counts-from-the-arrival-of-a-confirmation", "gym-client/src/group/provision/nodes/lease.rs",
     "if let Some((_, sent)) = self.sent.iter().find(|(known, _)| *known == number) {",
     "if let Some((_, sent)) = self.sent.iter().max().filter(|_| number > 0) {",
     "-p gym-client --lib group::provision::nodes::lease"),
]


def failed_tests(output: str) -> list[str]:
    names = [line.split()[1] for line in output.splitlines() if line.startswith("test ") and line.endswith("FAILED")]
    return names or [line for line in output.splitlines() if line.startswith("error")][:1]


def check(tree: Path, defect: tuple, environment: dict[str, str]) -> bool:
    name, file, old, new, arguments = defect
    path = tree / file
    text = path.read_text()
    changes = list(zip(old, new)) if isinstance(old, tuple) else [(old, new)]
    defective = text
    for was, becomes in changes:
        if text.count(was) != 1:
            print(f"{name}: STALE: {file} has {text.count(was)} places with the text of this defect; update the defect", flush=True)
            return False
        defective = defective.replace(was, becomes)
    begun = time.monotonic()
    path.write_text(defective)
    try:
        ran = subprocess.run(["cargo", "test", *arguments.split()], cwd=tree, env=environment, text=True, timeout=TIMEOUT_SECONDS,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    finally:
        path.write_text(text)
    took = f"{time.monotonic() - begun:.0f} s"
    if ran.returncode == 0:
        print(f"{name}: NOT FOUND by `cargo test {arguments}` ({took})", flush=True)
        return False
    if "error: could not compile" in ran.stdout:
        print(f"{name}: DOES NOT COMPILE\n{ran.stdout[-2000:]}", flush=True)
        return False
    tests = failed_tests(ran.stdout)
    seeds = [line for line in ran.stdout.splitlines() if "seeds" in line and ("fail" in line or "FAIL" in line)]
    print(f"{name}: found by {', '.join(tests)} ({took}) {' '.join(seeds[:1])}".rstrip(), flush=True)
    return True


def main() -> int:
    words = sys.argv[1:]
    if any(word.startswith("-") for word in words):
        print(__doc__)
        return 2
    defects = [defect for defect in DEFECTS if not words or any(word in defect[0] for word in words)]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target" / "defects"))
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target), "CARGO_INCREMENTAL": "0", "GYM_SIM_SEEDS": SEEDS}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), "HEAD"], cwd=ROOT, check=True)
        try:
            found = [check(tree, defect, environment) for defect in defects]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print(f"{sum(found)} of {len(found)} defects found")
    return 0 if found and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
