"""A thread beside the training loop that sees what the loop cannot: signals, and ranks that hang or die.

The main thread may sit in a collective or a kernel, where Python runs no signal handler. So signals are read from
Python's wakeup descriptor, which the interpreter's C handler writes to; the thread sleeps on it. Every few seconds it
wakes and tells the other ranks how far this one is. It does so through the TCPStore at MASTER_ADDR:MASTER_PORT, which
the launcher keeps for the process group anyway: collectives are what hangs, and servers need not share a disk.
The loop pays one assignment per micro-batch and rank; the store gets three short messages per rank and beat.
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from sft.device import store_has
from sft.errors import RunFailed, UserError

BEAT_S = 5.0
SILENT_S = 30.0  # a rank unheard of for so long, while another waits for it, has died with its server: all end in 60 s
PATIENT = ("saving", "finishing")  # the main process writes, perhaps without letting its own thread run
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # schedulers, Ctrl-C, a closed terminal


class Watchdog:
    """SIGTERM, SIGINT and SIGHUP ask to stop, at once when repeated; SIGUSR1 makes every rank write its stacks; no progress
    for nine tenths of timeout_s does the same and ends the job with the names of the ranks that did not arrive.

    Nine tenths, because the backend's own message, at timeout_s, names no rank. Only for several ranks: one alone may
    take its time. Launchers pass on the signal that a terminal has sent to all already, so within a second both count
    as one. last_checkpoint: words for where a failed run can go on; to be kept up to date.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world_size: int,
        timeout_s: float,
        last_checkpoint: str,
    ):
        self.run_dir, self.rank, self.world_size = run_dir, rank, world_size
        self.limit_s = 0.9 * timeout_s
        self.beat_s = min(BEAT_S, self.limit_s / 10)
        self.last_checkpoint = last_checkpoint
        self.mark = (0, 0, "starting")  # how many marks, optimizer step from 1, place; a new object at each mark
        self.stop_since: float | None = None
        self.beats = self.stacks_written = 0
        self.heard: dict[int, tuple[str, float]] = {}  # by rank: its last words, and for how long it has said no other
        self.store = None

    def __enter__(self) -> "Watchdog":
        if self.world_size > 1:
            place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            self.store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
            self._tell()
        self.wakeup, inside = socket.socketpair()
        inside.setblocking(False)
        self.inside = inside
        numbers = [n for n in (*STOP_SIGNALS, signal.SIGUSR1) if signal.getsignal(n) != signal.SIG_IGN]  # nohup stays
        self.handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        faulthandler.enable()  # a crash in a library shows where Python was
        signal.set_wakeup_fd(inside.fileno(), warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind, error, _) -> None:
        """Raises: RunFailed in place of an error that came after a request to stop: mostly the echo of a rank's end.

        A launcher that sees one rank die tells the others to stop, and these then find a connection closed.
        """
        signal.set_wakeup_fd(-1)
        for number, handler in self.handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: a library's, set from C
        self.inside.send(b"\0")
        self.thread.join(self.beat_s)
        explained = isinstance(error, (RunFailed, UserError))
        if self.world_size > 1 and self.stop_requested and isinstance(error, Exception) and not explained:
            self._write_stacks("an error after the request to stop", error)
            _, step, place = self.mark
            raise RunFailed(
                f"rank {self.rank} was told to stop and, before it had, met {kind.__name__} in step {step}, {place}: "
                f"{_first_line(error)}. If a rank had ended before, that is why, and the launcher names it; the traceback is "
                f"in {self.run_dir}/stack-rank-{self.rank}.txt. {self.last_checkpoint}"
            ) from error

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.stop_since is not None

    def reached(self, step: int, place: str) -> None:
        """Notes progress: the main thread is at `place` in `step`. Every rank passes the same marks in the same order."""
        self.mark = (self.mark[0] + 1, step, place)

    def update(self, count: int = 1) -> None:
        """Notes progress at the same place, with the signature of a progress bar's update."""
        self.reached(*self.mark[1:])

    def _watch(self) -> None:
        seen, idle_s = None, 0.0
        while True:
            # Time is counted in beats that this thread lived through: a job that its cluster froze has not hung.
            if select.select([self.wakeup], [], [], self.beat_s)[0]:
                numbers = self.wakeup.recv(64)
                if 0 in numbers:
                    return
                for number in numbers:
                    self._note_signal(number)
                continue
            mark = self.mark
            idle_s = idle_s + self.beat_s if mark is seen else 0.0
            seen = mark
            try:
                self._beat(idle_s)
            except RuntimeError as error:  # the store: it went with the launcher, or with the first server
                if idle_s >= SILENT_S and mark[2] not in PATIENT:
                    self._write_stacks("the store is gone")
                    self._end(
                        f"no progress for {idle_s:.0f} s, and the launcher's store is gone ({_first_line(error)})"
                    )

    def _note_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._write_stacks("SIGUSR1")
            self.stacks_written += 1
            with contextlib.suppress(RuntimeError):  # without the store at least this rank's stacks are there
                if self.store:
                    self.store.add("watchdog/stacks", 1)
        elif number in STOP_SIGNALS:
            if self.stop_since is not None and time.monotonic() - self.stop_since > 1:
                os._exit(128 + number)
            self.stop_since = self.stop_since or time.monotonic()

    def _beat(self, idle_s: float) -> None:
        """Tells how far this rank is and looks for what others ask. Raises: RuntimeError when the store is gone."""
        if self.store is None:
            return
        self._tell()
        asked = self.store.add("watchdog/stacks", 0)
        if asked > self.stacks_written:
            self.stacks_written = asked
            self._write_stacks("asked for by another rank")
        if self.store.add("watchdog/ending", 0):
            self._write_stacks("another rank ends the job")
            self._end_later()
        if idle_s >= 2 * self.beat_s:
            self._listen()
        silent = [rank for rank, (_, silent_s) in self.heard.items() if silent_s >= SILENT_S]
        waits = idle_s >= SILENT_S and self.mark[2] not in PATIENT
        if idle_s >= self.limit_s or (silent and waits):
            self._end_all(idle_s)

    def _tell(self) -> None:
        self.beats += 1
        count, step, place = self.mark
        self.store.set(f"watchdog/{self.rank}", f"{self.beats}|{count}|step {step}, {place}")

    def _listen(self) -> None:
        for rank in range(self.world_size):
            key = f"watchdog/{rank}"
            words = self.store.get(key).decode() if store_has(self.store, key) else "0|0|starting"
            before, silent_s = self.heard.get(rank, (None, 0.0))
            self.heard[rank] = (words, silent_s + self.beat_s if words == before else 0.0)

    def _end_all(self, idle_s: float) -> None:
        speaks = self.store.add("watchdog/ending", 1) == 1
        self._write_stacks(f"no progress for {idle_s:.0f} s")
        for _ in range(2):  # the others write their stacks meanwhile, and tell where they are
            time.sleep(self.beat_s)
            self._tell()
            self._listen()
        if not speaks:
            self._end_later()
        self._end(f"no progress for {idle_s:.0f} s; {name_missing(self.heard, self.beat_s)}")

    def _end_later(self) -> None:
        for _ in range(4):  # the rank that speaks needs the others' words
            time.sleep(self.beat_s)
            self._tell()
        os._exit(1)

    def _end(self, what: str) -> None:
        print(
            f"error on rank {self.rank}: {what}. Python stacks are in {self.run_dir}/stack-rank-*.txt. "
            f"{self.last_checkpoint}; the same command goes on from there",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        os._exit(1)

    def _write_stacks(self, reason: str, error: Exception | None = None) -> None:
        """Appends an error's traceback, or the Python stacks of all threads, to RUN/stack-rank-N.txt; to stderr when that
        cannot be written."""
        _, step, place = self.mark
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank}: {reason}; step {step}, {place}\n"
        text += "".join(traceback.format_exception(error)) if error else ""
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            with open(self.run_dir / f"stack-rank-{self.rank}.txt", "a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                if not error:
                    faulthandler.dump_traceback(file=file, all_threads=True)
                file.write("\n")
        except OSError:
            print(text, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)


def name_missing(heard: dict[int, tuple[str, float]], beat_s: float) -> str:
    """Which ranks are behind the furthest one, and which have fallen silent, in words."""
    counts = {rank: int(words.split("|")[1]) for rank, (words, _) in heard.items()}
    places = {rank: words.split("|")[2] for rank, (words, _) in heard.items()}
    first = max(counts, key=lambda rank: counts[rank])
    silent = {rank for rank, (_, silent_s) in heard.items() if silent_s >= 5 * beat_s}
    missing = [rank for rank in sorted(heard) if counts[rank] < counts[first] or rank in silent]
    if not missing:
        return f"all ranks reached {places[first]}, so a card or the network between them hangs"
    words = [
        f"rank {rank} (last seen at {places[rank]}{'; its process is dead, stopped or cut off' if rank in silent else ''})"
        for rank in missing
    ]
    return f"did not arrive: {', '.join(words)}; the furthest rank, {first}, waits at {places[first]}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
