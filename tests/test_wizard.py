"""The real `accelerate config` wizard in a pseudo-terminal, and launches with what it wrote."""

import os
import sys

import pexpect
import pytest
import yaml

from sft import device
from sft.errors import UserError
from tests.conftest import ROOT, losses, must, run_script, train

MACHINE = {"multi-CPU": 1, "multi-GPU": 4, "multi-NPU": 5}  # places in the wizard's menu, from 0


def answer(path, answers: list[tuple[str, str]], env: dict) -> dict:
    """Drives the wizard: each (text to wait for, keys); what it wrote. Menus take arrow keys, Enter is a carriage return."""
    child = pexpect.spawn(
        sys.executable, ["-m", "accelerate.commands.accelerate_cli", "config", "--config_file", str(path)],
        env={**os.environ, **env, "TERM": "xterm", "COLUMNS": "200"}, encoding="utf-8", timeout=90, dimensions=(60, 200),
    )  # fmt: skip
    for question, keys in answers:
        child.expect(question)
        for key in keys:
            child.send(key)
    child.expect("accelerate configuration saved at")
    child.expect(pexpect.EOF)
    return yaml.safe_load(path.read_text())


ENTER, DOWN = "\r", "\x1b[B"


def choose(entry: int) -> list[str]:
    """Keys that move a menu to an entry and take it."""
    return [DOWN] * entry + [ENTER]


def npu_answers(processes: int, machines: int = 1) -> list[tuple[str, list[str]]]:
    several = [] if machines == 1 else [
        ("rank of this machine", choose(0)),
        ("IP address of the machine", ["127.0.0.1", ENTER]),
        ("port you will use", ["29511", ENTER]),
        ("same local network", ["yes", ENTER]),
    ]  # fmt: skip
    return [
        ("compute environment", choose(0)),
        ("type of machine", choose(MACHINE["multi-NPU"])),
        ("How many different machines", [str(machines), ENTER]),
        *several,
        ("distributed operations be checked", ["no", ENTER]),
        ("torch dynamo", ["no", ENTER]),
        ("DeepSpeed", ["no", ENTER]),
        ("FullyShardedDataParallel", ["no", ENTER]),
        ("should be used for distributed training", [str(processes), ENTER]),
        ("by id", ["all", ENTER]),
        ("wish to use mixed precision", choose(2)),
    ]


@pytest.mark.npu
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_the_wizard_writes_a_config_for_one_server_that_trains(
    tmp_path, tiny_model_dir, dataset_dir, npu_environment, processes
):
    path = tmp_path / "wizard.yaml"
    written = answer(path, npu_answers(processes), npu_environment)
    assert (written["distributed_type"], written["num_processes"], written["mixed_precision"]) == (
        "MULTI_NPU",
        processes,
        "bf16",
    )
    if processes == 8:
        return  # eight cards are trained by tests/test_npu.py
    flags = ["--stop_at_step", 2, "--no_eval_on_start"]
    must(train(str(path), tiny_model_dir, dataset_dir, tmp_path / "run", *flags, env=npu_environment))
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.npu
def test_the_wizard_writes_a_config_for_two_servers(tmp_path, npu_environment):
    written = answer(tmp_path / "wizard.yaml", npu_answers(16, machines=2), npu_environment)
    assert (written["num_machines"], written["num_processes"], written["machine_rank"]) == (2, 16, 0)
    assert (written["main_process_ip"], str(written["main_process_port"])) == ("127.0.0.1", "29511")


@pytest.mark.npu
def test_the_default_config_chooses_the_cards(tmp_path, npu_environment):
    path = tmp_path / "default.yaml"
    command = ["-m", "accelerate.commands.accelerate_cli", "config", "default", "--config_file", path]
    must(run_script(*command, "--mixed_precision", "bf16", env=npu_environment))
    assert yaml.safe_load(path.read_text())["distributed_type"] == "MULTI_NPU"


def test_the_wizards_answer_for_several_cpu_processes_is_refused_with_the_remedy(tmp_path, tiny_model_dir, dataset_dir):
    """It writes MULTI_CPU, for which Accelerate starts a single process."""
    path = tmp_path / "wizard.yaml"
    answers = [
        ("compute environment", choose(0)),
        ("type of machine", choose(MACHINE["multi-CPU"])),
        ("How many different machines", ["1", ENTER]),
        ("distributed operations be checked", ["no", ENTER]),
        ("launch mpirun", ["no", ENTER]),
        ("torch dynamo", ["no", ENTER]),
        ("should be used for distributed training", ["2", ENTER]),
        ("mixed precision", choose(0)),
    ]
    written = answer(path, answers, {})
    assert (written["distributed_type"], written["num_processes"]) == ("MULTI_CPU", 2)
    result = train(str(path), tiny_model_dir, dataset_dir, tmp_path / "run")
    assert result.returncode != 0 and "promises 2 processes but 1 started" in result.stderr
    assert not (tmp_path / "run").exists()


def test_fsdp_with_enter_at_every_prompt_is_refused_with_the_line_to_delete(tmp_path, monkeypatch):
    """Enter names '' as the layer class, with which Accelerate fails late: "Could not find the transformer layer class"."""
    answers = [
        ("compute environment", choose(0)),
        ("type of machine", choose(MACHINE["multi-GPU"])),
        ("How many different machines", [ENTER]),
        ("distributed operations be checked", [ENTER]),
        ("torch dynamo", [ENTER]),
        ("DeepSpeed", [ENTER]),
        ("FullyShardedDataParallel", ["yes", ENTER]),
        ("FSDP version", [ENTER]),
        ("resharding after forward", [ENTER]),
        ("offload parameters", [ENTER]),
        ("auto wrap policy", [ENTER]),
        ("_no_split_modules", [ENTER]),
        ("layer class names", [ENTER]),
        ("state dict type", [ENTER]),
        ("RAM efficient", [ENTER]),
        ("activation checkpointing", [ENTER]),
        ("parallelism config", [ENTER]),
        ("should be used for distributed training", ["2", ENTER]),
        ("mixed precision", choose(0)),
    ]
    settings = answer(tmp_path / "wizard.yaml", answers, {})["fsdp_config"]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name, variable in (
        ("fsdp_version", "FSDP_VERSION"),
        ("fsdp_auto_wrap_policy", "FSDP_AUTO_WRAP_POLICY"),
        ("fsdp_transformer_layer_cls_to_wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP"),
    ):
        monkeypatch.setenv(variable, str(settings[name]))  # as accelerate launch does (utils/launch.py)
    with pytest.raises(
        UserError, match="fsdp_transformer_layer_cls_to_wrap is '', which names no layer; delete that line"
    ):
        device.sharding_plugin(state=None)


def test_the_docs_name_what_the_wizard_gets_wrong():
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert "`MULTI_CPU`" in text and "accelerate config" in text
