"""AdamW over one tensor is torch's AdamW over many."""

import copy

import pytest
import torch

from training.optimizer import MOMENTS, FlatAdamW


def make_parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape)) for shape in ((3, 4), (5,), (2, 2, 2), (1,))]


def steps(optimizer, parameters, numbers: range, max_norm: float, clip) -> list[float]:
    """The gradient norms of some steps whose gradients follow from the number of the step."""
    norms = []
    for number in numbers:
        draw = torch.Generator().manual_seed(number)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        norms.append(float(clip(max_norm)))
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        optimizer.step()
    return norms


@pytest.mark.parametrize("max_norm", [1.0, 1e3, float("inf")])
def test_weights_norms_and_state_are_those_of_torchs_adamw(max_norm):
    flat_parameters, parameters = make_parameters(), make_parameters()
    flat = FlatAdamW(flat_parameters, lr=0.1, weight_decay=0.1)
    torchs = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, foreach=False)
    found = steps(flat, flat_parameters, range(5), max_norm, flat.clip)
    expected = steps(
        torchs, parameters, range(5), max_norm, lambda norm: torch.nn.utils.clip_grad_norm_(parameters, norm)
    )
    assert found == pytest.approx(expected, rel=1e-6)
    for mine, theirs in zip(flat_parameters, parameters):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        assert float(flat.state[mine]["step"]) == 5
        for name in MOMENTS:
            torch.testing.assert_close(flat.state[mine][name], torchs.state[theirs][name], rtol=1e-6, atol=1e-8)


def test_state_that_a_checkpoint_puts_back_is_gone_on_with():
    """As checkpoint.restore_optimizer does it: new tensors under each parameter; torch's own AdamW may have written them."""
    whole, first, second = make_parameters(), make_parameters(), make_parameters()
    unbroken, torchs, resumed = FlatAdamW(whole, lr=0.1), torch.optim.AdamW(first, lr=0.1), FlatAdamW(second, lr=0.1)
    steps(unbroken, whole, range(6), 1.0, unbroken.clip)
    steps(torchs, first, range(3), 1.0, lambda norm: torch.nn.utils.clip_grad_norm_(first, norm))
    for parameter, other in zip(second, first):
        parameter.data.copy_(other.data)
        resumed.state[parameter].update(copy.deepcopy(torchs.state[other]))
    steps(resumed, second, range(3, 6), 1.0, resumed.clip)
    for mine, theirs in zip(second, whole):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_copies_nothing_once_the_weights_lie_together():
    parameters = make_parameters()
    optimizer = FlatAdamW(parameters, lr=0.1)
    steps(optimizer, parameters, range(2), 1.0, optimizer.clip)
    places = [parameter.data_ptr() for parameter in parameters]
    steps(optimizer, parameters, range(2, 4), 1.0, optimizer.clip)
    assert places == [parameter.data_ptr() for parameter in parameters]
    assert optimizer.is_flat()
