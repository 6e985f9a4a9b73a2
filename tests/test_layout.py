"""Imports go one way, and vendors are named in one place."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SFT = [  # a module of sft/ imports only from levels before its own
    {"masking", "terminal", "schemas"},
    {"errors", "loss", "dropout", "card", "simulation", "speed", "attention", "loss_plot", "environment"},
    {"config", "artifacts", "tokenizer", "template", "batching", "hub"},
    {"dataset", "encoding", "device", "journal", "held_out"},
    {"modeling"},
    {"memory"},
    {"checkpoint", "packing", "serving", "weights"},
    {"run_directory"},
]
TRAINING = [
    {"watchdog", "micro_batch", "failures", "fused", "results", "optimizer", "inputs"},
    {"learner"},
]  # of train.py
EVALUATION = [  # of eval.py
    {"answering", "metrics", "phrases"},
    {"findings", "plots"},
    {"markdown", "webpage"},
    {"report"},
    {"report_directory"},
]
DOCTOR = [
    {"machine", "duration"},
    {"explanations", "memory"},
    {"checks", "collectives"},
]  # may import all of sft/ besides
PREPARATION = [
    {"records", "encodings", "holdout", "workers", "summary"},
    {"sources", "encoded_rows"},
    {"selection", "other_rows"},
]  # what data_prep.py needs, and eval.py to read other files
SCRIPTS = ["data_prep.py", "train.py", "eval.py", "doctor.py", "export.py"]
PACKAGES = ("sft", "preparation", "training", "evaluation", "doctor", "tools", "benchmarks", "tests", "metrics")


def imports(path: Path) -> set[str]:
    """Names of the project's own modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module in PACKAGES:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def modules(package: str) -> list[Path]:
    return [path for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]


ROOMS = {"sft": SFT, "preparation": PREPARATION, "training": TRAINING, "evaluation": EVALUATION, "doctor": DOCTOR}


@pytest.mark.parametrize(("package", "levels"), ROOMS.items())
def test_modules_import_only_from_lower_levels(package, levels):
    level_of = {f"{package}.{name}": number for number, names in enumerate(levels) for name in names}
    assert {f"{package}.{path.stem}" for path in modules(package)} == set(level_of)
    for path in modules(package):
        for name in imports(path) & set(level_of):
            assert level_of[name] < level_of[f"{package}.{path.stem}"], f"{path.name} imports {name}"


def test_packages_import_one_way():
    """sft knows nothing of who uses it; doctor and tools use sft; nothing imports a script, a test or a benchmark."""
    allowed = {
        "sft": {"sft"},
        "preparation": {"sft", "preparation"},
        "training": {"sft", "training"},
        "evaluation": {"sft", "evaluation"},
        "doctor": {"sft", "doctor"},
        "tools": {"sft", "doctor", "tools"},
    }
    scripts = {name.removesuffix(".py") for name in SCRIPTS} - {"doctor"}  # also the name of a package
    for package, may in allowed.items():
        assert len(modules(package)) > 2
        for path in modules(package):
            found = imports(path)
            assert {name.split(".")[0] for name in found} & set(PACKAGES) <= may, path
            assert not found & scripts, path
    for name in SCRIPTS:
        found = imports(ROOT / name)
        assert not found & scripts, name
        packages = {name.split(".")[0] for name in found} & set(PACKAGES)
        rooms = {
            "data_prep.py": {"preparation"},
            "train.py": {"training"},
            "eval.py": {"evaluation", "preparation"},  # it reads other files as data_prep.py does
            "doctor.py": {"doctor"},
        }
        assert packages <= {"sft"} | rooms.get(name, set()), name


def test_tests_and_benchmarks_do_not_import_each_other():
    for package, other in (("tests", "benchmarks"), ("benchmarks", "tests")):
        paths = list((ROOT / package).rglob("*.py"))
        assert len(paths) > 5
        for path in paths:
            assert other not in {name.split(".")[0] for name in imports(path)}, path


def test_vendor_names_stand_in_device_and_doctor_only():
    allowed = {"device.py", "environment.py"}
    rooms = [path for room in ("sft", "preparation", "training", "evaluation") for path in (ROOT / room).glob("*.py")]
    files = [*rooms, *(ROOT / name for name in SCRIPTS if name != "doctor.py")]
    assert len(files) > 50
    for path in files:
        if path.name in allowed:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            node.body[0].value
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                text = node.value
            elif isinstance(node, ast.Attribute):
                text = node.attr
            assert not re.search(r"(?<!requirements-)\b(npu|cuda|hccl|nccl)\b", text), (
                f"{path.name}:{node.lineno}: {text}"
            )
