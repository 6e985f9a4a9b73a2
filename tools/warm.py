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
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


class Start:
    """One start of train.py: `pid` is the launcher's (the process itself when there is one only)."""

    def __init__(self, pid: int, log: Path, processes: int, wait: Callable[[float], int], by_command: bool = False):
        self.pid, self.log, self.processes, self._wait, self.by_command = pid, log, processes, wait, by_command
        self.seen: list[int] = []

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def rank_pids(self) -> list[int]:
        """The ranks' process ids, the started ones in order of their rank as far as they live."""
        if self.processes == 1:
            pids = [self.pid]
        elif self.by_command:
            pids = [child.pid for child in psutil.Process(self.pid).children()] if psutil.pid_exists(self.pid) else []
            self.seen = pids or self.seen  # they outlive a launcher that was killed
            pids = self.seen
        else:
            list_of_ranks = Path(f"{self.log}.ranks")
            pids = [int(line) for line in list_of_ranks.read_text().split()] if list_of_ranks.exists() else []
        return [pid for pid in pids if lives(pid)]

    def group_lives(self) -> bool:
        """Whether any process of this start is alive, orphans of a killed launcher included."""
        return lives(self.pid) or bool(self.rank_pids())

    def kill_group(self) -> None:
        """SIGKILL to the launcher and all ranks."""
        for pid in (*self.rank_pids(), self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

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
        self.starts: list[Start] = []
        self.count = 0
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(ROOT / script)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> "WarmServer":
        return self

    def __exit__(self, *exception) -> None:
        self.end_all()
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def end_all(self) -> None:
        """Kills what is left of all starts so far: a test that failed leaves its start running, beside the next tests."""
        starts, self.starts = self.starts, []
        for start in starts:
            if start.pid not in self.statuses:  # the server waits for it, so that its number is not another's
                start.kill_group()
                with contextlib.suppress(TimeoutError, RuntimeError):
                    self.wait(start.pid, timeout_s=10)
            for pid in start.rank_pids():  # the last that a launcher forked, and orphans of one that was killed
                with contextlib.suppress(psutil.NoSuchProcess):
                    if psutil.Process(pid).cmdline()[:2] == self.process.args[:2]:  # a fork of this server
                        os.kill(pid, signal.SIGKILL)

    def start(
        self, *argv, processes: int = 2, env: dict | None = None, limits: dict | None = None, script: str | None = None
    ) -> Start:
        """Starts the script, or another one, with these arguments. limits: {"RLIMIT_FSIZE": bytes, …} for its processes."""
        self.count += 1
        log = Path(self.folder.name) / f"start-{self.count}.log"
        log.touch()
        request = {
            "argv": [str(word) for word in argv], "processes": processes, "env": env or {}, "limits": limits or {},
            "log": str(log), "script": str(ROOT / script) if script else None,
        }  # fmt: skip
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        started = None
        while started is None:
            started = self._read().get("started")
        self.starts.append(Start(started, log, processes, partial(self.wait, started)))
        return self.starts[-1]

    def run(
        self, *argv, processes: int = 2, env=None, limits=None, script: str | None = None, timeout_s: float = 120
    ) -> tuple[int, str]:
        """(exit status, what it printed) of one start that is waited for."""
        start = self.start(*argv, processes=processes, env=env, limits=limits, script=script)
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


def lives(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def own_locks() -> None:
    """Gives this fork locks of its own where the server's would be shared by all forks, or be held by no thread of it.

    tqdm keeps one semaphore for all processes, made at its first bar: a fork that is killed with it in hand would leave
    it locked for every later start. Locks of `logging`, `random`, `threading` and fsspec renew themselves in a fork.
    """
    from tqdm import std

    if hasattr(std.TqdmDefaultWriteLock, "mp_lock"):
        del std.TqdmDefaultWriteLock.mp_lock
    std.TqdmDefaultWriteLock.th_lock = std.TRLock()
    classes = [std.tqdm]
    for bar in classes:  # grows while it is walked: libraries derive bars of their own
        classes += bar.__subclasses__()
        if "_lock" in vars(bar):
            bar.set_lock(std.TqdmDefaultWriteLock())


def run_main(script: str, argv: list[str]) -> None:
    """Runs a script as `python SCRIPT ARGV` would, in this process."""
    sys.argv = [script, *argv]
    sys.path[0] = str(ROOT)
    runpy.run_path(script, run_name="__main__")


class Fork(subprocess.Popen):
    """A child process that goes on as a fork of this one where Popen would execute a program; otherwise a Popen."""

    def _execute_child(self, args, *more) -> None:
        environment = more[
            5
        ]  # Popen passes everything by position: executable, preexec_fn, close_fds, pass_fds, cwd, env
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            with open(f"{os.environ['WARM_LOG']}.ranks", "a", encoding="utf-8") as file:
                file.write(f"{self.pid}\n")
            return
        own_locks()
        os.setsid()  # as torch asks of its children
        os.closerange(3, 1024)  # as execution of a program would: the launcher's sockets have to die with it
        os.environ.clear()
        os.environ.update(environment)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        status = 1
        try:
            run_main(args[0], list(args[1:]))
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def launch(script: str, argv: list[str], processes: int) -> None:
    """What `torchrun --standalone --nproc_per_node` does, with forks as its children."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    handler = sys.modules[api.SubprocessHandler.__module__]
    handler.Popen = Fork
    handler.subprocess = types.SimpleNamespace(Popen=Fork)  # torch 2.1 names it so
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        run_id=str(os.getpid()), monitor_interval=0.1, max_restarts=0,
    )  # fmt: skip
    elastic_launch(config, script)(*argv)


def serve(script: str) -> None:
    """Forks for each request on stdin; reports starts and ends on stdout, one JSON object per line."""
    runpy.run_path(script, run_name="warm")  # its imports, without its main
    for name in ("datasets", "matplotlib.backends.backend_agg", "torch.distributed.launcher.api", "evaluation.report"):
        importlib.import_module(name)  # what functions import later
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny = Qwen2Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8,
                       attn_implementation="eager")  # fmt: skip
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
            own_locks()
            os.setsid()
            os.nice(5)  # on busy cores whoever watches a start gets to look, and to act, before it is over
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            os.environ.update(request["env"], WARM_LOG=request["log"])
            for name, value in request["limits"].items():
                resource.setrlimit(getattr(resource, name), (value, value))
            script = request["script"] or script
            if request["processes"] == 1:
                run_main(script, request["argv"])
            else:
                launch(script, request["argv"], request["processes"])
            return


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve(sys.argv[1])
