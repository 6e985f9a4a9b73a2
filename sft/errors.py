"""Errors that are meant for people, and how a script ends with one."""

import os
import sys
import time
import warnings
from collections.abc import Callable


class UserError(ValueError):
    """Something the user can mend: one sentence with the value, the place and the remedy. Exit status 2."""


class RunFailed(RuntimeError):
    """A run that cannot go on, explained: what happened where, what is intact, what to do. Exit status 1."""


def run(main: Callable[[], None]) -> None:
    """Calls `main`; a `UserError` or `RunFailed` becomes its message on stderr, without a traceback."""
    # Libraries announce renamed arguments to their callers' authors; the versions are pinned, users can do nothing.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        main()
    except (UserError, RunFailed) as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank:  # every rank usually fails alike: rank 0 speaks, the others only if it has not ended the job by then
            time.sleep(5)
        print(f"error{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
