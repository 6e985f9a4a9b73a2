"""What the scripts put into the environment of an NPU before torch is imported. Standard library only: the doctor says it."""

import ctypes
import re

# Read by torch_npu when it is loaded (torch_npu docs, "Environment variables"; HCCL docs for the last one):
# growing segments instead of fragments, operator launch on two queues, worker threads kept near their card, and ten
# minutes instead of two for the slowest server to join. A value that the user has set stays, as a whole: growing segments
# go with no other option of the allocator. Two queues may raise the peak of memory (docs, TASK_QUEUE_ENABLE), for which
# memory.MARGIN leaves room.
NPU_ENVIRONMENT = {
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "TASK_QUEUE_ENABLE": "2",
    "CPU_AFFINITY_CONF": "1",
    "HCCL_CONNECT_TIMEOUT": "600",
}


def npu_environment(torch_npu: str | None) -> dict[str, str]:
    """NPU_ENVIRONMENT as that release of torch_npu reads it: from 2.6 on it can keep threads near their own card, where
    before it dealt out the cores by the card's number (torch_npu docs, CPU_AFFINITY_CONF).

    It asks the driver's libdcmi which cores those are, and fails where a container lacks it.
    """
    near = torch_npu is not None and tuple(map(int, re.findall(r"\d+", torch_npu)[:2])) >= (2, 6)
    if near:
        try:
            ctypes.CDLL("libdcmi.so")
        except OSError:
            near = False
    return {**NPU_ENVIRONMENT, **({"CPU_AFFINITY_CONF": "1,npu_affine:1"} if near else {})}
