"""Draws a progress bar, or ends while it holds the lock that all bars of a process family share."""

import os
import signal
import sys

from tqdm import tqdm

if __name__ == "__main__":
    if sys.argv[1] == "die":
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in tqdm(range(3)):
        pass
    print("drawn")
