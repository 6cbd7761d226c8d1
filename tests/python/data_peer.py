#!/usr/bin/env python3
"""The reference implementations of the formats that a collection reads and writes beside JSONL.

usage: data_peer.py scalars DIR     what TensorBoard's own reader finds in the directory, as one JSON object: tag -> [[step, value], …]

Run it with the interpreter that .ci/python-data prints.
"""

import json
import sys


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [[event.step, event.value] for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def main():
    match sys.argv[1:]:
        case ["scalars", folder]:
            print(json.dumps(scalars(folder)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
