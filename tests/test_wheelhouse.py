"""The folder of wheels for machines without a network."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import wheelhouse


def verify(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-S", ROOT / "tools" / "wheelhouse.py", "verify", folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(b"a")
    (tmp_path / "b-1-py3-none-any.whl").write_bytes(b"b")
    (tmp_path / "SHA256SUMS").write_text(  # of the letters a and b
        "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb  a-1-py3-none-any.whl\n"
        "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d  b-1-py3-none-any.whl\n"
    )
    return tmp_path


def test_a_whole_folder_is_accepted(folder):
    result = verify(folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip().endswith("2 wheels have their checksums")


def test_missing_damaged_and_foreign_wheels_are_named_at_once(folder):
    (folder / "a-1-py3-none-any.whl").write_bytes(b"A")
    (folder / "b-1-py3-none-any.whl").rename(folder / "c-1-py3-none-any.whl")
    result = verify(folder)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {folder}: b-1-py3-none-any.whl is missing; c-1-py3-none-any.whl is not in SHA256SUMS; "
        "a-1-py3-none-any.whl is damaged: copy the folder again\n"
    )


def test_a_folder_without_checksums_is_refused(tmp_path):
    result = verify(tmp_path)
    assert result.returncode == 1
    assert "has no readable SHA256SUMS; `make wheelhouse` makes such a folder" in result.stderr


def test_pins_are_read_through_included_files():
    pins = wheelhouse.pinned([ROOT / "requirements-cann8.txt"])
    assert pins["torch"] == "torch==2.1.0"
    assert pins["torch_npu"] == "torch_npu==2.1.0.post10"
    assert pins["jieba"] == "jieba==0.42.1"


def test_pip_takes_the_markers_of_the_other_machine(tmp_path):
    (tmp_path / "requirements.txt").write_text(
        'wanted==1; platform_machine == "aarch64" and python_version == "3.10"\n'
        'unwanted==1; platform_machine == "x86_64" or python_version != "3.10"\n'
    )
    command = [sys.executable, ROOT / "tools" / "wheelhouse.py", "pip-for", "3.10", "aarch64", "download", "--no-index"]
    command += ["--only-binary=:all:", "--python-version", "3.10", "--platform", "manylinux_2_28_aarch64"]
    result = subprocess.run(
        [*command, "-r", "requirements.txt"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "No matching distribution found for wanted==1" in result.stderr
    assert "unwanted" not in result.stderr
