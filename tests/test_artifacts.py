"""Files appear whole or not at all."""

import errno
import json
import signal
import stat
import subprocess
import sys

import pytest

from sft import artifacts
from sft.errors import UserError
from tests.conftest import ROOT


def test_hashes_of_equal_values_are_equal_and_known():
    assert artifacts.sha256_text("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert artifacts.sha256_json({"b": 1, "a": [2]}) == artifacts.sha256_json({"a": [2], "b": 1})
    assert artifacts.sha256_json({"a": 1}) != artifacts.sha256_json({"a": "1"})


def test_a_written_file_replaces_the_old_one_whole(tmp_path):
    path = tmp_path / "deep" / "file.json"
    artifacts.write_json(path, {"a": "级"})
    artifacts.write_json(path, {"a": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


def test_a_directory_appears_complete_or_not_at_all(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stop"), artifacts.new_directory(target) as temporary:
        (temporary / "half").write_text("x")
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []
    with artifacts.new_directory(target) as temporary:
        (temporary / "whole").write_text("x")
        assert not target.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_replacing_a_directory_keeps_the_old_one_until_the_new_is_complete(tmp_path):
    target = tmp_path / "out"
    with artifacts.new_directory(target) as temporary:
        (temporary / "old").write_text("x")
    with pytest.raises(UserError, match="exists already"), artifacts.new_directory(target):
        pass
    with pytest.raises(KeyboardInterrupt), artifacts.new_directory(target, replace=True) as temporary:
        raise KeyboardInterrupt
    assert [p.name for p in target.iterdir()] == ["old"]
    with artifacts.new_directory(target, replace=True) as temporary:
        (temporary / "new").write_text("x")
    assert [p.name for p in target.iterdir()] == ["new"]
    with pytest.raises(UserError, match="has been made meanwhile"), artifacts.new_directory(tmp_path / "race"):
        (tmp_path / "race").mkdir()
    (tmp_path / "race").rmdir()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def missing_input(beside, temporary):
    (beside / "out.jsonl").read_text()


def missing_folder_in_it(beside, temporary):
    (temporary / "folder" / "file").write_text("x")


def full_disk(beside, temporary):
    with open("/dev/full", "w") as file:  # the system names no file
        file.write("x")


def full_disk_while_copying(beside, temporary):
    raise OSError(errno.ENOSPC, "No space left on device", str(beside / "input"), None, str(temporary / "copy"))


def full_cache(beside, temporary):
    raise OSError(errno.ENOSPC, "No space left on device", "/cache/model")


def bad_disk_under_an_input(beside, temporary):
    raise OSError(errno.EIO, "Input/output error")


def unknown_model(beside, temporary):
    raise OSError("Can't load the tokenizer for 'a/b'")


def lost_network(beside, temporary):
    raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (missing_input, "could not use {beside}/out.jsonl: No such file or directory; check the name"),
        (missing_folder_in_it, "could not write {beside}/out: No such file or directory;"),
        (full_disk, "could not write {beside}/out: No space left on device; what was complete before is untouched: free space"),
        (full_disk_while_copying, "could not write {beside}/out: No space left on device;"),
        (full_cache, "could not write /cache/model: No space left on device;"),
        (bad_disk_under_an_input, None), (unknown_model, None), (lost_network, None),
    ],
)  # fmt: skip
def test_only_what_was_refused_to_write_is_called_so(fails, words, tmp_path):
    """A directory is made from what is read and loaded meanwhile, whose errors are not its own."""
    with pytest.raises(Exception) as caught, artifacts.new_directory(tmp_path / "out") as temporary:
        fails(tmp_path, temporary)
    if words is None:  # as it was raised
        with pytest.raises(OSError) as raised:
            fails(tmp_path, tmp_path)
        assert type(caught.value) is raised.type and str(caught.value) == str(raised.value)
    else:
        assert isinstance(caught.value, UserError)
        assert str(caught.value).startswith(words.format(beside=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_directory_that_is_written_is_named(tmp_path):
    words = rf"could not write {tmp_path}: No such file or directory \({tmp_path}/checkpoint\);"
    with pytest.raises(UserError, match=words), artifacts.explained_writing(tmp_path):
        (tmp_path / "checkpoint").read_bytes()


def test_weights_that_cannot_be_written_say_which_file_and_why(tmp_path):
    import torch

    from sft.modeling import write_tensors

    with pytest.raises(OSError) as caught:
        write_tensors(tmp_path / "none" / "weights", {"a": torch.zeros(1)})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "none" / "weights"))


KILLED = """
import os, signal, sys
from pathlib import Path
from sft import artifacts
if sys.argv[2] == "no exchange":
    artifacts._exchange = lambda one, other: False
kill, replace = (lambda *_: os.kill(os.getpid(), signal.SIGKILL)), os.replace
def rename(one, other):
    replace(one, other)
    if ".old-" in str(other):
        kill()
os.replace = rename
if sys.argv[2] == "exchange":
    artifacts.shutil.rmtree = kill
with artifacts.new_directory(sys.argv[1], replace=True) as directory:
    (directory / "new").write_text("x")
    if sys.argv[2] == "block":
        kill()
"""


@pytest.mark.parametrize(("where", "after"), [("block", "old"), ("exchange", "new"), ("no exchange", "old")])
def test_a_replacement_killed_anywhere_is_cleared_by_the_next_start(tmp_path, where, after):
    target = tmp_path / "out"
    with artifacts.new_directory(target) as temporary:
        (temporary / "old").write_text("x")
    killed = subprocess.run([sys.executable, "-c", KILLED, target, where], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) > 1 or where == "no exchange"
    assert target.exists() or where == "no exchange"
    (tmp_path / ".out.tmp-of-a-person").mkdir()
    artifacts.clear_leftovers(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp-of-a-person", "out"]
    assert [path.name for path in target.iterdir()] == [after]


def test_a_directory_that_is_being_made_is_no_leftover(tmp_path):
    with artifacts.new_directory(tmp_path / "out") as temporary:
        (temporary / "row").write_text("x")
        with artifacts.new_directory(tmp_path / "out") as other:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted([temporary.name, other.name])
            (other / "row").write_text("first")
            other_name = other.name
        assert not (tmp_path / other_name).exists() and (temporary / "row").exists()
        (tmp_path / "out" / "row").unlink()
        (tmp_path / "out").rmdir()
    assert (tmp_path / "out" / "row").read_text() == "x"


def test_tokenizer_and_template_hashes_tell_changes_apart(tiny_tokenizer_dir):
    from transformers import AutoTokenizer

    first, second = (AutoTokenizer.from_pretrained(str(tiny_tokenizer_dir)) for _ in range(2))
    assert artifacts.tokenizer_sha256(first) == artifacts.tokenizer_sha256(second)
    second.add_tokens(["<extra>"])
    assert artifacts.tokenizer_sha256(first) != artifacts.tokenizer_sha256(second)
    second.chat_template = second.chat_template + " "
    assert artifacts.template_sha256(first) != artifacts.template_sha256(second)


def test_model_hash_follows_config_and_weights_but_not_the_place(tmp_path):
    contents = {"one": b"0" * 9000, "same": b"0" * 9000, "longer": b"0" * 9001, "trained": b"0" * 8999 + b"1"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(content)
    one, same, longer, trained = (artifacts.model_sha256(str(tmp_path / name)) for name in contents)
    assert one == same and len({one, longer, trained}) == 3
    assert artifacts.model_sha256("owner/name") is None


def test_model_hash_samples_all_of_a_long_file(tmp_path):
    """A change of one part in fifty, wherever it is, changes the hash."""
    size = 3_000_000
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    hashes = {artifacts.model_sha256(str(tmp_path))}
    for start in range(0, size - size // 50, size // 5):
        changed = bytearray(size)
        changed[start : start + size // 50] = b"1" * (size // 50)
        (tmp_path / "model.safetensors").write_bytes(changed)
        hashes.add(artifacts.model_sha256(str(tmp_path)))
    assert len(hashes) == 6


def test_model_hash_sees_each_tensor(tmp_path):
    """Norms are thousandths of a model, and evenly spread samples would miss most of them."""
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {
        f"layer.{n}.{kind}": np.zeros(size, np.float32)
        for n in range(40)
        for kind, size in (("w", 60_000), ("norm", 64))
    }
    hashes = set()
    for changed in (None, "layer.7.norm", "layer.33.norm"):
        changes = {changed: np.ones(64, np.float32)} if changed else {}
        save_file({**tensors, **changes}, tmp_path / "model.safetensors")
        hashes.add(artifacts.model_sha256(str(tmp_path)))
    assert len(hashes) == 3


@pytest.mark.parametrize(
    "table", ["[" * 100_000, '{"a": 1}', '{"a": {"data_offsets": ["x"]}}', '{"a": {"data_offsets": [-9e9]}}']
)
def test_a_damaged_table_of_tensors_is_hashed_all_the_same(tmp_path, table):
    """Loading says better what is wrong with it."""
    (tmp_path / "model.safetensors").write_bytes(len(table).to_bytes(8, "little") + table.encode() + bytes(5000))
    assert len(artifacts.model_sha256(str(tmp_path))) == 64
