"""Sequence packing as NeMo RL states it, written plainly: the peer of the `packing` benchmark.

Reads {"algorithm", "capacity", "lengths"} from standard input, writes {"cpu_s", "bins"} to standard output.
"""

import bisect
import json
import sys
import time


def concatenative(lengths, capacity):
    bins, load = [], 0
    for index, length in enumerate(lengths):
        if bins and load + length <= capacity:
            bins[-1].append(index)
            load += length
        else:
            bins.append([index])
            load = length
    return bins


def first_fit_decreasing(lengths, capacity):
    bins, rooms = [], []
    for length, index in sorted(((length, index) for index, length in enumerate(lengths)), reverse=True):
        for at, room in enumerate(rooms):
            if room >= length:
                bins[at].append(index)
                rooms[at] -= length
                break
        else:
            bins.append([index])
            rooms.append(capacity - length)
    return bins


def modified_first_fit_decreasing(lengths, capacity):
    def of_class(over, up_to):
        return [index for index, length in enumerate(lengths) if over < length <= up_to]

    def descending(items):
        return sorted(items, key=lambda index: lengths[index], reverse=True)

    def first_that_fits(items, room):
        return next((at for at, index in enumerate(items) if lengths[index] <= room), None)

    large = descending(of_class(capacity / 2, capacity))
    medium = descending(of_class(capacity / 3, capacity / 2))
    small = descending(of_class(capacity / 6, capacity / 3))
    small.sort(key=lambda index: (lengths[index], index))
    tiny = of_class(0, capacity / 6)

    bins = [[index] for index in large]
    rooms = [capacity - lengths[index] for index in large]

    def put(at, index):
        bins[at].append(index)
        rooms[at] -= lengths[index]

    for at in range(len(bins)):
        found = first_that_fits(medium, rooms[at])
        if found is not None:
            put(at, medium.pop(found))
    for at in reversed(range(len(bins))):
        if len(bins[at]) > 1 or len(small) < 2 or lengths[small[0]] + lengths[small[1]] > rooms[at]:
            continue
        put(at, small.pop(0))
        found = next(back for back in reversed(range(len(small))) if lengths[small[back]] <= rooms[at])
        put(at, small.pop(found))
    rest = descending(medium + small + tiny)
    for at in range(len(bins)):
        while rest and lengths[rest[-1]] <= rooms[at]:
            put(at, rest.pop(first_that_fits(rest, rooms[at])))
    further, loads = [], []
    for index in rest:
        bin, load = [], 0
        if further and loads[0] + lengths[index] <= capacity:
            bin, load = further.pop(0), loads.pop(0)
        bin.append(index)
        load += lengths[index]
        at = bisect.bisect(loads, load)
        further.insert(at, bin)
        loads.insert(at, load)
    return bins + further


def main():
    asked = json.load(sys.stdin)
    begun = time.process_time()
    bins = globals()[asked["algorithm"]](asked["lengths"], asked["capacity"])
    json.dump({"cpu_s": time.process_time() - begun, "bins": bins}, sys.stdout)


main()
