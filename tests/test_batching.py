"""The rows of each step, and their layout over ranks."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sft.batching import BatchPlan, StepSampler, collate, deal_by_tokens, epoch_order, resolve_batch_size
from sft.errors import UserError


def make_plan(rows=361, per_device=1, accumulation=4, world_size=1, seed=42) -> BatchPlan:
    lengths = np.random.default_rng(0).integers(5, 200, rows)
    return BatchPlan(lengths, lengths // 2, seed, per_device, accumulation, world_size)


def test_361_rows_at_global_batch_4_are_91_steps_and_the_last_has_one_row():
    plan = make_plan()
    assert (plan.global_batch_size, plan.steps_per_epoch) == (4, 91)
    assert [len(plan.rows(step)) for step in (0, 89, 90, 91)] == [4, 4, 1, 4]


@pytest.mark.parametrize(
    ("per_device", "accumulation", "world_size"), [(1, 4, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (4, 1, 1)]
)
def test_steps_do_not_depend_on_how_they_are_cut(per_device, accumulation, world_size):
    reference, plan = make_plan(), make_plan(361, per_device, accumulation, world_size)
    for step in (0, 1, 45, 90, 91, 200):
        laid = [row for micro_batch in plan.layout(step) for rows in micro_batch for row in rows]
        assert sorted(laid) == sorted(reference.rows(step))
        assert plan.target_count(step) == reference.target_count(step)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_an_epoch_holds_each_row_once(world_size):
    plan = make_plan(380, 1, 2, world_size)
    for epoch in (0, 1):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        assert sorted(row for step in steps for row in plan.rows(step)) == list(range(380))


def test_order_changes_with_epoch_and_seed_and_is_fixed_forever():
    assert epoch_order(42, 0, 8).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert epoch_order(42, 1, 380).tolist() != epoch_order(42, 0, 380).tolist()
    assert epoch_order(43, 0, 380).tolist() != epoch_order(42, 0, 380).tolist()


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40),
    bins=st.integers(1, 8),
    spare=st.integers(0, 3),
)
def test_dealing_keeps_every_row_within_capacity(lengths, bins, spare):
    capacity = -(-len(lengths) // bins) + spare
    dealt = deal_by_tokens(range(len(lengths)), np.array(lengths), bins, capacity)
    assert len(dealt) == bins and max(map(len, dealt)) <= capacity
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))


def calls_of(function) -> int:
    """Function calls, of Python's and of C's, that one execution makes: the same on every machine."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("world_size", [1, 8])
def test_laying_out_a_step_costs_in_proportion_to_its_rows(world_size):
    """It took 0.3 s for 128 rows and 9.7 s for 512: every number of micro-batches was tried, each bin looked at per row."""
    lengths = np.clip(np.random.default_rng(3).lognormal(4.3, 0.8, 8192).astype(int) + 5, 5, 512)
    calls = {}
    for rows in (512, 2048):
        plan = BatchPlan(lengths, lengths, 42, 1, rows // world_size, world_size)
        plan.rows(0)
        calls[rows] = calls_of(lambda plan=plan: plan.layout(0))
    assert 512 < calls[512] < 30 * 512
    assert calls[2048] < 5 * calls[512]


def test_a_step_is_laid_out_once():
    plan = make_plan(361, 1, 4, 1)
    first = plan.layout(7)
    assert calls_of(lambda: plan.layout(7)) < 10 and plan.layout(7) is first
    assert plan.layout(8) is not first


@given(
    lengths=st.lists(st.integers(1, 100), min_size=8, max_size=64),
    world_size=st.sampled_from([1, 2, 4]),
    per_device=st.sampled_from([1, 2]),
)
def test_a_layout_holds_each_row_once_within_the_limit(lengths, world_size, per_device):
    lengths = np.array(lengths)
    accumulation = -(-len(lengths) // (world_size * per_device))
    plan = BatchPlan(lengths, lengths, 0, per_device, accumulation, world_size)
    layout = plan.layout(0)
    assert 1 <= len(layout) <= accumulation and all(len(ranks) == world_size for ranks in layout)
    assert sorted(row for ranks in layout for rows in ranks for row in rows) == list(range(len(lengths)))
    assert max(lengths[rows].sum() for ranks in layout for rows in ranks) <= plan.micro_batch_tokens
    # Dealt longest first to the emptiest, no two ranks differ by more than the longest row (where none is full).
    tokens = plan.rank_tokens(0)
    if len(lengths) < world_size * per_device * accumulation - accumulation:
        assert max(tokens) - min(tokens) <= lengths.max()


def test_long_rows_are_dealt_to_different_ranks():
    lengths = np.array([100, 10, 90, 20])
    assert deal_by_tokens([0, 1, 2, 3], lengths, 2, 2) == [[0, 1], [2, 3]]
    plan = BatchPlan(lengths, lengths, 0, 1, 2, 2)
    assert plan.rank_tokens(0) == [110, 110]


def test_sampler_yields_step_then_micro_batch_then_rank_and_starts_anywhere():
    plan = make_plan(10, 1, 2, 2)
    everything = list(StepSampler(plan, 0, 6))
    assert [len(plan.layout(step)) for step in range(6)] == [2, 2, 1, 1, 2, 1]
    assert len(everything) == 2 * 9
    assert everything[4:8] == [plan.layout(1)[m][rank] for m in (0, 1) for rank in (0, 1)]
    assert list(StepSampler(plan, 4, 6)) == everything[12:]


def test_short_rows_share_a_micro_batch_that_is_no_longer_than_the_longest_row():
    lengths = np.array([30, 100, 20, 40, 60, 30, 10, 10])
    plan = BatchPlan(lengths, lengths, 0, 1, 4, 2)
    assert plan.micro_batch_tokens == 100
    assert plan.layout(0) == [[[1], [4, 6]], [[0, 2, 7], [3, 5]]]  # two micro-batches instead of four, on both ranks
    for world_size, accumulation in ((1, 8), (2, 4), (4, 2), (8, 1)):
        plan = BatchPlan(lengths, lengths, 0, 1, accumulation, world_size)
        micro_batches = [lengths[rows].sum() for ranks in plan.layout(0) for rows in ranks]
        assert max(micro_batches) <= 100 and sum(micro_batches) == 300
    pairs = BatchPlan(lengths, lengths, 0, 2, 2, 2)
    assert pairs.micro_batch_tokens == 160 and len(pairs.layout(0)) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((1, None, 4, 2), (2, 4)), ((1, 2, None, 2), (2, 4)), ((1, None, None, 8), (1, 8)), ((2, 1, 4, 2), (1, 4))],
)
def test_accumulation_and_global_batch_follow_from_each_other(arguments, expected):
    assert resolve_batch_size(*arguments) == expected


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"global_batch_size 6 .* world size 4 = 4; the nearest that are: 4 or 8"):
        resolve_batch_size(1, None, 6, 4)
    with pytest.raises(UserError, match="the nearest that are: 8"):
        resolve_batch_size(1, None, 4, 8)
    with pytest.raises(UserError, match="global_batch_size 8 ≠ .*leave gradient_accumulation_steps out"):
        resolve_batch_size(1, 2, 8, 2)


def test_packing_counts_each_target_at_the_position_before_it():
    batch = collate(
        [
            {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
            {"input_ids": [9, 10], "labels": [9, 10]},  # its first token has no predecessor
        ]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch["target_positions"].tolist() == [1, 2, 4]
    assert batch["target_ids"].tolist() == [7, 8, 10]
    assert batch["segment_lengths"] == (4, 2)
    assert batch["cu_seq_lens"].tolist() == [0, 4, 6] and batch["cu_seq_lens"].dtype == torch.int32


def test_no_rows_give_a_target_that_does_not_count_and_rounded_lengths_a_segment_without_targets():
    empty = collate([])
    assert empty["input_ids"].tolist() == [[0, 0]] and empty["counted"] is False
    assert all(value.numel() > 0 for value in empty.values() if isinstance(value, torch.Tensor))
    padded = collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}], pad_to_multiple_of=8)
    assert padded["input_ids"].shape == (1, 8) and padded["segment_lengths"] == (3, 5)
    assert padded["target_ids"].tolist() == [6, 7] and padded["counted"] is True


@pytest.mark.parametrize(("limit", "micro_batches"), [(0, 4), (60, 4), (120, 4), (180, 2), (355, 1), (8192, 1)])
def test_a_limit_decides_how_many_rows_share_a_forward_and_changes_no_step(limit, micro_batches):
    lengths = np.array([60, 80, 95, 120])
    plan = BatchPlan(lengths, lengths, 0, 1, 4, 1, micro_batch_limit=limit)
    layout = plan.layout(0)
    assert len(layout) == micro_batches
    assert sorted(row for ranks in layout for row in ranks[0]) == [0, 1, 2, 3]
    assert plan.micro_batch_tokens == max(limit, 120)  # the longest row has to fit
    assert max(lengths[ranks[0]].sum() for ranks in layout) <= plan.micro_batch_tokens


def test_a_limit_below_the_per_device_batch_makes_more_micro_batches():
    lengths = np.full(8, 100)
    plan = BatchPlan(lengths, lengths, 0, 4, 1, 2, micro_batch_limit=100)
    assert [[len(rows) for rows in ranks] for ranks in plan.layout(0)] == [[1, 1]] * 4
