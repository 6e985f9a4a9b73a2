"""What is computed in which type, and how repeatable it is: said, recorded, or refused before anything is loaded."""

import json
import types

import pytest
import torch

from sft.errors import RunFailed
from tests.conftest import adapter, losses
from training.failures import explained_memory, remedies


@pytest.mark.parametrize("half", ["fp16", "fp8"])
def test_half_precision_with_a_loss_scaler_is_refused_before_anything_is_loaded(warm, arguments, tmp_path, half):
    flags = arguments(tmp_path / "run", "--model_name_or_path", "no/such/model", "--dataset_dir", tmp_path / "none")
    status, output = warm.run(*flags, processes=1, env={"ACCELERATE_MIXED_PRECISION": half})
    assert status == 2
    assert [line for line in output.splitlines() if line.startswith("error: ")] == [
        f"error: the launch configuration says mixed_precision: {half}, for which this training has no loss scaler: one overflow "
        "would end it; choose bf16, or no on cards without it (accelerate launch --mixed_precision no wins over the file)"
    ]


def test_a_float32_base_under_bf16_is_said_not_to_be_computed_in_float32(warm, arguments, peace, tmp_path):
    flags = arguments(tmp_path / "run", "--dtype", "float32", "--stop_at_step", 5)
    status, output = warm.run(*flags, processes=1, env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert status == 0, output
    assert (
        "base weights float32, adapter and loss float32, all products in bfloat16 (mixed_precision: bf16 of the launch; for "
        "float32 give accelerate launch --mixed_precision no)"
    ) in output
    difference = max(abs(a / b - 1) for a, b in zip(losses(tmp_path / "run"), losses(peace)))
    assert 1e-4 < difference < 5e-2  # products in bf16 round at 2^-8; sums in another order would differ by 1e-6


def test_remedies_are_those_that_help():
    lora = {"lora_r": 8, "lora_alpha": 16}
    clipped, unclipped = (
        types.SimpleNamespace(max_grad_norm=1.0, **lora),
        types.SimpleNamespace(max_grad_norm=0.0, **lora),
    )
    wide = "to rule out rounding, use dtype: float32 with accelerate launch --mixed_precision no"
    assert remedies(clipped, "float32", "no") == ["lower learning_rate"]
    scaled = types.SimpleNamespace(max_grad_norm=1.0, lora_r=8, lora_alpha=8000)
    assert remedies(scaled, "float32", "no")[0] == "lower lora_alpha: the update is multiplied by 1e+03"
    assert remedies(unclipped, "float32", "no") == ["lower learning_rate", "set max_grad_norm: 1.0"]
    assert remedies(clipped, "float32", "bf16") == remedies(clipped, "bfloat16", "no") == ["lower learning_rate", wide]
    assert remedies(clipped, "float16", "no") == [
        "lower learning_rate", "use dtype: bfloat16, or float32 on cards without it",
    ]  # fmt: skip


def test_a_deterministic_run_is_recorded_and_repeats_to_the_bit(warm, arguments, tmp_path):
    for name in ("one", "two"):
        status, output = warm.run(*arguments(tmp_path / name, "--deterministic", "--stop_at_step", 5))
        assert status == 0, output
    environment = json.loads((tmp_path / "one" / "environment.json").read_text())
    assert environment["deterministic"] is True
    names = {"HCCL_DETERMINISTIC": "true", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert {name: environment["variables"].get(name) for name in names} == names
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    one, two = (adapter(tmp_path / name / "checkpoint-5") for name in ("one", "two"))
    assert one and all(torch.equal(one[name], two[name]) for name in one)


def test_an_operation_that_cannot_be_deterministic_is_one_sentence():
    run = types.SimpleNamespace(directory=types.SimpleNamespace(where_to_go_on=lambda: "There is no checkpoint yet"))
    torch.use_deterministic_algorithms(True)
    try:
        sentence = "^deterministic: true, but .* put_ .*; leave deterministic out"
        with pytest.raises(RunFailed, match=sentence), explained_memory(run, 0, [0]):
            torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))
    finally:
        torch.use_deterministic_algorithms(False)
