"""Kills of trainings at random instants: what they cost, and whether the run is in the end the one left in peace.

Each training is two processes of the real train.py on the CPU, with dropout, evaluations and frequent checkpoints.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from sft.artifacts import sha256_file
from sft.journal import read_metrics
from tools import tiny
from tools.warm import Start, WarmServer

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    "--max_steps", "30", "--save_steps", "3", "--eval_steps", "10", "--global_batch_size", "4", "--lora_dropout", "0.1",
    "--learning_rate", "1e-3", "--report_to", "none",
)  # fmt: skip
KINDS = ("SIGKILL rank 0", "SIGKILL rank 1", "SIGKILL all", "SIGKILL launcher", "SIGTERM rank", "SIGTERM launcher")
MOMENTS = ("starting", "training", "training", "saving", "saving", "finishing")
VARIES = ("step_time_s", "tokens_per_s", "peak_memory_bytes", "mfu")
START_S = 4.0  # a kill while starting comes within so many seconds


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """A tiny model and a data set of 60 rows."""
    rows = tiny.make_rows(60)
    (folder / "model").mkdir()
    tiny.save_model(folder / "model", tiny.save_tokenizer(folder / "model", [t for row in rows for t in row.values()]))
    source = tiny.write_jsonl(folder / "rows.jsonl", rows)
    command = [sys.executable, "data_prep.py", "--input", source, "--model_name_or_path", folder / "model",
               "--output_dir", folder / "dataset"]  # fmt: skip
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True)
    return folder / "model", folder / "dataset"


def start_by_command(argv: list, log: Path) -> Start:
    """A start by the command line that users type, imports and all."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs/cpu_2.yaml",
        "--main_process_port", "0", "train.py", *argv,
    ]  # fmt: skip
    with open(log, "ab") as file:
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=file, stderr=file, start_new_session=True)

    def wait(timeout_s: float) -> int:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    return Start(process.pid, log, 2, wait, by_command=True)


def complete_checkpoints(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that have taken their final name."""
    return sorted(int(path.name.split("-")[1]) for path in run_dir.glob("checkpoint-*"))


def result(run_dir: Path) -> dict:
    """What two runs that learnt the same have in common, to the bit."""
    return {
        "metrics": [{k: v for k, v in record.items() if k not in VARIES} for record in read_metrics(run_dir)],
        "adapter": sha256_file(run_dir / "adapter_model.safetensors"),
        "optimizer": sha256_file(run_dir / f"checkpoint-{SETTINGS[1]}" / "optimizer.safetensors"),
    }


def wait_for_moment(moment: str, run_dir: Path, ended, draw: random.Random) -> None:
    """Waits for the kill's instant: while starting, training, saving (a temporary name is there) or finishing."""
    begin = time.monotonic()
    metrics = run_dir / "metrics.jsonl"
    before = modified(metrics)
    arrived = {
        "starting": lambda: True,
        "training": lambda: modified(metrics) != before,
        "saving": lambda: any(run_dir.glob(".checkpoint-*")),
        "finishing": lambda: any(run_dir.glob(".adapter.tmp-*")),
    }[moment]
    while not arrived() and not ended() and time.monotonic() - begin < 60:
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, {"starting": START_S, "training": 1.0}.get(moment, 0.02)))


def modified(path: Path) -> int:
    """When a file was last written; 0 when it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def deliver(kind: str, start: Start, draw: random.Random) -> bool:
    """Sends what `kind` says. Returns whether there was somebody to receive it."""
    ranks = start.rank_pids()
    number = getattr(signal, kind.split()[0])
    targets = {
        "rank 0": ranks[:1],
        "rank 1": ranks[1:2],
        "rank": ranks and [draw.choice(ranks)],
        "launcher": [start.pid],
    }
    try:
        if kind == "SIGKILL all":
            start.kill_group()
            return True
        chosen = targets[kind.split(maxsplit=1)[1]]
        for pid in chosen:
            os.kill(pid, number)
    except ProcessLookupError:
        return False
    return bool(chosen)


def wait_for_end(start: Start, timeout_s: float = 60) -> None:
    """Waits until all processes of a start have ended. Raises: TimeoutError, after killing them."""
    end = time.monotonic() + timeout_s
    while start.group_lives():
        if time.monotonic() > end:
            start.kill_group()
            raise TimeoutError(f"ranks outlived their launcher by {timeout_s} s: {start.output[-3000:]}")
        time.sleep(0.02)


def torture(
    model: Path, dataset: Path, folder: Path, kills: int, seed: int, command_every: int = 0, report=lambda line: None
) -> dict:
    """Runs and kills; the counts. `lost`: checkpoints that a kill cost; `different`: finished runs that are not equal
    to the undisturbed one; `refused`: starts that ended by themselves without finishing."""
    draw = random.Random(seed)
    begun = time.monotonic()
    delivered: Counter[str] = Counter()
    lost, different, refused, starts, runs = [], [], [], 0, 0
    inputs = ["--model_name_or_path", model, "--dataset_dir", dataset, *SETTINGS]
    with WarmServer() as server:

        def begin(run_dir: Path) -> Start:
            argv = [*inputs, "--output_dir", run_dir]
            if command_every and starts % command_every == 1:
                return start_by_command(argv, folder / f"command-{starts}.log")
            return server.start(*argv)

        peace = server.start(*inputs, "--output_dir", folder / "peace")
        if peace.wait() != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{peace.output[-3000:]}")
        expected = result(folder / "peace")
        while delivered.total() < kills:
            runs += 1
            run_dir = folder / f"run-{runs}"
            while not (run_dir / "summary.json").exists():
                starts += 1
                start = begin(run_dir)
                kind, moment = draw.choice(KINDS), draw.choice(MOMENTS)
                killing = delivered.total() < kills
                if killing:
                    wait_for_moment(moment, run_dir, partial(os.path.exists, run_dir / "summary.json"), draw)
                    before = complete_checkpoints(run_dir)
                    killing = deliver(kind, start, draw)
                try:
                    status = start.wait()
                    if kind != "SIGKILL launcher" or draw.random() < 0.5:  # else its orphans meet the next start
                        wait_for_end(start)
                except TimeoutError as error:
                    refused.append(f"run {runs}, {kind} while {moment}: {error}")
                    break
                if killing:
                    delivered[f"{kind}, {moment}"] += 1
                    report(f"kill {delivered.total()} of {kills}: {kind}, {moment}, checkpoints before {before}")
                    after = complete_checkpoints(run_dir)
                    if before and (not after or after[-1] < before[-1]):
                        lost.append(f"run {runs}: checkpoints {before} before {kind} while {moment}, {after} after")
                elif status != 0:
                    refused.append(f"run {runs}: {start.output[-2000:]}")
                    break
            else:
                if result(run_dir) != expected:
                    different.append(f"run {runs}")
                report(f"run {runs} is {'different' if result(run_dir) != expected else 'the same'}")
            if len(refused) > 2:
                break
    return {
        "kills": delivered.total(), "by": dict(sorted(delivered.items())), "runs": runs, "starts": starts, "lost": lost,
        "different": different, "refused": refused, "seconds": round(time.monotonic() - begun, 1), "seed": seed,
    }  # fmt: skip


PROGRAMS = {  # the others, and what of their output is the same in each execution
    "data_prep.py": ("train/*.arrow", "eval/*.arrow", "manifest.json"),
    "eval.py": ("predictions.jsonl",),
    "export.py": ("*.safetensors", "config.json", "tokenizer.json"),
}


def torture_programs(model: Path, dataset: Path, run_dir: Path, folder: Path, kills: int, seed: int) -> dict:
    """Kills preparation, evaluation and export `kills` times each and starts them again, as `torture` does training.

    run_dir: a finished run. `lost`: outputs that were there and not whole after a kill; `different`: finished outputs
    that are not those of a start left in peace, or that lie beside leftovers; `refused`: starts that failed.
    """
    draw = random.Random(seed)
    counts = {"kills": 0, "lost": [], "different": [], "refused": []}
    with WarmServer() as server:
        for script, patterns in PROGRAMS.items():
            flags = {
                "data_prep.py": ["--input", dataset.parent / "rows.jsonl", "--model_name_or_path", model],
                "eval.py": ["--run_dir", run_dir, "--max_new_tokens", "8"],
                "export.py": ["--run_dir", run_dir],
            }[script]
            place = folder / script.removesuffix(".py")
            place.mkdir()
            begun = time.monotonic()
            status, output = server.run(*flags, "--output_dir", folder / f"peace-{script}", processes=1, script=script)
            if status:
                raise RuntimeError(f"the undisturbed {script} failed:\n{output[-3000:]}")
            took = time.monotonic() - begun
            expected = fingerprint(folder / f"peace-{script}", patterns)
            if len(expected) < len(patterns):
                raise RuntimeError(f"the undisturbed {script} left only {sorted(expected)} of {patterns}")
            for _ in range(kills):
                start = server.start(*flags, "--output_dir", place / "out", processes=1, script=script)
                time.sleep(draw.uniform(0.2, 0.95) * took)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(start.pid, draw.choice((signal.SIGKILL, signal.SIGTERM)))
                start.wait()
                wait_for_end(start)  # workers of preparation may outlive it for an instant
                counts["kills"] += 1
                if script == "eval.py" or not (place / "out").exists():
                    continue  # an evaluation keeps what it has scored, and goes on with it
                if fingerprint(place / "out", patterns) != expected:
                    counts["lost"].append(f"{script}: half an output")
                shutil.rmtree(place / "out")
            status, output = server.run(*flags, "--output_dir", place / "out", processes=1, script=script)
            if status:
                counts["refused"].append(f"{script}: {output[-500:]}")
            elif fingerprint(place / "out", patterns) != expected or os.listdir(place) != ["out"]:
                counts["different"].append(f"{script}: {sorted(os.listdir(place))}")
    return counts


def fingerprint(directory: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of the files of a directory that match."""
    files = sorted(path for pattern in patterns for path in directory.glob(pattern))
    return {str(path.relative_to(directory)): sha256_file(path) for path in files}
