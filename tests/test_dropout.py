"""Dropout masks belong to rows: neither ranks, micro-batches, neighbours nor recomputation change them."""

import numpy as np
import pytest
import torch

from sft import modeling
from sft.batching import collate
from sft.dropout import DropoutRows, RowDropout, own_dropout
from tests import families
from tests.conftest import adapter, losses, make_rows


@pytest.fixture(scope="module")
def one_process(warm_server, arguments, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("dropout") / "run"
    status, output = warm_server.run(*arguments(run_dir, *FLAGS, "--global_batch_size", 4, *ALONE), processes=1)
    assert status == 0, output
    return run_dir


FLAGS = ["--lora_dropout", 0.1, "--max_steps", 40, "--eval_steps", 40, "--save_steps", 40]
ALONE = ["--gradient_accumulation_steps", 4]


@pytest.mark.parametrize(
    ("processes", "more"),
    [(2, ["--gradient_accumulation_steps", 2]), (1, ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 1]),
     (2, ["--gradient_accumulation_steps", 2, "--gradient_checkpointing", "--pad_to_multiple_of", 16])],
)  # fmt: skip
def test_ranks_and_micro_batches_do_not_change_the_masks(warm, arguments, tmp_path, one_process, processes, more):
    status, output = warm.run(*arguments(tmp_path / "run", *FLAGS, *more), processes=processes)
    assert status == 0, output
    assert len(losses(one_process)) == 40
    assert losses(tmp_path / "run") == pytest.approx(losses(one_process), rel=1e-6)
    first, second = adapter(one_process), adapter(tmp_path / "run")
    assert first and first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=1e-6)  # sums of 4 rows in another order


def masks(rows: DropoutRows, layer: int = 3, lengths=(5, 7), features: int = 400) -> torch.Tensor:
    rows.pack(lengths)
    return RowDropout(0.25, layer, rows)(torch.ones(1, sum(lengths), features))[0]


def test_a_mask_is_a_function_of_seed_step_row_and_layer():
    rows = DropoutRows(seed=42)
    rows.begin(9, [80, 81])
    both = masks(rows)
    assert both.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert abs((both == 0).float().mean().item() - 0.25) < 0.03  # 4,800 draws: five standard deviations
    rows.begin(9, [17, 81, 3])
    assert torch.equal(masks(rows, lengths=(2, 7, 4))[2:9], both[5:])
    rows.begin(9, [81])
    same, other_layer = masks(rows, lengths=(7,)), masks(rows, layer=4, lengths=(7,))
    rows.begin(10, [81])
    other_step = masks(rows, lengths=(7,))
    rows.begin(9, [82])
    other_row = masks(rows, lengths=(7,))
    rows = DropoutRows(seed=43)
    rows.begin(9, [81])
    other_seed = masks(rows, lengths=(7,))
    assert torch.equal(same, both[5:])
    for other in (other_layer, other_step, other_row, other_seed):
        assert 0.3 < (same != other).float().mean() < 0.45  # 2 × 0.25 × 0.75 of independent masks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_whose_rows_go_alone_has_the_same_masks_beside_any_neighbour(tmp_path, checkpointing):
    families.save("lfm2", tmp_path / "model", [text for row in make_rows(200) for text in row.values()])
    base = modeling.load_base(str(tmp_path / "model"), torch.float32)
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    model = modeling.add_lora(base, 8, 16, 0.3, ["q_proj", "v_proj"], seed=1)
    with torch.no_grad():
        for parameter in modeling.trainable_parameters(model).values():
            parameter.add_(0.05)
    loss = modeling.TargetLoss(model, dropout=own_dropout(model, seed=5)).train()
    loss.packs = False
    draw = np.random.default_rng(3)
    rows = {
        number: {"input_ids": ids, "labels": ids}
        for number, ids in ((n, draw.integers(3, 300, 9 + n)) for n in range(3))
    }

    def gradients(numbers: list[list[int]]) -> list[torch.Tensor]:
        loss.zero_grad()
        for micro_batch in numbers:
            loss.dropout.begin(7, micro_batch)
            loss(**collate([rows[number] for number in micro_batch])).sum().backward()
        return [parameter.grad.clone() for parameter in modeling.trainable_parameters(model).values()]

    together, apart = gradients([[0, 1, 2]]), gradients([[2], [1, 0]])
    loss.dropout.begin(8, [0])
    for one, other in zip(together, apart):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    loss.dropout.seed = 6
    assert max(float((one - other).abs().max()) for one, other in zip(together, gradients([[0, 1, 2]]))) > 1e-2
