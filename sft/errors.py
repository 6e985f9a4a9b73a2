"""Errors that are meant for people, and how a script ends with one."""

import difflib
import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable

from sft.masking import mask
from sft.terminal import protect_streams


class UserError(ValueError):
    """Something the user can mend: one sentence with the value, the place and the remedy. Exit status 2."""


class RunFailed(RuntimeError):
    """A run that cannot go on, explained: what happened where, what is intact, what to do. Exit status 1.

    here_only: it happened on this rank alone, which therefore has to say so; otherwise all ranks raise it alike.
    """

    def __init__(self, message: str, here_only: bool = False):
        super().__init__(message)
        self.here_only = here_only


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known: the known one that is most like it, if any."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def run(main: Callable[[], None], interrupted: str = "interrupted") -> None:
    """Calls `main`; a `UserError`, `RunFailed` or Ctrl-C becomes a message on stderr, without a traceback or a secret."""
    protect_streams()
    status = _outcome(main, interrupted)
    gc.collect()  # what a failed run held goes before its process group does: see `device.end`
    if status:
        sys.exit(status)


def _outcome(main: Callable[[], None], interrupted: str) -> int | str:
    """What to give to sys.exit after `main`: 0 when it came to its end."""
    # Libraries announce renamed arguments to their callers' authors; the versions are pinned, users can do nothing.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        main()
    except (UserError, RunFailed) as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank and not (isinstance(error, RunFailed) and error.here_only):
            time.sleep(5)  # rank 0 says the same; speak only if that has not ended the job by then
        print(f"error{f' on rank {rank}' if rank else ''}: {mask(str(error))}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:  # in training it is a request to stop, which training/watchdog.py serves
        return interrupted
    except Exception:
        # Mostly the echo of another rank's end, a closed connection: that rank has the word, and the launcher ends
        # this one meanwhile. If it does not, this is the cause.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(5)
        print(mask(traceback.format_exc()), end="", file=sys.stderr)
        print(
            "error: this was not expected; save the output: `python doctor.py --explain FILE` knows many such failures",
            file=sys.stderr,
        )
        return 1
    return 0
