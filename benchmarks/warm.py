"""Starts of train.py that cost a fork instead of ten seconds of imports, for tests that start it many times.

A server process imports what train.py imports and forks for each start. The fork runs the real script with its own
command line, environment and log; several processes are started by torch's elastic agent, which is what `accelerate
launch` and `torchrun` run, so signals and deaths are handled as there.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


class Start:
    """One start of train.py: `pid` is the launcher's (the process itself when there is one only)."""

    def __init__(self, pid: int, log: Path, processes: int, wait: Callable[[float], int]):
        self.pid, self.log, self.processes, self._wait = pid, log, processes, wait

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def rank_pids(self) -> list[int]:
        """The ranks' process ids in order of their rank, as far as they live; [] before the agent has started them."""
        if self.processes == 1:
            return [self.pid]
        try:
            children = psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []
        return sorted(child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE)

    def group_lives(self) -> bool:
        """Whether any process of this start is alive, orphans of a killed launcher included."""
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    return True
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return False

    def kill_group(self) -> None:
        """SIGKILL to the launcher and all ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float = 120) -> int:
        """The launcher's exit status; negative: the signal that ended it. Raises: TimeoutError, after killing all."""
        try:
            return self._wait(timeout_s)
        except TimeoutError:
            self.kill_group()
            raise TimeoutError(f"not ended after {timeout_s} s; it printed:\n{self.output[-6000:]}") from None


class WarmServer:
    """The client's end of the server process. Use it as a context manager."""

    def __init__(self, script: str = "train.py"):
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.statuses: dict[int, int] = {}
        self.count = 0
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(ROOT / script)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> "WarmServer":
        return self

    def __exit__(self, *exception) -> None:
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def start(self, *argv, processes: int = 2, env: dict | None = None, limits: dict | None = None) -> Start:
        """Starts the script with these arguments. limits: {"RLIMIT_FSIZE": bytes, …} for its processes."""
        self.count += 1
        log = Path(self.folder.name) / f"start-{self.count}.log"
        log.touch()
        request = {
            "argv": [str(word) for word in argv], "processes": processes, "env": env or {}, "limits": limits or {},
            "log": str(log),
        }  # fmt: skip
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        started = None
        while started is None:
            started = self._read().get("started")
        return Start(started, log, processes, partial(self.wait, started))

    def run(self, *argv, processes: int = 2, env=None, limits=None, timeout_s: float = 120) -> tuple[int, str]:
        """(exit status, what it printed) of one start that is waited for."""
        start = self.start(*argv, processes=processes, env=env, limits=limits)
        return start.wait(timeout_s), start.output

    def wait(self, pid: int, timeout_s: float) -> int:
        end = time.monotonic() + timeout_s
        while pid not in self.statuses:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError
            self._read()
        return self.statuses[pid]

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the warm server has ended")
        message = json.loads(line)
        if "ended" in message:
            self.statuses[message["ended"]] = message["status"]
        return message


def run_main(script: str, argv: list[str]) -> None:
    """Runs a script as `python SCRIPT ARGV` would, in this process."""
    sys.argv = [script, *argv]
    sys.path[0] = str(ROOT)
    runpy.run_path(script, run_name="__main__")


def launch(script: str, argv: list[str], processes: int) -> None:
    """What `torchrun --standalone --nproc_per_node` does, with forks as its children."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        run_id=str(os.getpid()), start_method="fork", monitor_interval=0.1, max_restarts=0,
    )  # fmt: skip
    elastic_launch(config, run_rank)(script, argv)


def run_rank(script: str, argv: list[str]) -> None:
    """`run_main`, ending as a program does: multiprocessing would wait for a launcher that may have been killed."""
    launcher = os.getppid()
    run_main(script, argv)
    if os.getppid() != launcher:
        sys.stdout.flush()
        os._exit(0)


def serve(script: str) -> None:
    """Forks for each request on stdin; reports starts and ends on stdout, one JSON object per line."""
    runpy.run_path(script, run_name="warm")  # its imports, without its main
    for name in ("datasets", "matplotlib.backends.backend_agg", "torch.distributed.launcher.api", "sft.report"):
        importlib.import_module(name)  # what functions import later
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny = Qwen2Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    Qwen2ForCausalLM.from_pretrained(None, config=tiny, state_dict=Qwen2ForCausalLM(tiny).state_dict())

    gc.collect()
    gc.freeze()  # forks share what a collection would otherwise touch and copy
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    living: set[int] = set()
    waiting = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02 if living else None)
        for pid in list(living):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                living.remove(pid)
                replies.write(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}) + "\n")
        if not ready:
            continue
        block = os.read(0, 1 << 16)
        if not block:
            return
        waiting += block
        while b"\n" in waiting:
            line, waiting = waiting.split(b"\n", 1)
            request = json.loads(line)
            pid = os.fork()
            if pid:
                living.add(pid)
                replies.write(json.dumps({"started": pid}) + "\n")
                continue
            replies.close()
            os.setsid()
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            os.environ.update(request["env"])
            for name, value in request["limits"].items():
                resource.setrlimit(getattr(resource, name), (value, value))
            if request["processes"] == 1:
                run_main(script, request["argv"])
            else:
                launch(script, request["argv"], request["processes"])
            return


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve(sys.argv[1])
