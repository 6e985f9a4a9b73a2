"""One rank of a job on NPUs: `ranks.py DIRECTORY PART [PART …]`, with RANK and WORLD_SIZE set.

Runs the parts and writes what it saw as JSON to DIRECTORY/rankN.json. The ranks meet through a file in DIRECTORY.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_npu  # noqa: F401 - loads itself since torch 2.5 only

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def message_of(call) -> str:
    try:
        call()
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"


def full(value, count=4, dtype=torch.float32):
    return torch.full((count,), value, dtype=dtype, device="npu")


def reduced(tensor, op=dist.ReduceOp.SUM) -> float:
    dist.all_reduce(tensor, op=op)
    return tensor[0].item()


def sums_between_operators() -> dict:
    """How many of 100 sums are wrong when an operator before and one after each all_reduce use its tensor."""
    wrong = 0
    for i in range(100):
        tensor = full(float(RANK + i), 5000) * 2
        work = dist.all_reduce(tensor, async_op=i % 2 == 1)
        if work is not None:
            work.wait()
        wrong += not torch.equal((tensor + 1).cpu(), torch.full((5000,), 2.0 * (0 + i + 1 + i) + 1))
    return {"wrong": wrong}


def collectives() -> dict:
    seen = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool):
        seen[f"sum {dtype}"] = reduced(full(1, dtype=dtype))
    for op in ("MAX", "MIN", "PRODUCT"):
        seen[op] = reduced(full(2.0 + RANK), getattr(dist.ReduceOp, op))
    average = full(2.0 + RANK)
    seen["AVG error"] = message_of(lambda: dist.all_reduce(average, op=dist.ReduceOp.AVG))
    seen["AVG"] = average[0].item()
    seen["float64"] = message_of(lambda: reduced(full(1.0, dtype=torch.float64)))
    tensor = full(10.0 + RANK)
    dist.broadcast(tensor, src=1)
    seen["broadcast"] = tensor[0].item()
    gathered = [torch.empty(3 + rank, device="npu") for rank in range(WORLD_SIZE)]  # of unequal lengths
    dist.all_gather(gathered, full(10.0 + RANK, 3 + RANK))
    seen["all_gather"] = [tensor.tolist() for tensor in gathered]
    part = torch.empty(2, device="npu")
    dist.reduce_scatter(part, [full(1.0, 2), full(5.0, 2)])
    seen["reduce_scatter"] = part.tolist()
    swapped = torch.empty(2, device="npu")
    dist.all_to_all_single(swapped, torch.tensor([10.0 * RANK, 10.0 * RANK + 1], device="npu"))
    seen["all_to_all"] = swapped.tolist()
    large = torch.arange(1_000_000, device="npu", dtype=torch.float32)  # four mailboxes full
    received = torch.empty(1_000_000, device="npu")
    dist.send(large, 1) if RANK == 0 else dist.recv(received, 0)
    seen["received all"] = RANK == 0 or torch.equal(large, received)
    objects = [None] * WORLD_SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    seen["objects"] = objects
    dist.barrier()
    return seen


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 5))


def batch():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=draw), torch.tensor([0, 1, 2, 3])


def reference_gradients() -> list:
    model, (inputs, targets) = make_model(), batch()
    F.cross_entropy(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


def ddp() -> dict:
    """Largest difference between DDP's gradients, half of the rows per rank, and those of one CPU process."""
    model = torch.nn.parallel.DistributedDataParallel(make_model().npu(), device_ids=[RANK])
    inputs, targets = (part.chunk(WORLD_SIZE)[RANK].npu() for part in batch())
    F.cross_entropy(model(inputs), targets).backward()
    pairs = zip(model.parameters(), reference_gradients())
    return {"difference": max((mine.grad.cpu() - other).abs().max().item() for mine, other in pairs)}


def fsdp2() -> dict:
    """As ddp(), with each parameter sharded over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model().npu(), mesh=init_device_mesh("npu", (WORLD_SIZE,)))
    inputs, targets = (part.chunk(WORLD_SIZE)[RANK].npu() for part in batch())
    F.cross_entropy(model(inputs), targets).backward()
    pairs = zip(model.parameters(), reference_gradients())
    return {"difference": max((mine.grad.full_tensor().cpu() - other).abs().max().item() for mine, other in pairs)}


def thread() -> dict:
    """A gradient after another thread, which has chosen no card, used a tensor of this rank's."""
    tensor = torch.full((4,), 3.0, device=f"npu:{RANK}", requires_grad=True)
    with ThreadPoolExecutor(1) as pool:
        doubled = pool.submit(lambda: (tensor.detach() * 2).to("cpu")).result()
    (tensor * tensor).sum().backward()
    return {"doubled": doubled.tolist(), "gradient": tensor.grad.tolist()}


def mismatch() -> dict:
    """Ranks that run different operations, or the same with different counts."""
    first, second = (dist.all_reduce, lambda tensor: dist.broadcast(tensor, src=0)), full(1.0, 4 + RANK)
    return {
        "operation": message_of(lambda: first[RANK](full(1.0))),
        "count": message_of(lambda: dist.all_reduce(second)),
    }


def absent() -> dict:
    """Rank 1 stays away from an all_reduce."""
    if RANK == 1:
        return {}
    begin = time.monotonic()
    message = message_of(lambda: dist.all_reduce(full(1.0)))
    return {"message": message, "seconds": time.monotonic() - begin}


def killed() -> dict:
    """Rank 1 is killed, as the system does with a process that takes too much memory."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"message": message_of(lambda: dist.all_reduce(full(1.0)))}


def shared_mappings() -> list:
    """What this process has mapped that other processes can see: files in /dev/shm, and memory without a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in lines if len(line.split()) > 5}
    return sorted(path for path in paths if path.startswith(("/dev/shm", "/memfd")))


def main():
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl", init_method=f"file://{directory}/meeting", rank=RANK, world_size=WORLD_SIZE)
    reduced(full(0.0))  # all ranks are connected
    seen = {"memory of HCCL": shared_mappings()} | {name: globals()[name]() for name in names}
    (directory / f"rank{RANK}.json").write_text(json.dumps(seen))
    os._exit(0)  # after an error in the queue torch_npu does not shut down cleanly, here or on hardware


if __name__ == "__main__":
    main()
