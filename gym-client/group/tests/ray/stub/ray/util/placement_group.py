"""Placement groups. Bundle i is placed on living node i, modulo their number."""

import threading

import ray


class PlacementGroup:
    """There is no `wait`: Ray cuts its limit to whole seconds, and with 0 s it returns `False` for about one of five groups that are placed."""

    def __init__(self, bundles):
        self.bundles, self.nodes, self.state = bundles, {}, "PENDING"
        self.lock = threading.Lock()

    def look(self):
        """Places the bundles that have no node, or whose node is dead."""
        cluster = ray.cluster()
        alive = [node["id"] for node in cluster["nodes"] if node["alive"]]
        with self.lock:
            if self.state == "REMOVED":
                return
            for number in range(len(self.bundles)):
                if self.nodes.get(number) not in alive:
                    self.nodes[number] = alive[number % len(alive)] if cluster["room"] and alive else ""
            if all(self.nodes.values()):
                self.state = "CREATED"
            elif self.state == "CREATED":
                self.state = "RESCHEDULING"

    def place(self, number):
        """Returns the place of an actor on a bundle, or `None` while it has none."""
        self.look()
        if self.state == "REMOVED" or not self.nodes[number]:
            return None
        node = next(node for node in ray.cluster()["nodes"] if node["id"] == self.nodes[number])
        begin = sum(self.bundles[before].get("GPU", 0) for before in range(number) if self.nodes[before] == node["id"])
        gpus = [str(gpu) for gpu in range(int(begin), int(begin + self.bundles[number].get("GPU", 0)))]
        return {"node_id": node["id"], "ip": node["ip"], "gpus": gpus}


def placement_group(bundles, *, strategy, name, **labels):
    if strategy not in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
        raise ValueError(f"Invalid placement group strategy {strategy}")
    ray.note(do="create_group", name=name, bundles=bundles, strategy=strategy, labels=labels)
    return PlacementGroup(bundles)


def placement_group_table(group):
    ray.check("placement_group_table")
    group.look()
    return {"state": group.state, "bundles_to_node_id": dict(group.nodes)}


def remove_placement_group(group):
    with group.lock:
        group.state = "REMOVED"
    ray.note(do="remove_group")
    # Their processes are killed. Calls to actors that were never placed stay without a result.
    for actor in ray.ACTORS:
        if actor.options["scheduling_strategy"].placement_group is group:
            actor.kill()
