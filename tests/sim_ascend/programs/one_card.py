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


def fused() -> dict:
    """Fused operators against the formulas of their documentation, written out in plain torch on the CPU."""
    torch.manual_seed(0)
    rows, mask = (5, 1, 7), torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    ends = [5, 6, 13]
    q, k, v = torch.randn(13, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)

    def attention(q, k, v, **arguments):
        return torch_npu.npu_fusion_attention(
            q, k, v, 4, "TND", scale=0.3, actual_seq_qlen=ends, actual_seq_kvlen=ends, **arguments
        )[0]

    def by_hand(q, k, v, seen):
        row = torch.repeat_interleave(torch.arange(3), torch.tensor(rows))
        distance = torch.arange(13)[:, None] - torch.arange(13)[None]
        hidden = ~(seen(distance) & (row[:, None] == row[None]))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(0.3).masked_fill(hidden, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    x, gamma, half = torch.randn(3, 8), torch.randn(8), torch.randn(2, 5, 3, 6)
    angles = torch.randn(2, 1, 5, 1, 6)
    return {
        "causal": gap(lambda *t: attention(*t, atten_mask=mask, sparse_mode=3), lambda *t: by_hand(*t, lambda d: d >= 0), q, k, v),
        "band": gap(
            lambda *t: attention(*t, atten_mask=mask, sparse_mode=4, pre_tockens=2, next_tockens=0),
            lambda *t: by_hand(*t, lambda d: (d >= 0) & (d <= 2)), q, k, v,
        ),
        "no mask": gap(lambda *t: attention(*t, sparse_mode=3), lambda *t: by_hand(*t, lambda d: d == d), q, k, v),
        "rms_norm": gap(
            lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-6)[0],
            lambda x, g: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * g, x, gamma,
        ),
        "rotary": gap(
            lambda x: torch_npu.npu_rotary_mul(x, *angles.to(x.device)),
            lambda x: x * angles[0] + torch.cat([-x[..., 3:], x[..., :3]], -1) * angles[1], half,
        ),
        "swiglu": gap(lambda x: torch_npu.npu_swiglu(x), lambda x: F.silu(x[:, :4]) * x[:, 4:], x),
        "swiglu of dim 0": gap(lambda x: torch_npu.npu_swiglu(x, 0), lambda x: F.silu(x[:4]) * x[4:], x.T),
        "mask of another size": message_of(lambda: attention(q.npu(), k.npu(), v.npu(), atten_mask=mask[:13, :13], sparse_mode=3)),
        "ends that miss a token": message_of(lambda: torch_npu.npu_fusion_attention(
            q.npu(), k.npu(), v.npu(), 4, "TND", atten_mask=mask, actual_seq_qlen=[5, 12], actual_seq_kvlen=[5, 12], sparse_mode=3)),
    }  # fmt: skip


def gap(on_card, by_hand, *inputs) -> float:
    """Largest difference of result and gradients by all inputs."""
    found = []
    for function, device in ((on_card, "npu"), (by_hand, "cpu")):
        leaves = [tensor.to(device).requires_grad_() for tensor in inputs]
        result = function(*leaves)
        slope = torch.arange(result.numel(), device=device, dtype=torch.float32).view(result.shape) / result.numel()
        found.append([t.detach().cpu() for t in (result, *torch.autograd.grad(result, leaves, slope))])
    return max(float((a - b).abs().max()) for a, b in zip(*found))


def unsupported() -> dict:
    """Last: on hardware, too, an operator that fails in the queue leaves a process that cannot go on."""

    def by_name():
        torch_npu.npu_sort_v2(torch.ones(4, 4, device="npu"))
        torch.npu.synchronize()

    return {
        "aclnn": message_of(lambda: torch_npu.npu_gelu(torch.ones(4, 4, device="npu"))),
        "by name": message_of(by_name),
    }


if __name__ == "__main__":
    parts = (cards, memory, random_numbers, operators, fused, unsupported)
    seen = {part.__name__: part() for part in parts}
    with open(sys.argv[1], "w") as file:
        json.dump(seen, file)
