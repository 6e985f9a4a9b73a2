"""What the benchmarks share: taking turns between jobs, watching a command's memory, tables and result files."""

import contextlib
import itertools
import json
import os
import platform
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import psutil

from sft import artifacts

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
DEADLINE_S = 1800  # for one step of a job, or its start


def launch_command(processes: int, *argv) -> list[str]:
    """`accelerate launch` of a script on so many CPU processes, on a free port."""
    config = ROOT / "accelerate_configs" / ("cpu_1.yaml" if processes == 1 else "cpu_2.yaml")
    flags = ["--config_file", config, "--num_processes", processes, "--main_process_port", 0]
    return [sys.executable, "-m", "accelerate.commands.launch", *map(str, flags), *map(str, argv)]


class Turns:
    """A job's end of the line to the benchmark that tells it when to go on; each rank has its own."""

    def __init__(self):
        host, port = os.environ["BENCHMARK_ADDRESS"].split(":")
        self.connection = Client((host, int(port)))
        self.connection.send(int(os.environ.get("RANK", "0")))
        self.started, self.cpu_started = 0.0, 0.0

    def wait(self) -> str:
        """The next order: "step", or the name of another thing to time."""
        order = self.connection.recv()
        self.started, self.cpu_started = time.perf_counter(), time.process_time()
        return order

    def done(self, **record) -> None:
        """Reports what was ordered, with its seconds and this process's CPU seconds."""
        seconds, cpu_s = time.perf_counter() - self.started, time.process_time() - self.cpu_started
        self.connection.send({"seconds": seconds, "cpu_s": cpu_s, "peak_memory_bytes": peak_memory_bytes(), **record})


@contextlib.contextmanager
def waiting_job(processes: int, *argv) -> Iterator[list[Connection]]:
    """Starts a job of so many ranks; yields a connection to each rank, which waits for its turn. Ends it at the end."""
    with Listener(("127.0.0.1", 0)) as listener, tempfile.TemporaryFile("w+") as log:
        listener._listener._socket.settimeout(DEADLINE_S)
        address = "{}:{}".format(*listener.address)
        environment = {**os.environ, **ONE_THREAD, "BENCHMARK_ADDRESS": address}
        job = subprocess.Popen(launch_command(processes, *argv), cwd=ROOT, env=environment, stdout=log, stderr=log)
        ranks = {}
        try:
            while len(ranks) < processes:
                connection = listener.accept()
                ranks[connection.recv()] = connection
            yield [ranks[rank] for rank in range(processes)]
        except BaseException:
            log.seek(0)
            print(log.read()[-5000:], file=sys.stderr)
            raise
        finally:
            for connection in ranks.values():
                connection.close()
            end(job)


def training_rows(model_name_or_path: str, dataset_dir: str, short: bool = False) -> str:
    """`dataset_dir`, or when that is empty a data set of the embedded pairs for this model, made on the spot.

    short: answers of very different lengths instead, 34 words on average, for rows like those of instruction collections
    (Alpaca's have some 90 tokens): a seeded log-normal number of words of the embedded answers.
    """
    if dataset_dir:
        return dataset_dir
    source = ROOT / "data" / "ascend_qa_en.jsonl"
    made = ROOT / "outputs" / "benchmarks" / ("dataset-short" if short else "dataset")
    if short:
        pairs, draw = read_lines(source), random.Random(0)
        words = itertools.cycle(word for pair in pairs for word in pair["answer"].split())
        source = made.with_suffix(".jsonl")
        source.parent.mkdir(parents=True, exist_ok=True)
        with source.open("w", encoding="utf-8") as file:
            for pair in pairs:
                length = min(250, 1 + int(draw.lognormvariate(3.2, 0.8)))
                answer = " ".join(itertools.islice(words, length))
                file.write(json.dumps({"question": pair["question"], "answer": answer}) + "\n")
    run_watched([
        sys.executable, "data_prep.py", "--input", source, "--model_name_or_path", model_name_or_path,
        "--output_dir", made, "--overwrite",
    ])  # fmt: skip
    return str(made)


def take_turn(ranks: list[Connection], order: str) -> dict:
    """Lets a waiting job do one thing. Its seconds are the slowest rank's, its CPU seconds the mean of the ranks."""
    for connection in ranks:
        connection.send(order)
    records = []
    for connection in ranks:
        if not connection.poll(DEADLINE_S):
            raise RuntimeError(f"a rank did not report within {DEADLINE_S} s after the order {order!r}")
        records.append(connection.recv())
    return {
        **records[0],
        "seconds": max(record["seconds"] for record in records),
        "cpu_s": statistics.mean(record["cpu_s"] for record in records),
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in records),
    }


def end(job: subprocess.Popen) -> None:
    """Ends a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        for process in family if job.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    job.wait()


def run_watched(command: list, env: dict | None = None, every_s: float = 0.05) -> dict:
    """Runs a command to its end: seconds, CPU seconds, its output, and the most resident memory it and its children had.

    Pages that several processes share are counted in each of them. Raises: RuntimeError with the output when it fails.
    """
    with tempfile.TemporaryFile("w+") as log:
        started, cpu_started = time.perf_counter(), cpu_of_children()
        job = subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, env={**os.environ, **ONE_THREAD, **(env or {})}, stdout=log, stderr=log
        )  # fmt: skip
        peak = 0
        try:
            watched = psutil.Process(job.pid)
            while job.poll() is None:
                peak = max(peak, resident_bytes(watched))
                time.sleep(every_s)
        finally:
            end(job)
        seconds = time.perf_counter() - started
        log.seek(0)
        output = log.read()
    if job.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with status {job.returncode}:\n{output[-4000:]}")
    return {"seconds": seconds, "cpu_s": cpu_of_children() - cpu_started, "peak_rss_bytes": peak, "output": output}


def cpu_of_children() -> float:
    """CPU seconds of all children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def resident_bytes(process: psutil.Process) -> int:
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total


def peak_memory_bytes() -> int:
    """Most resident memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def median_ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios of measurements that were made one after another."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def print_table(rows: list[dict]) -> None:
    """A Markdown table; the keys of the first row are its head."""
    cells = [[str(key) for key in rows[0]]]
    cells += [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for number, line in enumerate(cells):
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")


def write_result(path: str, settings, table: list[dict], **figures) -> None:
    """Prints the table and the figures and writes them with what they were measured on."""
    print_table(table)
    for name, value in figures.items():
        if isinstance(value, float):
            print(f"{name}: {value:.3g}")
    machine = {
        "host": socket.gethostname(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    result = {"settings": asdict(settings), "table": table, **figures, "machine": machine}
    artifacts.write_json(path, {**result, "versions": artifacts.library_versions()})
    print(path)


def read_lines(path: Path) -> list[dict]:
    """The objects of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
