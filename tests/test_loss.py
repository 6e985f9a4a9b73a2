"""The loss: its value, in chunks or not, and the memory it takes."""

import math

import pytest
import torch

from sft.loss import chunked_token_nll, token_nll
from tests.conftest import peak_bytes

QWEN2_VOCABULARY = 152_064


def make(tokens=21, width=16, vocabulary=50, seed=0, frozen=False):
    torch.manual_seed(seed)
    head = torch.nn.Linear(width, vocabulary, bias=False).requires_grad_(not frozen)
    return torch.randn(tokens, width, requires_grad=True), head, torch.randint(0, vocabulary, (tokens,))


def test_nll_is_the_log_of_the_vocabulary_for_even_logits_and_float32_for_any_dtype():
    logits = torch.zeros(2, 8, dtype=torch.bfloat16)
    assert token_nll(logits, torch.tensor([0, 5])).tolist() == pytest.approx([math.log(8)] * 2)
    assert token_nll(logits, torch.tensor([0, 5])).dtype == torch.float32
    sure = torch.tensor([[0.0, math.log(3.0)]])  # p = 1/4 and 3/4
    assert token_nll(sure, torch.tensor([1])).item() == pytest.approx(math.log(4 / 3))


@pytest.mark.parametrize("chunk_tokens", [0, 1, 4, 7, 20, 21, 1000])
@pytest.mark.parametrize("frozen", [True, False])
def test_chunks_change_neither_loss_nor_gradients(chunk_tokens, frozen):
    weights = torch.linspace(1, 2, 21)
    hidden, head, ids = make()
    nll = token_nll(head(hidden), ids)
    (nll * weights).sum().backward()
    hidden_too, head_too, ids = make(frozen=frozen)
    nll_too = chunked_token_nll(hidden_too, head_too, ids, chunk_tokens)
    (nll_too * weights).sum().backward()
    expected = (nll, hidden.grad, None if frozen else head.weight.grad)
    for found, exact in zip((nll_too, hidden_too.grad, head_too.weight.grad), expected):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)  # sums in another order


def test_a_frozen_head_has_the_gradient_of_the_definition_in_float64_and_bfloat16():
    hidden, head, ids = make(frozen=True)
    exact = hidden.detach().double().requires_grad_()
    token_nll_64 = torch.nn.functional.cross_entropy(exact @ head.weight.double().T, ids, reduction="sum")
    token_nll_64.backward()
    # float32 rounds to 6e-8 and bfloat16 to 4e-3, in a sum over 50 logits
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        low = hidden.detach().to(dtype).requires_grad_()
        nll = chunked_token_nll(low, head.to(dtype), ids, 8)
        assert nll.dtype == torch.float32
        nll.sum().backward()
        assert (low.grad.double() - exact.grad).norm() < tolerance * exact.grad.norm()


def test_scores_that_are_too_large_for_exp_have_the_loss_of_float64():
    hidden, head, ids = make(frozen=True)
    large = (300 * hidden.detach()).requires_grad_()
    scores = large.detach().double() @ head.weight.double().T
    assert scores.max() > 100  # exp overflows float32 above 88
    nll = chunked_token_nll(large, head, ids, 8)
    expected = torch.nn.functional.cross_entropy(scores, ids, reduction="none")
    torch.testing.assert_close(nll.double(), expected, rtol=1e-5, atol=1e-4)
    nll.sum().backward()
    assert large.grad.isfinite().all()


def test_no_targets_have_no_loss_and_zero_gradients_all_the_same():
    for frozen in (True, False):
        hidden, head, _ = make(frozen=frozen)
        nll = chunked_token_nll(hidden[:0], head, torch.zeros(0, dtype=torch.int64), 8)
        nll.sum().backward()
        assert len(nll) == 0 and hidden.grad.abs().sum() == 0


def test_chunks_of_a_trained_head_are_computed_twice_only_for_gradients():
    hidden, head, ids = make()
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        chunked_token_nll(hidden, head, ids, 7)
    assert len(calls) == 3
    chunked_token_nll(hidden, head, ids, 7).sum().backward()
    assert len(calls) == 3 + 6


def test_memory_of_the_loss_is_bounded_by_the_chunk_at_a_vocabulary_of_152064():
    chunk_bytes = 32 * QWEN2_VOCABULARY * 4
    for frozen, bound in ((True, 1.01), (False, 4)):  # chunks at once: one buffer worked on in place, or autograd's own
        hidden, head, ids = make(tokens=128, width=8, vocabulary=QWEN2_VOCABULARY, frozen=frozen)
        chunked, whole = (
            peak_bytes(lambda size=size: chunked_token_nll(hidden, head, ids, size).sum().backward())  # noqa: B023
            for size in (32, 0)
        )
        assert 1 <= chunked / chunk_bytes < bound
        assert whole >= 4 * chunk_bytes  # the 128 rows at once; the measurement sees it
