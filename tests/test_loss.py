"""The loss: its value, in chunks or not, and the memory it takes."""

import math
import subprocess
import sys

import pytest
import torch

from sft.loss import chunked_token_nll, token_nll
from tests.conftest import ROOT

QWEN2_VOCABULARY = 152_064
MEASURE = """
import re, sys, torch
from sft.loss import chunked_token_nll
tokens, vocabulary, width = 512, int(sys.argv[1]), 8
head = torch.nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
ids = torch.arange(tokens)
def peak_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
chunked_token_nll(torch.randn(2, width, requires_grad=True), head, ids[:2], 1).sum().backward()  # loads what it needs
for chunk_tokens in (32, 0):
    before = peak_bytes()
    hidden = torch.randn(tokens, width, requires_grad=True)
    chunked_token_nll(hidden, head, ids, chunk_tokens).sum().backward()
    print(peak_bytes() - before)
"""


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
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(QWEN2_VOCABULARY)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    chunked, whole = map(int, result.stdout.split())  # growth of the peak, one after the other
    chunk, all_logits = 32 * QWEN2_VOCABULARY * 4, 512 * QWEN2_VOCABULARY * 4
    assert chunked < 6 * chunk  # one buffer; glibc's heap was seen to keep up to four; all logits are sixteen chunks
    assert whole > 0.9 * (all_logits - chunk)  # without chunks; the measurement sees it
