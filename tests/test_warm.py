"""The server that starts scripts by forks: what one start does, the next one does not feel."""

import signal

import pytest

from tools.warm import WarmServer, lives


@pytest.fixture(scope="module")
def bars():
    with WarmServer("tests/programs/take_a_lock.py") as server:
        yield server


@pytest.mark.parametrize("processes", [1, 2])
def test_a_start_killed_with_the_lock_of_the_progress_bars_locks_no_other(bars, processes):
    assert bars.run("draw", processes=processes, timeout_s=60)[1].count("drawn") == processes
    assert bars.run("die", processes=1)[0] == -signal.SIGKILL
    status, output = bars.run("draw", processes=processes, timeout_s=60)
    assert (status, output.count("drawn")) == (0, processes)


def test_what_a_test_leaves_running_ends_with_it(bars):
    start = bars.start("draw", processes=2)
    pids = [start.pid]
    while not start.rank_pids() and lives(start.pid):
        pass
    pids += start.rank_pids()
    bars.end_all()
    assert len(pids) > 1 and not any(map(lives, pids)) and bars.starts == []
