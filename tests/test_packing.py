"""Packed rows are computed as if each stood alone; ranks get even work and little to say to each other."""

import json

import numpy as np
import pytest
import torch

from sft import attention, modeling
from sft.batching import BatchPlan, collate
from tests.conftest import ROOT, launch, must

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    """The tiny model with an adapter that does something, as the loss module."""
    base = modeling.load_base(str(tiny_model_dir), torch.float32)
    peft_model = modeling.add_lora(base, 8, 16, 0.0, MODULES, seed=1)
    torch.manual_seed(0)
    for name, parameter in modeling.trainable_parameters(peft_model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return modeling.TargetLoss(peft_model)


def make_row(length: int, targets: int, seed: int) -> dict:
    ids = np.random.default_rng(seed).integers(3, 300, length)
    return {"input_ids": ids, "labels": np.where(np.arange(length) < length - targets, -100, ids)}


ROWS = [make_row(length, targets, seed) for seed, (length, targets) in enumerate([(37, 20), (5, 1), (64, 64), (18, 9)])]


def loss_and_gradients(model, batches: list[list[dict]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Nats of all target tokens in order, and the summed gradients."""
    model.zero_grad()
    parts = [model(**collate(rows)) for rows in batches]
    torch.cat(parts).sum().backward()
    gradients = {name: p.grad.clone() for name, p in modeling.trainable_parameters(model).items()}
    return torch.cat(parts).detach(), gradients


def assert_same(found: dict, expected: dict) -> None:
    assert len(found) == len(expected) == 16
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_packed_rows_have_loss_and_gradients_of_rows_alone(model):
    packed, packed_gradients = loss_and_gradients(model, [ROWS])
    alone, gradients = loss_and_gradients(model, [[row] for row in ROWS])
    assert len(packed) == 20 + 1 + 63 + 9
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)
    assert_same(packed_gradients, gradients)


def test_packed_rows_have_the_loss_of_plain_transformers(model, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(str(tiny_model_dir), attn_implementation="eager").eval()
    with torch.no_grad(), model.model.disable_adapter():
        packed = model(**collate(ROWS))
        alone = [
            plain(input_ids=torch.tensor(row["input_ids"])[None], labels=torch.tensor(row["labels"])[None]).loss
            for row in ROWS
        ]
    means = [part.mean() for part in packed.split([20, 1, 63, 9])]
    torch.testing.assert_close(torch.stack(means), torch.stack(alone), rtol=1e-6, atol=1e-6)


def test_a_row_does_not_see_its_neighbours(model):
    with torch.no_grad():
        before = model(**collate(ROWS))
        after = model(**collate([make_row(37, 20, seed=99), *ROWS[1:]]))
    assert not torch.equal(before[:20], after[:20])
    assert torch.equal(before[20:], after[20:])


def test_a_sliding_window_is_a_band_in_each_row():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 11, 4)
    found, _ = attention.packed_sdpa(None, query, key, value, None, segment_lengths=(7, 4), sliding_window=3)
    distance = torch.arange(11)[:, None] - torch.arange(11)[None]
    row = torch.tensor([0] * 7 + [1] * 4)
    seen = (distance >= 0) & (distance < 3) & (row[:, None] == row[None])
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_no_rows_count_for_nothing(model):
    """A rank whose share of a step is empty takes part, with gradients of zero."""
    model.zero_grad()
    nll = model(**collate([]))
    nll.sum().backward()
    assert nll.tolist() == [0.0]
    gradients = [p.grad for p in modeling.trainable_parameters(model).values()]
    assert len(gradients) == 16 and all(gradient.count_nonzero() == 0 for gradient in gradients)


def test_frozen_weights_get_no_gradients(model):
    loss_and_gradients(model, [ROWS])
    with_gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(with_gradients) == 16 and all("lora_" in name for name in with_gradients)


def test_balancing_beats_slicing_on_skewed_lengths():
    lengths = np.random.default_rng(3).lognormal(4.3, 0.8, 400).astype(int) + 5
    plan = BatchPlan(lengths, lengths, 42, 1, 4, 2)

    def excess(tokens_of_ranks: list[list[int]]) -> float:
        """Time lost to waiting for the slowest rank, as a share of the work."""
        return sum(max(ranks) for ranks in tokens_of_ranks) / sum(np.mean(ranks) for ranks in tokens_of_ranks) - 1

    steps = range(plan.steps_per_epoch)
    sliced = [[int(lengths[plan.rows(step)[rank::2]].sum()) for rank in (0, 1)] for step in steps]
    assert excess(sliced) > 0.15
    assert excess([plan.rank_tokens(step) for step in steps]) < 0.05


def test_a_step_has_the_gradients_collective_and_one_more_and_the_token_spread_is_logged(
    tmp_path, tiny_model_dir, dataset_dir
):
    must(
        launch(
            "cpu_2", ROOT / "tests" / "programs" / "count_collectives.py", tmp_path / "counts.json",
            "--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "run",
            "--global_batch_size", "8", "--max_steps", "6", "--eval_on_start", "false", "--report_to", "none",
        )
    )  # fmt: skip
    counts = json.loads((tmp_path / "counts.json").read_text(encoding="utf-8"))
    assert counts["steps"] == 3 and counts["micro_batches"] == 4
    assert counts["collectives"] == {"gloo:all_gather": 3, "gloo:all_reduce": 3}
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    spreads = [(r["rank_tokens_min"], r["rank_tokens_max"], r["tokens"]) for r in records if "loss" in r]
    assert len(spreads) == 6
    assert all(least <= most and least + most == tokens for least, most, tokens in spreads)
