"""Utilisation and estimated time, against figures that others published or that can be worked out by hand."""

import pytest

from doctor.duration import Work, estimate_step
from sft.speed import find_card, flop_per_token, model_flops_utilisation

LLAMA_2_7B = 6_738_415_616 - 32_000 * 4096  # all weights but the input embeddings
QWEN_2_5_7B = 7_615_616_512 - 152_064 * 3584


def test_a_card_is_found_by_its_name():
    assert find_card("Ascend910B3")["bf16_flops"] == 3.13e14
    assert find_card("Ascend910B4")["memory_bytes_per_s"] == 8e11
    assert find_card("NVIDIA H200")["bf16_flops"] == 9.89e14
    assert find_card("x86_64") is None


def test_utilisation_of_a_published_run():
    """LoRA of Llama-2-7B, 2,048-token rows, 4,269 tokens/s on one card of 313 TFLOP/s: 37 % (36.0 % without embeddings)."""
    mfu = model_flops_utilisation(4269, 1.0, LLAMA_2_7B, ["Ascend910B3"])
    assert mfu == pytest.approx(4 * 6.607e9 * 4269 / 3.13e14, rel=1e-3) and mfu == pytest.approx(0.37, rel=0.05)
    assert model_flops_utilisation(8538, 1.0, LLAMA_2_7B, ["Ascend910B3"] * 2) == pytest.approx(mfu)
    assert model_flops_utilisation(4269, 1.0, LLAMA_2_7B, ["Ascend910B3", "unknown"]) is None


def test_recomputation_costs_another_forward():
    assert (flop_per_token(7, False), flop_per_token(7, True)) == (28, 42)


def work(**changes) -> Work:
    settings = {
        "forwards": 1, "tokens": 2048, "layers": 32, "adapted_linears": 64, "weights": LLAMA_2_7B, "weight_bytes": 2 * 6_738_415_616,
        "adapter_bytes": 4 * 8_388_608, "recompute": False, "world_size": 1, "shards": 1,
    }  # fmt: skip
    return Work(**{**settings, **changes})


def test_the_estimate_is_near_the_published_speed_of_long_rows():
    found = estimate_step(work(), "Ascend910B3")
    assert found["limit"] == "arithmetic"
    assert found["tokens_per_s"] == pytest.approx(4269, rel=0.10)


def test_many_short_forwards_are_limited_by_launches_or_weights():
    """128 forwards of 16 tokens: the same arithmetic, but the weights are read and the operators launched 128 times."""
    found = estimate_step(work(forwards=128), "Ascend910B3")
    assert found["limit"] == "launches" and found["step_s"] > 5 * estimate_step(work(), "Ascend910B3")["step_s"]
    read = estimate_step(work(forwards=128, layers=1, adapted_linears=2), "Ascend910B4")
    assert read["limit"] == "weight reading"
    assert read["parts_s"]["weight reading"] == pytest.approx(128 * 2 * 2 * 6_738_415_616 / 8e11)


def test_gradients_of_the_reference_run_take_about_a_third_of_a_millisecond_on_two_cards():
    """20 MB of gradients, half of them twice over 56 GB/s: 0.36 ms."""
    found = estimate_step(work(world_size=2, adapter_bytes=4 * 5_046_272), "Ascend910B3")
    assert found["parts_s"]["exchange between cards"] == pytest.approx(20_185_088 / 5.6e10)


def test_sharded_weights_travel_in_each_pass():
    found = estimate_step(work(world_size=8, shards=8, tokens=256), "Ascend910B3")
    assert found["limit"] == "exchange between cards"
    assert found["parts_s"]["exchange between cards"] > 2 * 7 / 8 * 2 * 6_738_415_616 / 5.6e10
