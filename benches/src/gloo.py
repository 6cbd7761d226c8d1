"""One rank of torch.distributed with Gloo. Reads `BYTES N` lines, and answers each with the times of N all_reduce of f32.

    gloo.py RANK WORLD PORT
"""
import json, os, resource, sys, time

rank, world, port = (int(word) for word in sys.argv[1:4])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)


def cpu():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def say(answer):
    print(json.dumps(answer), flush=True)


one, tensors = torch.zeros(1), {}
say({"torch": torch.__version__})
for line in sys.stdin:
    size, count = (int(word) for word in line.split())
    if size not in tensors:
        numbers = torch.arange(size // 4) % 13
        tensor = (numbers + rank).to(torch.float32)
        dist.all_reduce(tensor)
        assert bool((tensor == numbers * world + world * (world - 1) // 2).all()), "wrong sums"
        tensors[size] = torch.zeros(size // 4)
    tensor, wall = tensors[size], []
    dist.all_reduce(one)
    used = cpu()
    for _ in range(count):
        if size > 1 << 16:
            dist.all_reduce(one)
        began = time.perf_counter()
        dist.all_reduce(tensor)
        wall.append(time.perf_counter() - began)
    say({"wall": wall, "cpu": cpu() - used})
os._exit(0)
