"""Builds the trace-only CANN, beside the simulated one and from its sources (tests/sim_ascend/build.py)."""

import re
from pathlib import Path

from tests.sim_ascend.build import SOURCES as SIMULATED
from tests.sim_ascend.build import built_once, compile_cann, variables

SOURCES = Path(__file__).resolve().parent / "src"
TRACED = [  # functions of acl.cpp in whose place trace.cpp stands
    "aclrtSynchronizeStream", "aclrtSynchronizeStreamWithTimeout", "aclrtSynchronizeDevice",
    "aclrtSynchronizeDeviceWithTimeout", "aclrtSynchronizeEvent", "aclrtStreamWaitEvent", "aclrtMemcpy", "aclrtMemcpyAsync",
    "aclrtMemset", "aclrtMemsetAsync",
]  # fmt: skip
PREPARES = "GetWorkspaceSize"


def environment(memory_bytes: int = 64 << 30, soc: str = "Ascend910B3") -> dict[str, str]:
    """Returns the variables that a subprocess needs, beside the current ones, to see one card that only counts.

    Raises: Unavailable, as for the simulated Ascend.
    """
    return variables(build(), cards=1, memory_bytes=memory_bytes, soc=soc)


def build() -> Path:
    """Returns the folder of the build for these sources and versions; makes it if absent (ten seconds)."""

    def compile_all(library: Path, torch_npu: Path) -> None:
        names = operators(torch_npu)
        (library / "operators.inc").write_text("".join(f"OPERATOR({name})\n" for name in names))
        renamed = [f"-D{name}=untraced_{name}" for name in TRACED]
        acl, hccl = (SIMULATED / f"{name}.cpp" for name in ("acl", "hccl"))
        compile_cann(
            library, torch_npu,
            {acl: ["-DWITHOUT_OPERATORS", *renamed], hccl: [], SOURCES / "trace.cpp": [f"-I{library}"]},
        )  # fmt: skip

    sources = [*SOURCES.iterdir(), *SIMULATED.iterdir(), Path(__file__), SIMULATED.parent / "build.py"]
    return built_once("trace", sources, compile_all)


def operators(torch_npu: Path) -> list[str]:
    """The operators of CANN that this torch_npu can launch: names in its library that also stand there with "…GetWorkspaceSize"."""
    content = (torch_npu / "lib" / "libtorch_npu.so").read_bytes()
    names = {match.decode() for match in re.findall(rb"(?<=\x00)aclnn[A-Za-z0-9]+(?=\x00)", content)}
    return sorted(name for name in names if name + PREPARES in names)
