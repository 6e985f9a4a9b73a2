"""Writes down with which attention each rank's layers are configured, when the model that learns was built and when it was
asked whether rows may share a forward; and what train.py then says of one call for all rows."""

import json
import sys
from functools import partial
from pathlib import Path

from accelerate.utils import gather_object

from sft import attention, config, device, packing
from training import fused
from training.inputs import read_inputs
from training.learner import build_learner


def one_call(query, key, value, lengths, window, scaling, cu_seq_lens=None):
    """Stands for a card's operator."""
    return attention.sdpa_by_row(query, key, value, lengths, window, scaling)


def main(output: str, *argv: str) -> None:
    settings = config.parse(config.TrainConfig, list(argv), description=__doc__)
    accelerator = device.start()
    inputs = read_inputs(settings, accelerator)
    model = build_learner(settings, inputs, None, accelerator).model
    configured = partial(implementations, accelerator.unwrap_model(model))
    found = {"sharded": device.is_sharded(accelerator), "built": configured()}
    packing.choose_forward(model, accelerator, inputs.train_rows)
    found |= {"asked": configured(), "said": fused.choose_attention(model, one_call)}
    ranks = gather_object([found])
    if accelerator.is_main_process:
        Path(output).write_text(json.dumps(ranks), encoding="utf-8")
    del model, configured
    device.end(accelerator)


def implementations(model) -> list[str]:
    """What the whole model and each of its attention layers are configured with."""
    layers = fused.attention_layers(model)
    return [module.config._attn_implementation for module in (model.causal, *layers)]


if __name__ == "__main__":
    main(*sys.argv[1:])
