"""Batches of work in several processes: results in order, memory bounded, and no worker outlives this process."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from sft.errors import RunFailed

ALL_WRITTEN = threading.Event()  # what is left is a rename and the summary: no signal ends that
STOP = threading.Event()  # a signal came; Python may have swallowed the interrupt that it raised (while it forks, say)
STARTING = threading.Event()  # processes are started: an interrupt in the middle of that would leave half a pool
_WORK: list[Callable] = []  # of a worker process: what it does with each batch


def map_batches(work: Callable[[list], Any], batches: Iterator[list], processes: int) -> Iterator[Any]:
    """work(batch) of each batch, in order; at most two batches a process are under way.

    `work` reaches the processes by the fork, so that it may hold what is slow to copy. Raises: RunFailed when a worker dies.
    """
    if processes == 1:
        yield from map(work, batches)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process, and no warning about forking
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), initializer=_start_worker, initargs=(work, os.getpid())
    )
    pending: deque = deque()
    STARTING.set()
    try:
        pool.submit(os.getpid)
        STARTING.clear()
        for batch in batches:
            if STOP.is_set():
                raise KeyboardInterrupt
            pending.append(pool.submit(_do, batch))
            if len(pending) == 2 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        if STOP.is_set():
            raise KeyboardInterrupt from None
        raise RunFailed(
            "a worker process of the preparation was killed, mostly because memory ran out (`dmesg` tells); nothing was "
            "written: run the same command with fewer workers, --num_proc 1"
        ) from None
    finally:
        STARTING.clear()
        if pending or STOP.is_set():  # it ends early: what is under way is of no use
            for process in multiprocessing.active_children():
                process.kill()
        pool.shutdown(cancel_futures=True)


def _start_worker(work: Callable, parent: int) -> None:
    die_with_parent(parent)
    _WORK[:] = [work]


def _do(batch: list) -> Any:
    return _WORK[0](batch)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, which started it, ends in whatever way (Linux: prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that call
        os._exit(1)


def end_on_signals() -> None:
    """Has SIGTERM and a closed terminal end this process as Ctrl-C does, until ALL_WRITTEN; its workers without a word."""
    main_process = os.getpid()

    def stop(number, frame):
        if os.getpid() != main_process:
            os._exit(1)
        if not ALL_WRITTEN.is_set():
            STOP.set()
            if not STARTING.is_set():
                raise KeyboardInterrupt

    def report_unraisable(what):
        if not STOP.is_set():
            sys.__unraisablehook__(what)

    sys.unraisablehook = report_unraisable
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
