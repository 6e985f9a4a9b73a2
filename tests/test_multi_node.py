"""Two servers, as two network namespaces with a cable between them (or two launchers on one host where none can be made)."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, assert_same_numbers, losses, make_rows, must, run_script, write_jsonl


class Server:
    """One machine: a network namespace, a host name and a private file system at one place."""

    def __init__(self, rank: int, namespace: str | None, address: str):
        self.rank, self.namespace, self.address = rank, namespace, address

    def launch(self, private: Path | None, port: int, *argv, flags=(), main_ip: str, log: Path) -> subprocess.Popen:
        """`accelerate launch` on this server. private: a directory that other servers do not see."""
        words = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_2x1.yaml",
            "--machine_rank", str(self.rank), "--main_process_ip", main_ip, "--main_process_port", str(port), *flags,
            "train.py", *map(str, argv),
        ]  # fmt: skip
        # Without it a server that comes back waits for an address that the surviving one does not announce again
        # (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py).
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if self.namespace:
            environment["GLOO_SOCKET_IFNAME"] = "cable"
            own = f"hostname {self.address}; "  # as a name server would have it
            after = ""
            if private:
                own += f"mount -t tmpfs tmpfs {private}; "
                after = f"; status=$?; ls -A {private} > {log}.files; exit $status"
            script = own + '"$@"' + after
            words = [
                "ip",
                "netns",
                "exec",
                self.namespace,
                "unshare",
                "--uts",
                "--mount",
                "sh",
                "-c",
                script,
                "sh",
                *words,
            ]
        with open(log, "w", encoding="utf-8") as file:
            return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)


@pytest.fixture
def servers(request):
    """Two servers; their namespaces and what still runs in them end with the test."""
    names = [f"sft-{os.getpid()}-{rank}" for rank in (0, 1)]
    addresses = ["198.18.0.1", "198.18.0.2"]  # RFC 2544: set aside for tests of network devices
    if os.geteuid() or not ip("netns", "add", names[0]):
        yield [Server(0, None, "127.0.0.1"), Server(1, None, "127.0.0.1")]
        return
    try:
        made = ip("netns", "add", names[1]) and ip(
            "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1]
        )
        for name, address in zip(names, addresses):
            made = made and ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            made = made and ip("-n", name, "link", "set", "cable", "up") and ip("-n", name, "link", "set", "lo", "up")
        assert made, "the namespaces could be made but not connected"
        yield [Server(rank, names[rank], addresses[rank]) for rank in (0, 1)]
    finally:
        for name in names:
            ip("netns", "delete", name)


def ip(*words: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0
    return False


def arguments(model_dir, dataset_dir, run_dir, *argv) -> list:
    return ["--model_name_or_path", model_dir, "--dataset_dir", dataset_dir, "--output_dir", run_dir,
            "--global_batch_size", 4, "--save_steps", 30, "--report_to", "none", *argv]  # fmt: skip


def wait(process: subprocess.Popen, log: Path, timeout_s: float = 240) -> None:
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(f"not ended after {timeout_s} s:\n{log.read_text()[-5000:]}") from None
    assert status == 0, log.read_text()[-5000:]


def kill(process: subprocess.Popen) -> None:
    """Kills a launcher and its ranks at the same instant, as a power cut would."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.suspend()  # nobody notices the others' death
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def test_two_servers_without_a_shared_disk_give_the_numbers_of_one(
    tmp_path, servers, tiny_model_dir, dataset_dir, tiny_run_dir
):
    run = tmp_path / "runs" / "run"
    run.parent.mkdir()
    argv = arguments(tiny_model_dir, dataset_dir, run)
    logs = [tmp_path / f"server-{rank}.log" for rank in (0, 1)]
    private = [None, run.parent]  # what the second server writes there, nobody else sees
    started = [
        server.launch(private[server.rank], 29_617, *argv, main_ip=servers[0].address, log=logs[server.rank])
        for server in servers
    ]
    try:
        for process, log in zip(started, logs):
            wait(process, log)
    finally:
        for process in started:
            kill(process)
    assert_same_numbers(tiny_run_dir, run)
    assert "2 ranks on cpu" in logs[0].read_text()
    assert "Done: " in logs[0].read_text() and "Done: " not in logs[1].read_text()
    if servers[1].namespace:
        assert Path(f"{logs[1]}.files").read_text().split() == []  # only the first server writes


def refused(folder: Path, servers, commands: list[list], port: int) -> str:
    """What the first server says when two that start these commands both end with an error."""
    logs = [folder / f"server-{server.rank}.log" for server in servers]
    started = [
        server.launch(None, port, *argv, main_ip=servers[0].address, log=log)
        for server, argv, log in zip(servers, commands, logs)
    ]
    try:
        assert [process.wait(240) for process in started] == [1, 1]
    finally:
        for process in started:
            kill(process)
    return logs[0].read_text()


def test_servers_with_different_data_sets_are_refused(tmp_path, servers, tiny_model_dir, dataset_dir):
    """Each reads its own disk, so that nothing else would notice."""
    other = tmp_path / "dataset-other"
    rows = write_jsonl(tmp_path / "rows.jsonl", make_rows(380, seed=8))
    must(run_script("data_prep.py", "--input", rows, "--model_name_or_path", tiny_model_dir, "--output_dir", other))
    data_sets = (dataset_dir, other)
    log = refused(tmp_path, servers, [arguments(tiny_model_dir, data, tmp_path / "run") for data in data_sets], 29_619)
    assert re.search(
        r"error: dataset_sha256 is \w{64} on rank 0 \(.+\) but \w{64} on rank 1 \(.+\); every server needs the same",
        log,
    ), log
    assert not (tmp_path / "run").exists()


def test_a_server_without_the_data_set_ends_the_others_too(tmp_path, servers, tiny_model_dir, dataset_dir):
    data_sets = (dataset_dir, tmp_path / "nothing")
    log = refused(tmp_path, servers, [arguments(tiny_model_dir, data, tmp_path / "run") for data in data_sets], 29_620)
    assert re.search(r"error: rank 1 \(.+\): dataset_dir .*nothing does not exist", log)


@pytest.mark.slow
def test_a_lost_server_that_comes_back_goes_on_from_the_last_checkpoint(
    tmp_path, servers, tiny_model_dir, dataset_dir, tiny_run_dir
):
    run = tmp_path / "run"
    argv = arguments(tiny_model_dir, dataset_dir, run)
    logs = [tmp_path / f"server-{name}.log" for name in ("0", "1", "1-again")]
    flags = ["--rdzv_backend", "c10d", "--max_restarts", "3"]
    options = {"flags": flags, "main_ip": servers[0].address}
    first = servers[0].launch(None, 29_618, *argv, log=logs[0], **options)
    second = servers[1].launch(None, 29_618, *argv, log=logs[1], **options)
    again = None
    try:
        deadline = time.monotonic() + 240
        while not (run / "checkpoint-30").is_dir():
            assert time.monotonic() < deadline and first.poll() is None, logs[0].read_text()[-5000:]
            time.sleep(0.02)
        kill(second)
        again = servers[1].launch(None, 29_618, *argv, log=logs[2], **options)
        wait(first, logs[0])
        wait(again, logs[2])
    finally:
        for process in filter(None, (first, second, again)):
            kill(process)
    output = logs[0].read_text() + logs[2].read_text()
    assert "Going on from" in output and "after step 30 of 91" in output
    assert len(losses(run)) == 91
    assert_same_numbers(tiny_run_dir, run)
