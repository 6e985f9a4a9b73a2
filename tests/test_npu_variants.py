"""Ways of running on Ascend beside plain DDP: two launchers, HSDP, dropout, recomputation, bf16 under FSDP, one card by id.

Real cards where there are some, otherwise the simulated Ascend, with the tolerances of tests/tolerances.py.
"""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT, adapter, assert_same_numbers, launch, losses, must, train
from tests.tolerances import BF16_BETWEEN_CARDS, FP32_BETWEEN_CARDS, FP32_RESUMED

pytestmark = pytest.mark.npu

STEPS = ["--max_steps", 8, "--save_steps", 4, "--learning_rate", "1e-3"]
FP32 = ["--mixed_precision", "no"]


@pytest.fixture(scope="module")
def run(tiny_model_dir, dataset_dir, npu_environment):
    """Runs train.py for eight steps on simulated or real cards; FP32 unless bf16 is asked for."""

    def start(config, run_dir, *argv, flags=(), bf16=False, env=()):
        settings = [*STEPS, *([] if bf16 else ["--dtype", "float32"]), *argv]
        must(
            train(
                config, tiny_model_dir, dataset_dir, run_dir, *settings,
                flags=[*([] if bf16 else FP32), *flags], env={**npu_environment, **dict(env)}, timeout=600,
            )
        )  # fmt: skip
        return run_dir

    return start


@pytest.fixture(scope="module")
def one_card(run, tmp_path_factory):
    return run("npu_1", tmp_path_factory.mktemp("one") / "run")


def summary(run_dir) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_two_launchers_on_one_host_are_two_servers(tmp_path, one_card, tiny_model_dir, dataset_dir, npu_environment):
    """Each launcher sees a card of its own, as a server would."""
    port, run_dir = free_port(), tmp_path / "run"
    words = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/npu_2x8.yaml",
        "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), *FP32,
    ]  # fmt: skip
    script = ["train.py", "--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir, "--output_dir", run_dir,
              "--global_batch_size", 4, "--report_to", "none", "--dtype", "float32", *STEPS]  # fmt: skip
    servers = []
    for rank in (0, 1):
        environment = {**os.environ, **npu_environment, "ASCEND_RT_VISIBLE_DEVICES": str(rank)}
        with open(tmp_path / f"server-{rank}.log", "w") as log:
            command = [*words, "--machine_rank", str(rank), *map(str, script)]
            servers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        statuses = [server.wait(300) for server in servers]
    finally:
        for server in servers:
            server.kill()
    assert statuses == [0, 0], "".join((tmp_path / f"server-{rank}.log").read_text()[-2000:] for rank in (0, 1))
    assert summary(run_dir)["world_size"] == 2 and summary(run_dir)["backend"] == "hccl"
    assert_same_numbers(one_card, run_dir, FP32_BETWEEN_CARDS.here(npu_environment))


def test_hsdp_on_four_cards_gives_the_numbers_of_one(tmp_path, one_card, run, npu_environment):
    """Two copies of the model, each cut over two cards."""
    sizes = ["--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2"]
    servers = ["--num_processes", "4", "--num_machines", "1", "--fsdp_activation_checkpointing", "false"]
    run_dir = run("npu_2x8_hsdp", tmp_path / "run", flags=[*servers, *sizes])
    found = summary(run_dir)
    assert found["held_parameters"] == [found["total_parameters"] // 2] * 4
    assert_same_numbers(one_card, run_dir, FP32_BETWEEN_CARDS.here(npu_environment))


@pytest.mark.slow
def test_a_run_with_dropout_goes_on_with_the_numbers_of_an_unbroken_one(tmp_path, run, npu_environment):
    dropout = ["--lora_dropout", "0.1"]
    whole = run("npu_2", tmp_path / "whole", *dropout)
    broken = run("npu_2", tmp_path / "broken", *dropout, "--stop_at_step", 4)
    run("npu_2", broken, *dropout)
    assert len(losses(broken)) == 8
    assert_same_numbers(whole, broken, FP32_RESUMED.here(npu_environment))


@pytest.mark.slow
def test_recomputation_under_ddp_changes_no_number(tmp_path, one_card, run, npu_environment):
    run_dir = run("npu_2", tmp_path / "run", "--gradient_checkpointing", "true")
    assert_same_numbers(one_card, run_dir, FP32_BETWEEN_CARDS.here(npu_environment))


@pytest.mark.slow
def test_bf16_under_fsdp_stays_near_one_card(tmp_path, run, npu_environment):
    one = run("npu_1", tmp_path / "one", bf16=True)
    cut = ["--num_processes", "2", "--fsdp_activation_checkpointing", "false"]
    two = run("npu_8_fsdp", tmp_path / "two", flags=cut, bf16=True)
    assert summary(two)["distributed_type"] == "FSDP"
    assert losses(two) == pytest.approx(losses(one), rel=BF16_BETWEEN_CARDS.here(npu_environment))
    assert len(adapter(two)) == len(adapter(one)) == 16
    for run_dir in (one, two):  # both simulated and real cards call themselves Ascend910B…, whose peak is known
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert all(0 < record["mfu"] < 1 for record in records if "loss" in record)


@pytest.mark.slow
def test_a_single_card_is_chosen_by_its_id(tmp_path, one_card, run, npu_environment):
    """The process sees one card, number 0 to it, whatever the card's number on the server is."""
    run_dir = run("npu_1", tmp_path / "run", env={"ASCEND_RT_VISIBLE_DEVICES": "1"})
    environment = json.loads((run_dir / "environment.json").read_text())
    assert environment["variables"]["ASCEND_RT_VISIBLE_DEVICES"] == "1"
    assert [rank["device"] for rank in environment["ranks"]] in (["npu:0"], ["npu"])
    assert_same_numbers(one_card, run_dir, FP32_BETWEEN_CARDS.here(npu_environment))


def test_what_two_cards_trained_is_evaluated_on_two_and_exported(tmp_path, run, npu_environment):
    run_dir = run("npu_2", tmp_path / "run")
    must(
        launch(
            "npu_2",
            "eval.py",
            "--run_dir",
            run_dir,
            "--max_new_tokens",
            8,
            "--limit",
            4,
            env=npu_environment,
            flags=FP32,
        )
    )
    report = json.loads((run_dir / "eval" / "report.json").read_text())
    assert report["rows"] == 4
    merged = tmp_path / "merged"
    must(launch("npu_1", "export.py", "--run_dir", run_dir, "--output_dir", merged, env=npu_environment, flags=FP32))
    assert (merged / "model.safetensors").is_file() or (merged / "model.safetensors.index.json").is_file()
