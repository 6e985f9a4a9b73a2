"""What learns: the frozen base with its adapter, wrapped for the ranks, and the optimizer."""

from dataclasses import asdict, dataclass

import torch

from sft import checkpoint, device, modeling, weights
from sft.config import TrainConfig
from sft.dropout import DropoutRows, own_dropout
from sft.errors import UserError
from training.inputs import Inputs
from training.optimizer import make_optimizer


@dataclass(frozen=True)
class Learner:
    """What learns: the loss as one module, wrapped for the ranks; the adapted model inside it; the optimizer."""

    model: torch.nn.Module
    peft_model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dropout: DropoutRows
    parameters: tuple[int, int, int]  # trainable, all, and held by this rank

    @property
    def multiplied_weights(self) -> int:
        """Weights that a token is multiplied with: all but a table of input embeddings that is not also the head."""
        table = self.peft_model.get_input_embeddings().weight
        tied = self.peft_model.get_output_embeddings().weight is table
        return self.parameters[1] - (0 if tied else table.numel())


def build_learner(settings: TrainConfig, inputs: Inputs, resumed: checkpoint.Checkpoint | None, accelerator) -> Learner:
    """The frozen base with its adapter, and the optimizer, as a checkpoint left them or new."""
    base = modeling.load_base(
        inputs.base_dir, inputs.dtype, accelerator.device, settings.attn_implementation, settings.trust_remote_code,
        empty=device.is_sharded(accelerator),
    )  # fmt: skip
    peft_model = put_adapter_on(base, settings, inputs.adapter_dir)
    if resumed:
        checkpoint.restore_adapter(resumed, peft_model)
    trainable, total = modeling.parameter_counts(peft_model)
    accelerator.print(
        f"{trainable:,} trainable of {total:,} parameters; {device.describe_precision(inputs.dtype, accelerator)}."
    )
    optimizer = make_optimizer(
        modeling.trainable_parameters(peft_model).values(), settings.learning_rate, settings.weight_decay, accelerator
    )
    dropout = own_dropout(peft_model, settings.seed)
    model = modeling.TargetLoss(peft_model, settings.loss_chunk_tokens, dropout)
    model, optimizer = accelerator.prepare(model, optimizer)
    weights.fill_from_disk(model, inputs.base_dir, accelerator.device)
    if resumed:
        checkpoint.restore_optimizer(resumed, model, optimizer.optimizer)
    return Learner(model, peft_model, optimizer, dropout, (trainable, total, modeling.held_parameters(model)))


def put_adapter_on(base, settings: TrainConfig, adapter_dir: str | None):
    """The base with a trainable adapter: a new one, or the one that the settings name."""
    if settings.gradient_checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    if adapter_dir is None:
        return modeling.add_lora(
            base, settings.lora_r, settings.lora_alpha, settings.lora_dropout, settings.target_modules, settings.seed
        )
    linears = modeling.language_linears(base)[0]
    model = modeling.load_adapter(base, adapter_dir, trainable=True)
    loaded = model.peft_config["default"]
    targets = sorted(loaded.target_modules)
    if settings.target_modules == [modeling.ALL_LINEAR] and modeling.adapted_modules(model) == set(linears):
        targets = settings.target_modules
    shape = {
        "lora_r": loaded.r, "lora_alpha": loaded.lora_alpha, "lora_dropout": loaded.lora_dropout, "target_modules": targets
    }  # fmt: skip
    asked = {**asdict(settings), "target_modules": sorted(settings.target_modules)}
    differs = [f"{name} {shape[name]}" for name in shape if shape[name] != asked[name]]
    differs += [f"{name} {value}" for name, value in modeling.beyond_plain_lora(loaded).items()]
    if differs:
        raise UserError(
            f"adapter_name_or_path {settings.adapter_name_or_path} has {', '.join(differs)}, the settings say otherwise; "
            "set them to the adapter's values, or start from another adapter where there is no such setting"
        )
    return model
