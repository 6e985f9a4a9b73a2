"""Says in one sentence what is missing before make installs anything. Plain enough for any Python 3 to run it."""

import os
import shutil
import sys


def main():
    needed_gb = int(sys.argv[1])
    problem = None
    if sys.version_info < (3, 11):
        problem = (
            "Python %d.%d runs this; the pinned libraries need 3.11 or newer. Install it and call make PYTHON=python3.11"
            " (for older ones see the version table in docs/versions.md)." % sys.version_info[:2]
        )
    elif not _has_venv():
        problem = "this Python lacks the venv module with pip. On Debian and Ubuntu: apt install python3-venv."
    elif not os.access(".", os.W_OK):
        problem = "the folder %s is not writable." % os.getcwd()
    else:
        free_gb = shutil.disk_usage(".").free / 1e9
        if free_gb < needed_gb:
            problem = "%.1f GB are free in %s; the environment and the model need %d GB." % (
                free_gb,
                os.getcwd(),
                needed_gb,
            )
    if problem:
        sys.exit("error: " + problem)


def _has_venv():
    try:
        import ensurepip
        import venv
    except ImportError:
        return False
    return bool(ensurepip and venv)


if __name__ == "__main__":
    main()
