"""The same train.py with the model cut over ranks (FSDP2): same numbers, whole adapters, checkpoints for any layout."""

import json
import re

import pytest
import torch

from sft import device
from sft.errors import UserError
from tests.conftest import ROOT, adapter, assert_same_numbers, launch, losses, must, numbers, run_script, train
from tools import tiny

STEPS = ["--max_steps", "8", "--save_steps", "4", "--learning_rate", "1e-2"]
pytestmark = pytest.mark.skipif(
    device.torch_version() < (2, 6), reason="FSDP2 needs torch 2.6 (test_stacks.py: refused)"
)
shards_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6 has no FSDP2 on the CPU (test_stacks.py: refused)"
)


def launch_environment(config: str, *flags: str) -> dict[str, str]:
    """What `accelerate launch --config_file` tells its ranks about sharding, worked out by Accelerate itself."""
    from accelerate.commands import launch as command
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = str(ROOT / "accelerate_configs" / f"{config}.yaml")
    arguments = command.launch_command_parser().parse_args(["--config_file", path, *flags, "train.py"])
    arguments, _, _ = command._validate_launch_command(arguments)
    environment = prepare_multi_gpu_env(arguments)
    return {key: environment[key] for key in environment if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


@pytest.fixture(scope="module")
def start(warm_server, tiny_model_dir, dataset_dir):
    """Runs train.py for eight steps at global batch 4 under a launch configuration, without the launcher."""

    def run(config: str, run_dir, *argv, processes: int, flags=()) -> str:
        status, output = warm_server.run(
            "--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir, "--output_dir", run_dir,
            "--global_batch_size", 4, "--report_to", "none", *STEPS, *argv,
            processes=processes, env=launch_environment(config, *flags), timeout_s=300,
        )  # fmt: skip
        assert status == 0, output[-6000:]
        return output

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, start):
    """Eight steps by one process, with checkpoints at 4 and 8."""
    path = tmp_path_factory.mktemp("whole") / "run"
    start("cpu_1", path, processes=1)
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, tiny_model_dir, dataset_dir):
    """The same by two ranks with half of the model each, activation checkpointing as the launch configuration does it."""
    path = tmp_path_factory.mktemp("sharded") / "run"
    recompute = ["--fsdp_activation_checkpointing", "true"]
    must(train("cpu_2_fsdp", tiny_model_dir, dataset_dir, path, *STEPS, flags=recompute))
    return path


def summary(run_dir) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def held_out(run_dir) -> list[float]:
    return [record["eval_loss"] for record in numbers(run_dir) if "eval_loss" in record]


@shards_on_cpu
def test_each_rank_holds_half_of_the_model(whole, sharded):
    total = summary(whole)["total_parameters"]
    assert summary(whole)["held_parameters"] == [total] == [116_288]
    assert summary(sharded)["total_parameters"] == total and summary(sharded)["held_parameters"] == [total // 2] * 2
    assert summary(sharded)["distributed_type"] == "FSDP" and summary(sharded)["backend"] == "gloo"


@shards_on_cpu
def test_two_sharded_ranks_give_the_numbers_of_one_process(whole, sharded):
    assert len(losses(sharded)) == 8
    assert_same_numbers(whole, sharded)
    assert held_out(sharded) == pytest.approx(held_out(whole), rel=1e-5) and len(held_out(whole)) == 2


@pytest.mark.parametrize(
    ("config", "is_sharded"),
    [("cpu_1", False), ("cpu_2", False), pytest.param("cpu_2_fsdp", True, marks=shards_on_cpu)],
)
def test_the_configured_attention_is_in_force_in_every_layer(config, is_sharded, tmp_path, tiny_model_dir, dataset_dir):
    """Reading the shards once left plain eager attention behind, which trains the same and never meets a fused operator."""
    settings = ["--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "run"]
    program, output = "tests/programs/attention_in_force.py", tmp_path / "found.json"
    must(launch(config, program, output, *settings, env={"PYTHONPATH": str(ROOT)}))
    for rank in json.loads(output.read_text()):
        assert rank["sharded"] == is_sharded
        assert rank["built"] == rank["asked"] == ["packed_sdpa"] * 3  # the model and its two layers
        assert rank["said"].startswith("attention: one call for all rows in 2 layers")


@shards_on_cpu
def test_a_sharded_run_saves_every_adapter_tensor(sharded):
    """PEFT's own saving writes none of them under activation checkpointing (peft 0.21.2)."""
    for directory in (sharded, sharded / "checkpoint-4", sharded / "checkpoint-8"):
        tensors = adapter(directory)
        names = {f"base_model.model.model.layers.{layer}.self_attn.{module}_proj.lora_{side}.weight"
                 for layer in (0, 1) for module in "qkvo" for side in "AB"}  # fmt: skip
        assert set(tensors) == names
        assert all(tensor.abs().sum() > 0 for tensor in tensors.values())


@shards_on_cpu
def test_a_sharded_run_goes_on_in_one_process(tmp_path, whole, sharded, start):
    checkpoint = ["--resume_from_checkpoint", sharded / "checkpoint-4"]
    output = start("cpu_1", tmp_path / "run", *checkpoint, processes=1)
    assert "after step 4 of 8" in output and len(losses(tmp_path / "run")) == 4
    compare_second_half(whole, tmp_path / "run")


@shards_on_cpu
def test_a_run_of_one_process_goes_on_sharded(tmp_path, whole, start):
    flags = ["--resume_from_checkpoint", whole / "checkpoint-4", "--gradient_checkpointing", "true"]
    start("cpu_2_fsdp", tmp_path / "run", *flags, processes=2)
    assert summary(tmp_path / "run")["held_parameters"] == [58_144, 58_144]
    compare_second_half(whole, tmp_path / "run")


def compare_second_half(whole, resumed) -> None:
    assert losses(resumed) == pytest.approx(losses(whole)[4:], rel=1e-5)
    first, second = adapter(whole), adapter(resumed)
    assert first.keys() == second.keys()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) <= 1e-5


@shards_on_cpu
def test_two_groups_of_two_sharded_ranks_give_the_numbers_of_one_process(tmp_path, whole, start):
    start("cpu_4_hsdp", tmp_path / "run", processes=4)
    assert_same_numbers(whole, tmp_path / "run")
    assert summary(tmp_path / "run")["held_parameters"] == [58_144] * 4  # each pair has the whole


@shards_on_cpu
def test_training_goes_on_sharded_from_an_adapter(tmp_path, whole, start):
    """The first loss is that of the adapter's model, so that it was not lost on the empty base."""
    flags = ["--adapter_name_or_path", whole, "--stop_at_step", "1"]
    start("cpu_1", tmp_path / "one", *flags, processes=1)
    start("cpu_2_fsdp", tmp_path / "two", *flags, processes=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert held_out(tmp_path / "two")[0] == pytest.approx(held_out(whole)[-1], rel=1e-5)


@pytest.mark.parametrize(
    "variables, message",
    [
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
            "fsdp_version is 1, under which PEFT saves adapters without",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            "fsdp_offload_params is true",
        ),
        *[
            (
                {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_TRANSFORMER_CLS_TO_WRAP": layers},
                f"fsdp_transformer_layer_cls_to_wrap is {layers!r}, which names no layer; delete that line",
            )
            for layers in ("", "LlamaDecoderLayer,")
        ],
        *[
            (
                {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", f"PARALLELISM_CONFIG_{kind}_SIZE": "2"},
                f"parallelism_config_{kind.lower()}_size is 2: {reason}",
            )
            for kind, reason in device.REFUSED_PARALLELISM.items()
        ],
    ],
)
def test_sharding_that_loses_or_bends_results_is_refused(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(message)):
        device.sharding_plugin(state=None)


@shards_on_cpu
@pytest.mark.slow
def test_four_ranks_load_a_model_with_little_more_than_one_copy_in_memory(tmp_path, tiny_tokenizer):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    tiny_tokenizer.save_pretrained(model_dir)
    tiny.save_model(model_dir, tiny_tokenizer, hidden_size=1024, layers=8)  # 304 MB: the libraries' share is 24 %
    environment = {"PYTHONPATH": str(ROOT)}
    for config, low, high in (("cpu_2_fsdp", 1.0, 1.5), ("cpu_2", 4.0, 9.0)):
        output = tmp_path / f"{config}.json"
        flags = ["--num_processes", "4"]
        must(launch(config, "tests/programs/shard_memory.py", model_dir, output, flags=flags, env=environment))
        found = json.loads(output.read_text())
        assert low <= found["copies"] < high, found
    assert found["private_copies"] < 0.4, found  # DDP's ranks all see the pages of one file


@shards_on_cpu
@pytest.mark.slow
def test_tensor_and_context_parallelism_are_still_where_docs_parallelism_says(tmp_path, tiny_model_dir):
    """What docs/parallelism.md gives as reasons for refusing them. When this fails, look whether they can be allowed."""
    program = ["tests/programs/other_parallelism.py", tiny_model_dir, tmp_path / "found.json"]
    must(run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *program))
    found = json.loads((tmp_path / "found.json").read_text())
    for kind in ("tensor_qkv", "tensor_qkvo_mended"):  # the arithmetic is right
        assert found[kind]["logits"] < 1e-5 and found[kind]["gradients"] < 1e-5
        assert "got mixed torch.Tensor and DTensor" in found[kind]["clipping"]  # obstacle 2
    assert "is invalid for input of size" in found["tensor_qkvo"]["error"]  # obstacle 1
    assert (
        "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy"
        in found["context"]["error"]
    )


@pytest.mark.npu
@pytest.mark.slow
def test_two_npus_share_the_memory_of_a_model_and_give_the_numbers_of_one(
    tmp_path, tiny_tokenizer, dataset_dir, npu_environment
):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    tiny_tokenizer.save_pretrained(model_dir)
    tiny.save_model(model_dir, tiny_tokenizer, hidden_size=192, layers=64)  # 88 MB: many layers, as large models have
    flags = ["--max_steps", 1, "--global_batch_size", 2, "--lora_r", 1, "--no_eval_on_start", "--eval_steps", 9,
             "--dtype", "float32", "--gradient_checkpointing", "true"]  # fmt: skip
    single = {"flags": ["--mixed_precision", "no"], "env": npu_environment, "timeout": 600}
    must(train("npu_1", model_dir, dataset_dir, tmp_path / "one", *flags, **single))
    halves = [*single["flags"], "--num_processes", "2", "--fsdp_activation_checkpointing", "false"]
    must(train("npu_8_fsdp", model_dir, dataset_dir, tmp_path / "two", *flags, **{**single, "flags": halves}))
    for run in ("one", "two"):
        fused = json.loads((tmp_path / run / "environment.json").read_text())["fused"]
        assert "one call for all rows in 64 layers" in fused[0] and len(fused) == 5
    one, two = summary(tmp_path / "one"), summary(tmp_path / "two")
    assert (two["device"], two["distributed_type"], two["world_size"]) == ("npu", "FSDP", 2)
    assert max(two["peak_memory_bytes"]) <= 0.6 * one["peak_memory_bytes"][0]
    assert_same_numbers(tmp_path / "one", tmp_path / "two", relative=1e-4)
    assert len(adapter(tmp_path / "two")) == 64 * 4 * 2
