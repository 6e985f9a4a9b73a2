"""Writes what a process sees on one card, as JSON, to the file named on the command line.

It is run with two of the cards visible and 1 GiB on each.
"""

import json
import sys

import torch
import torch.nn.functional as F
import torch_npu

MIB = 1 << 20
# torch_npu 2.1 and 2.6 raise a plain RuntimeError.
OUT_OF_MEMORY = RuntimeError if torch.__version__.startswith(("2.1.", "2.6.")) else torch.OutOfMemoryError


def message_of(call, kind=RuntimeError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def allocate(size):
    return torch.empty(size, dtype=torch.int8, device="npu")


def cards() -> dict:
    return {
        "available": torch.npu.is_available(),
        "count": torch.npu.device_count(),
        "name": torch.npu.get_device_name(0),
        "accelerator": str(torch.accelerator.current_accelerator()) if hasattr(torch, "accelerator") else "npu",
        "bfloat16": torch.npu.is_bf16_supported(),
        "third card": message_of(lambda: torch.npu.set_device(2)),
    }


def memory() -> dict:
    """Every number is in MiB."""
    seen = {"total": torch.npu.mem_get_info()[1] // MIB, "allocated at first": torch.npu.memory_allocated() // MIB}
    block = torch.ones(64 * MIB // 4, device="npu")
    seen["allocated"] = torch.npu.memory_allocated() // MIB
    seen["reserved - used"] = (torch.npu.memory_reserved() - sum_used()) // MIB
    result = block * 2
    seen["allocated with a result"] = torch.npu.memory_allocated() // MIB
    seen["too much"] = message_of(lambda: allocate(960 * MIB), OUT_OF_MEMORY)
    seen["usable afterwards"] = result.sum().item()
    del block, result
    torch.npu.empty_cache()
    seen["used after all"] = sum_used() // MIB
    blocks = []
    while message_of(lambda: blocks.append(allocate(100 * MIB))) == "no error":
        pass
    seen["blocks of 100"] = len(blocks)
    seen["peak"] = torch.npu.max_memory_allocated() // MIB
    return seen


def sum_used() -> int:
    free, total = torch.npu.mem_get_info()
    return total - free


def random_numbers() -> dict:
    torch.manual_seed(7)
    first, second = torch.rand(4, device="npu"), torch.rand(4, device="npu")
    torch.manual_seed(7)
    again = torch.rand(4, device="npu")
    state = torch.npu.get_rng_state()
    dropped = F.dropout(torch.ones(1000, device="npu"), 0.25)
    torch.npu.set_rng_state(state)
    return {
        "seed repeats": torch.equal(first, again),
        "numbers advance": not torch.equal(first, second),
        "state repeats dropout": torch.equal(dropped, F.dropout(torch.ones(1000, device="npu"), 0.25)),
        "kept by dropout": int((dropped > 0).sum()),
        "generator of the CPU": message_of(lambda: torch.rand(4, device="npu", generator=torch.Generator())),
    }


def operators() -> dict:
    """Results against the CPU's, and what must be refused."""
    torch.manual_seed(0)
    query = torch.randn(2, 3, 8, 16)
    on_cpu = attention_and_gradient(query)
    on_npu = attention_and_gradient(query.to("npu"))
    grown = torch.empty(0, device="npu")
    torch.add(torch.ones(3, device="npu"), 1, out=grown)
    pinned = torch.ones(3).pin_memory()
    return {
        "attention": max((a - b.cpu()).abs().max().item() for a, b in zip(on_cpu, on_npu)),
        "adamw": max((a - b.cpu()).abs().max().item() for a, b in zip(three_steps("cpu"), three_steps("npu"))),
        "resized out": grown.tolist(),
        "indexed by the CPU": torch.arange(5.0, device="npu")[torch.tensor([3, 1])].tolist(),
        "pinned": pinned.is_pinned(),
        "pinned copy": pinned.to("npu", non_blocking=True).tolist(),
        "autocast": str(autocast_product().dtype),
        "NPU + CPU": message_of(lambda: torch.ones(2, device="npu") + torch.ones(2)),
        "NPU + other NPU": message_of(lambda: torch.ones(2, device="npu:0") + torch.ones(2, device="npu:1")),
    }


def autocast_product():
    with torch.autocast("npu", dtype=torch.bfloat16):
        return torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")


def attention_and_gradient(query):
    query = query.clone().requires_grad_()
    result = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    (result * torch.arange(16.0, device=query.device)).sum().backward()
    return result.detach(), query.grad


def three_steps(device):
    """Parameters after three AdamW steps with clipping."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.SiLU(), torch.nn.Linear(8, 5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = torch.randn(4, 6).to(device), torch.tensor([0, 1, 2, 3]).to(device)
    for _ in range(3):
        F.cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def unsupported() -> dict:
    """Last: on hardware, too, an operator that fails in the queue leaves a process that cannot go on."""

    def by_name():
        torch_npu.npu_rms_norm(torch.ones(4, 4, device="npu"), torch.ones(4, device="npu"))
        torch.npu.synchronize()

    return {
        "aclnn": message_of(lambda: torch_npu.npu_swiglu(torch.ones(4, 4, device="npu"))),
        "by name": message_of(by_name),
    }


if __name__ == "__main__":
    parts = (cards, memory, random_numbers, operators, unsupported)
    seen = {part.__name__: part() for part in parts}
    with open(sys.argv[1], "w") as file:
        json.dump(seen, file)
