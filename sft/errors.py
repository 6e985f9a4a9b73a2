"""Errors that are meant for the user."""

import os
import sys
import time
from collections.abc import Callable


class UserError(ValueError):
    """Something the user can mend: one sentence with the value, the place and the remedy. Scripts exit with status 2."""


def run(main: Callable[[], None]) -> None:
    """Calls `main`; a `UserError` becomes its message on stderr and exit status 2, without a traceback."""
    try:
        main()
    except UserError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank:  # every rank usually fails alike: rank 0 speaks, the others only if it has not ended the job by then
            time.sleep(5)
        print(f"error{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
