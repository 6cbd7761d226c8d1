"""Validates the failure records of a sidecar with NeMo Gym's own class. Reads rows from standard input."""

import json
import sys

from nemo_gym.failure_kinds import is_namespaced, is_registered
from nemo_gym.rollout_outcomes import RolloutFailure


def main():
    count = 0
    for line in sys.stdin:
        row = json.loads(line)
        record = RolloutFailure.model_validate(row["_ng_failure_record"])
        kind = record.failure.failure_kind
        assert is_registered(kind) or is_namespaced(kind), f"unknown kind {kind}"
        count += 1
        # The class can tell: another version or one more field is an error.
        for change in ({"schema_version": 2}, {"more": 1}):
            try:
                RolloutFailure.model_validate(row["_ng_failure_record"] | change)
            except ValueError:
                continue
            raise SystemExit(f"{change} was accepted")
    print(f"{count} records")


if __name__ == "__main__":
    main()
