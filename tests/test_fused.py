"""What is replaced by a card's operator is compared first, and left alone where the two differ."""

import pytest
import torch
from torch import nn

from sft import attention, modeling
from training import fused


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    base = modeling.load_base(str(tiny_model_dir), torch.float32)
    return modeling.add_lora(base, 8, 16, 0.0, ["q_proj", "v_proj", "gate_proj"], seed=1)


def norm_by_hand(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x / (x.square().mean(-1, keepdim=True) + fused.epsilon(module)).sqrt()


def test_kinds_are_found_by_their_parts_not_by_the_models_name(model):
    kinds = {"norm": fused.is_rms_norm, "swiglu": fused.is_swiglu}
    found = {kind: sum(map(applies, model.modules())) for kind, applies in kinds.items()}
    assert found == {"norm": 5, "swiglu": 2}
    assert len(fused.attention_layers(model)) == 2


def test_a_replacement_that_agrees_takes_the_place_of_every_module(model):
    line = fused.replace_forward(model, "RMSNorm", fused.is_rms_norm, [lambda module, x: 2 * x, norm_by_hand])
    norms = [module for module in model.modules() if fused.is_rms_norm(module)]
    assert line.startswith("RMSNorm: 5 modules, differing by ") and "left as it is" not in line
    assert len(norms) == 5 and all(norm.forward.func is norm_by_hand for norm in norms)
    for norm in norms:
        del norm.forward


@pytest.mark.parametrize(
    "wrong",
    [
        lambda module, x: norm_by_hand(module, x) * 1.001,  # another result
        lambda module, x: norm_by_hand(module, x.detach()) + 0 * x,  # another gradient
    ],
)
def test_a_replacement_that_differs_is_left_out_with_a_sentence(model, wrong):
    line = fused.replace_forward(model, "RMSNorm", fused.is_rms_norm, [wrong])
    assert line.startswith("RMSNorm: 0 modules") and "left as it is: Qwen2RMSNorm differs by" in line
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_replacement_that_the_card_refuses_is_left_out(model):
    def refused(module, x):
        raise RuntimeError("operator not supported")

    assert "differs by inf" in fused.replace_forward(model, "RMSNorm", fused.is_rms_norm, [refused])


def test_linear_layers_as_plain_products_are_the_same(model):
    before = model(torch.arange(7)[None]).logits
    line = fused.replace_forward(model, "linear", lambda module: type(module) is nn.Linear, [fused.linear])
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert f"linear: {len(linears)} modules" in line and len(linears) == 2 * 7 + 1 + 2 * 3 * 2
    torch.testing.assert_close(model(torch.arange(7)[None]).logits, before, rtol=1e-6, atol=1e-6)
    for module in linears:
        del module.forward


@pytest.mark.parametrize(("offset", "chosen"), [(0.0, True), (0.01, False)])
def test_attention_in_one_call_is_chosen_only_when_it_agrees(model, offset, chosen):
    def in_one_call(query, key, value, lengths, window, scaling, cu_seq_lens=None):
        assert cu_seq_lens.tolist() == [0, 5, 6, 29, 37]
        return attention.sdpa_by_row(query, key, value, lengths, window, scaling) * (1 + offset)

    line = fused.choose_attention(model, in_one_call)
    layers = fused.attention_layers(model)
    assert all(("fused_attention" in layer.__dict__) == chosen for layer in layers) and len(layers) == 2
    assert line.startswith("attention: one call for all rows in 2 layers" if chosen else "attention: a call per row")
    for layer in layers:
        layer.__dict__.pop("fused_attention", None)
