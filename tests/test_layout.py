"""Imports go one way, and vendors are named in one place."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEVELS = [  # a module imports only from levels before its own
    {"errors", "prerequisites", "wheelhouse", "machine", "loss", "holdout", "phrases", "card"},
    {"config", "artifacts", "records", "tokenizer", "metrics", "failures", "encoding", "batching"},
    {"device", "journal", "embedded", "diagnosis", "memory", "plots"},
    {"modeling", "collectives", "watchdog"},
    {"evaluation", "checkpoint", "weights", "report"},
    {"origin"},
]
SCRIPTS = ["data_prep.py", "train.py", "eval.py", "doctor.py", "export.py"]


def imports(path: Path) -> set[str]:
    """Names of the project's own modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "sft":
                found |= {f"sft.{alias.name}" for alias in node.names}
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_modules_import_only_from_lower_levels():
    level_of = {f"sft.{name}": number for number, names in enumerate(LEVELS) for name in names}
    files = [path for path in (ROOT / "sft").glob("*.py") if path.name != "__init__.py"]
    assert {f"sft.{path.stem}" for path in files} == set(level_of)
    for path in files:
        for name in imports(path) & set(level_of):
            assert level_of[name] < level_of[f"sft.{path.stem}"], f"{path.name} imports {name}"


def test_scripts_do_not_import_each_other_and_nothing_imports_tests():
    scripts = {name.removesuffix(".py") for name in SCRIPTS}
    files = [ROOT / name for name in SCRIPTS] + list((ROOT / "sft").glob("*.py"))
    assert len(files) > 20
    for path in files:
        found = imports(path)
        assert not found & scripts, path.name
        assert not any(name.split(".")[0] == "tests" for name in found), path.name


def test_vendor_names_stand_in_device_and_doctor_only():
    allowed = {"device.py", "diagnosis.py", "failures.py", "machine.py", "memory.py", "collectives.py"}  # the doctor's
    files = [*(ROOT / "sft").glob("*.py"), ROOT / "train.py", ROOT / "eval.py", ROOT / "data_prep.py"]
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
