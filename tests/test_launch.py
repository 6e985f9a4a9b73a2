"""Launch configurations start what they promise, or nothing."""

import json

import pytest
import yaml

from tests.conftest import ROOT, run_script, train

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def test_every_launch_config_is_read_by_accelerate_and_explains_its_keys():
    from accelerate.commands.config.config_args import load_config_from_file

    names = {path.stem for path in CONFIGS}
    assert {"npu_1", "npu_2", "npu_8", "cuda_1", "cuda_8", "cpu_1", "cpu_2"} <= names
    for path in CONFIGS:
        loaded = load_config_from_file(str(path))
        promised = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert loaded.num_processes == promised["num_processes"]
        assert isinstance(promised["mixed_precision"], str), "an unquoted no is false in YAML"
        assert path.read_text(encoding="utf-8").startswith("# ")


def refused(result, *words: str) -> None:
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert errors, result.stderr[-2000:]
    assert all(any(word in line for line in errors) for word in words), errors


@pytest.mark.parametrize("config", ["npu_1", "npu_2"])
def test_a_config_that_promises_npus_never_trains_on_the_cpu(tmp_path, tiny_model_dir, dataset_dir, config):
    result = train(config, tiny_model_dir, dataset_dir, tmp_path / "run")
    refused(result, f"{config}.yaml promises Ascend NPUs but the device found is cpu", "torch_npu is not installed")
    assert not (tmp_path / "run").exists()


def test_a_config_without_use_cpu_never_trains_on_the_cpu(tmp_path, tiny_model_dir, dataset_dir):
    result = train("cuda_1", tiny_model_dir, dataset_dir, tmp_path / "run")
    refused(result, "cuda_1.yaml does not ask for the CPU (use_cpu: true) but no accelerator was found")
    assert not (tmp_path / "run").exists()


def test_multi_cpu_of_the_wizard_is_refused_with_what_to_use(tmp_path, tiny_model_dir, dataset_dir):
    """Accelerate starts one process for it and leaves the others to mpirun."""
    config = tmp_path / "multi_cpu.yaml"
    settings = yaml.safe_load((ROOT / "accelerate_configs" / "cpu_2.yaml").read_text())
    config.write_text(yaml.safe_dump({**settings, "distributed_type": "MULTI_CPU"}))
    result = train(str(config), tiny_model_dir, dataset_dir, tmp_path / "run")
    refused(result, "promises 2 processes but 1 started", "accelerate_configs/cpu_2.yaml")
    assert not (tmp_path / "run").exists()


def test_torchrun_starts_the_same_ranks(tmp_path, tiny_model_dir, dataset_dir, tiny_run_dir):
    result = run_script(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py", "--model_name_or_path",
        tiny_model_dir, "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "run", "--global_batch_size", 4,
        "--report_to", "none", "--stop_at_step", 3,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["world_size"], environment["backend"]) == (2, "gloo")
