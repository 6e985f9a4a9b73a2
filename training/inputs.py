"""What a training run reads: rows, base model and the adapter to start from, each found, verified and named."""

from dataclasses import dataclass

import torch

from sft import artifacts, device, hub
from sft.config import TrainConfig
from sft.dataset import Dataset
from sft.errors import UserError
from sft.run_directory import adapter_sha256, describe_inputs
from sft.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Inputs:
    """What a run reads: rows, base model, adapter to start from, dtype of the base; `provenance` says what they are."""

    data: Dataset
    train_rows: object  # datasets.Dataset
    eval_rows: object
    base_dir: str
    adapter_dir: str | None
    dtype: torch.dtype
    provenance: dict


def read_inputs(settings: TrainConfig, accelerator) -> Inputs:
    """Rows, the base's dtype, and what they are made from.

    Raises: UserError when this rank's data set, model or settings cannot be used.
    """
    data = Dataset(settings.dataset_dir)
    train_rows = data.train
    base_dir, base_commit = hub.local_directory(settings.model_name_or_path, settings.revision)
    adapter_dir, adapter_commit = None, None
    if settings.adapter_name_or_path:
        adapter_dir, adapter_commit = hub.local_directory(
            settings.adapter_name_or_path, settings.adapter_revision, "adapter"
        )
    data.check_tokenizer(load_tokenizer(base_dir, settings.trust_remote_code))
    if len(train_rows) == 0 or min(train_rows["target_tokens"]) < 1:
        raise UserError(
            f"{settings.dataset_dir}: {len(train_rows)} training rows, some without target tokens; make the data set "
            "with data_prep.py, which leaves out rows that have nothing to learn"
        )
    dtype = device.base_dtype(settings.dtype, accelerator.device)
    provenance = {
        **describe_inputs(settings, data.manifest, dtype, accelerator.mixed_precision),
        "model_sha256": artifacts.model_sha256(base_dir),
        "model_commit": base_commit,
        "start_adapter_sha256": adapter_sha256(adapter_dir) if adapter_dir else None,
        "start_adapter_commit": adapter_commit,
    }
    return Inputs(data, train_rows, data.eval, base_dir, adapter_dir, dtype, provenance)
