"""Each name of torch_npu that the product uses exists in the oldest, a middle and the newest release it supports.

Read from the wheels' Python sources without importing them, so that no CANN is needed.
"""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sft import environment
from tests.conftest import ROOT, once

pytestmark = pytest.mark.npu
RELEASES = ["2.1.0.post10", "2.6.0", "2.13.0"]
CACHE = ROOT / ".cache" / "torch_npu_sources"
SOURCES = ("torch_npu/npu/__init__.py", "torch_npu/npu/utils.py")


def used_names() -> dict[str, set[str]]:
    """Names that the product takes from torch.npu (also written getattr(torch, kind)) and from torch_npu.npu.utils.

    Not those that a `try … except ImportError` around them makes optional.
    """
    found: dict[str, set[str]] = {"npu": set(), "utils": set()}
    for path in [*(ROOT / "sft").glob("*.py"), *(ROOT.glob("*.py"))]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        optional = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.Try) and "ImportError" in ast.unparse(block)
            for statement in block.body
            for node in ast.walk(statement)
        }
        modules = {"torch.npu": "npu"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "torch_npu.npu" and id(node) not in optional:
                modules |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.Assign) and "getattr(torch, kind)" in ast.unparse(node.value):
                modules["backend"] = "npu"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in optional:
                owner = ast.unparse(node.value)
                if owner in ("getattr(torch, device.type)", "getattr(torch, kind)"):
                    found["npu"].add(node.attr)
                elif owner in modules and modules[owner] in found:
                    found[modules[owner]].add(node.attr)
    return found


def sources(release: str) -> Path:
    """A folder with the release's Python sources of torch.npu, from its wheel; only they are kept."""

    def make(folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
            f"torch_npu=={release}",
        ]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            message = f"pip cannot get torch_npu {release}: {result.stderr.strip()[-300:]}"
            required = os.environ.get("REQUIRE_NPU_TESTS") == "1" and "PIP_NO_INDEX" not in os.environ
            (pytest.fail if required else pytest.skip)(message)
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in SOURCES:
                wheel.extract(name, folder)
        wheels[0].unlink()

    CACHE.mkdir(parents=True, exist_ok=True)
    return once(CACHE / release, make)


def bound_names(path: Path) -> set[str]:
    """Names that a module binds at its top (imports, functions, classes, assignments) or lists in __all__."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            names |= set(ast.literal_eval(node.value)) if targets == {"__all__"} else targets
    return names


def test_the_product_uses_torch_npu():
    used = used_names()
    assert {"set_compile_mode", "is_bf16_supported", "max_memory_allocated", "synchronize"} <= used["npu"]
    assert {"is_support_inf_nan", "get_npu_overflow_flag", "clear_npu_overflow_flag"} <= used["utils"]


@pytest.mark.parametrize("release", RELEASES)
def test_every_used_name_exists_in(release):
    folder = sources(release)
    for module, path in zip(("npu", "utils"), SOURCES):
        missing = used_names()[module] - bound_names(folder / path)
        assert not missing, f"torch_npu {release} lacks {sorted(missing)} in {path}"


@pytest.mark.parametrize(
    ("torch_npu", "driver", "affinity"),
    [
        (None, True, "1"), ("2.1.0.post10", True, "1"), ("2.5.1", True, "1"), ("2.6.0.post3", True, "1,npu_affine:1"),
        ("2.13.0", True, "1,npu_affine:1"), ("2.13.0", False, "1"),
    ],
)  # fmt: skip
def test_threads_stay_near_their_card_where_torch_npu_and_the_driver_can(monkeypatch, torch_npu, driver, affinity):
    """Without libdcmi torch_npu ends at the first use of a card: "libdcmi.so: cannot open shared object file"."""

    def load(name):
        assert name == "libdcmi.so"
        if not driver:
            raise OSError("cannot open shared object file")

    monkeypatch.setattr(environment.ctypes, "CDLL", load)
    assert environment.npu_environment(torch_npu) == {**environment.NPU_ENVIRONMENT, "CPU_AFFINITY_CONF": affinity}
