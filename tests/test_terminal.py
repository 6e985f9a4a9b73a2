"""What is printed neither steers the terminal nor fails on it, and work goes on when nobody reads."""

import os
import subprocess
import sys

import pytest

from sft.terminal import visible, visible_beside_bars
from tests.conftest import ROOT, run_script

PROGRAM = """
import os, sys
from pathlib import Path
from sft.errors import RunFailed, UserError, run

def main():
    for number in range(20_000):
        print("line", number, flush=number % 100 == 0)
    print("on the other stream", file=sys.stderr)
    Path(sys.argv[1]).write_text("done")
    if sys.argv[2:] == ["fails"]:
        raise UserError("a sentence")

run(main)
"""


def start(*words, code=PROGRAM, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], cwd=ROOT, stderr=subprocess.PIPE, **options)


def test_steering_characters_are_written_out_and_all_else_stays():
    assert visible("\x1b]0;title\x07 \x1b[2J \x9b1m \x00 \x7f") == r"\x1b]0;title\x07 \x1b[2J \x9b1m \x00 \x7f"
    assert visible("a\rb\r\nc") == "a\\rb\nc"
    assert visible("left \u202e right \u2028") == r"left \u202e right \u2028"
    text = "tab\t lines\n 中文 🙂 é ×\u00a0\u200d"
    assert visible(text) == text
    bar = "\r 50%|█████     | 1/2\x1b[A\n"
    assert visible_beside_bars(bar) == bar and visible_beside_bars("\x1b[2J\r") == "\\x1b[2J\r"


@pytest.mark.parametrize(("words", "status"), [([], 0), (["fails"], 2)])
def test_a_reader_who_leaves_ends_the_output_and_not_the_work(tmp_path, words, status):
    process = start(tmp_path / "done", *words, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"line 0\n"
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(30) == status and (tmp_path / "done").read_text() == "done"
    assert errors == "on the other stream\n" + ("error: a sentence\n" if status else "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_a_full_disk_under_the_log_is_said_once_and_the_work_goes_on(tmp_path):
    with open("/dev/full", "wb") as full:
        process = start(tmp_path / "done", stdout=full)
        errors = process.communicate(timeout=30)[1].decode().splitlines()
    assert process.returncode == 0 and (tmp_path / "done").exists()
    assert errors == [
        "warning: the output cannot be written (No space left on device); going on without it", "on the other stream"
    ]  # fmt: skip


def test_streams_that_are_closed_from_the_start_are_no_error(tmp_path):
    command = f'"{sys.executable}" -c "$PROGRAM" {tmp_path}/done >&- 2>&-'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env={**os.environ, "PROGRAM": PROGRAM}, timeout=30)
    assert done.returncode == 0 and (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", r"\u4e2d \u03a3 \U0001f642 \udcff"), ("gbk", r"中 Σ \U0001f642 \udcff"), ("utf-8", r"中 Σ 🙂 \udcff")],
)
def test_what_an_encoding_lacks_is_written_out(encoding, shown):
    code = "from sft.errors import run, UserError\ndef main():\n    print('中 Σ 🙂 \\udcff')\n    raise UserError('中 Σ 🙂 \\udcff')\nrun(main)"
    process = start(code=code, stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": encoding})
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert (output.decode(encoding), errors.decode(encoding)) == (f"{shown}\n", f"error: {shown}\n")


@pytest.mark.parametrize("script", ["data_prep.py", "train.py", "doctor.py"])
def test_help_is_shown_on_any_terminal(script):
    result = run_script(script, "--help", env={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "") and "--" in result.stdout


def test_a_sentence_or_a_traceback_shows_no_secret():
    for kind, status in (("UserError", 2), ("KeyError", 1)):
        code = f"from sft.errors import run, UserError\ndef main():\n    raise {kind}('at https://me:pw-word@h.cn/x')\nrun(main)"
        process = start(code=code.replace("pw-word", "pw' + '-word"), stdout=subprocess.PIPE)
        errors = process.communicate(timeout=30)[1].decode()
        assert process.returncode == status and "pw-word" not in errors and "https://<secret>@h.cn/x" in errors
