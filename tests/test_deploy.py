"""The files in deploy/ are what their tools accept, and start what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, must, run_script

DEPLOY = ROOT / "deploy"


def tool(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.is_file():
        pytest.skip(f"{name} is not installed; requirements-dev.txt names its package")
    return str(path)


def launch_arguments(words: list[str]):
    """What `accelerate launch WORDS` understands. Fails on a flag that it does not know before the script's name."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return arguments


def test_dockerfiles_pass_hadolint():
    files = sorted(DEPLOY.glob("Dockerfile.*"))
    assert [path.suffix for path in files] == [".cpu", ".npu"]
    result = subprocess.run([tool("hadolint"), *files], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_slurm_script_starts_one_launcher_per_server(tmp_path):
    """With SLURM's commands replaced by what they would print, and the launcher by one that shows its arguments."""
    result = subprocess.run([tool("shellcheck"), DEPLOY / "train.slurm"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")
    commands = {
        "scontrol": 'printf "node-a\\nnode-b\\n"',
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "accelerate": 'printf "%s\\n" "$HCCL_SOCKET_IFNAME" "$@" END',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "HCCL_SOCKET_IFNAME": "bond0",
        "CANN_SET_ENV": "/nowhere",
    }  # fmt: skip
    script = ["bash", DEPLOY / "train.slurm", "--config", "configs/qwen2.5-7b.yaml", "--output_dir", "a run"]
    result = must(subprocess.run(script, env=environment, capture_output=True, text=True))
    started = [words.split("\n")[:-1] for words in result.stdout.split("END\n")[:-1]]
    assert len(started) == 2
    for rank, (interface, command, *words) in enumerate(started):
        assert (interface, command) == ("bond0", "launch")
        arguments = launch_arguments(words)
        assert (arguments.machine_rank, arguments.num_machines, arguments.num_processes) == (rank, 2, 16)
        assert (arguments.main_process_ip, arguments.main_process_port) == ("node-a", 24567)
        assert arguments.training_script == "train.py"
        assert arguments.training_script_args == ["--config", "configs/qwen2.5-7b.yaml", "--output_dir", "a run"]


def test_kubernetes_objects_are_those_of_kubeflow_trainer():
    """Read by the models that Kubeflow generates from its API: types and required fields, and no field unknown to them."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    kinds = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    objects = list(yaml.safe_load_all((DEPLOY / "kubeflow.yaml").read_text(encoding="utf-8")))
    assert [item["kind"] for item in objects] == ["TrainingRuntime", "TrainJob"]
    for item in objects:
        assert item["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert kinds[item["kind"]].from_dict(item).to_dict() == item  # an unknown field would be missing
    runtime, job = objects
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    resources = job["spec"]["trainer"]["resourcesPerNode"]
    assert resources["limits"]["huawei.com/Ascend910"] == resources["requests"]["huawei.com/Ascend910"] == "8"

    # The command, with the variables that Kubeflow's torch policy sets, is one that the launcher understands.
    *shell, script, name = job["spec"]["trainer"]["command"]
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": "29500"}
    shown = [*shell, script.replace("exec accelerate", "printf '%s\\n'"), name, *job["spec"]["trainer"]["args"]]
    words = must(subprocess.run(shown, env={**os.environ, **variables}, capture_output=True, text=True)).stdout.split(
        "\n"
    )
    arguments = launch_arguments(words[1:-1])
    assert (arguments.machine_rank, arguments.num_machines, arguments.num_processes) == (1, 2, 16)
    assert arguments.training_script_args == job["spec"]["trainer"]["args"]
    # … and its settings are train.py's own.
    help_text = must(run_script("train.py", "--help")).stdout
    flags = [word for word in job["spec"]["trainer"]["args"] if word.startswith("--")]
    assert len(flags) == 4 and all(re.search(rf"{flag}\b", help_text) for flag in flags)
