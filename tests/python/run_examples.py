#!/usr/bin/env python3
"""What NeMo RL does with NeMo Gym: `RolloutCollectionHelper.run_examples` on rows in memory, and the results in any order.

usage: run_examples.py HEAD_URL INPUT.jsonl AGENT OUTPUT.jsonl      one line per row: {"index": …, "reward": …}
"""

import asyncio
import json
import sys
from pathlib import Path

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.rollout_collection import RolloutCollectionHelper


async def main(head, source, agent, output):
    host, port = head.removeprefix("http://").split(":")
    lines = Path(source).read_text(encoding="utf-8").rstrip("\n").split("\n")
    # NeMo RL adds the index and gets it back with the row.
    rows = [{**json.loads(line), "agent_ref": {"name": agent}, "_rowidx": index} for index, line in enumerate(lines)]
    results = RolloutCollectionHelper().run_examples(examples=rows, head_server_config=BaseServerConfig(host=host, port=int(port)))
    with open(output, "w", encoding="utf-8") as file:
        for result in results:
            row, rollout = await result
            file.write(json.dumps({"index": row["_rowidx"], "reward": rollout["reward"]}) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
