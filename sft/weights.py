"""Base weights on disk: where they are, and each rank reading only its own part of them."""

from pathlib import Path

import torch
from safetensors import safe_open

from sft.errors import UserError
from sft.modeling import plain_name

MODEL_FILES = ["*.safetensors", "*.json", "*.py", "*.model", "*.txt", "*.jinja"]


def weights_directory(name_or_path: str) -> Path:
    """The local directory with a model's safetensors files; a hub name is downloaded, or found in the cache.

    Raises: UserError when it cannot be found or holds no safetensors.
    """
    directory = Path(name_or_path)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            directory = Path(snapshot_download(name_or_path, allow_patterns=MODEL_FILES))
        # The hub's HTTP library has changed twice; its errors are bases of the hub's own.
        except (*HfHubHTTPError.__bases__, OSError, ValueError) as error:
            raise UserError(
                f"base model {name_or_path} is neither a directory nor to be had from the hub: "
                f"{str(error).strip().splitlines()[0]} — give a local directory; HF_ENDPOINT selects a mirror"
            ) from error
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{directory} holds no safetensors files; convert the model's weights to safetensors first")
    return directory


@torch.no_grad()
def fill_from_disk(model: torch.nn.Module, name_or_path: str, device: torch.device) -> None:
    """Reads the base weights that are still on the meta device, each rank its own rows: a sharded model never lies whole
    in anybody's memory. Does nothing for a model that was loaded whole.

    Raises: UserError when the files lack a weight that the model needs.
    """
    wanted = {}  # parameter → all its names: tied weights are one parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            wanted.setdefault(parameter, []).append(name)
    if not wanted:
        return
    directory = weights_directory(name_or_path)
    places = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            places.update(dict.fromkeys(weights.keys(), file))
    loaded, missing = {}, []
    for parameter, names in wanted.items():
        stored = [stored_name(name) for name in names if stored_name(name) in places]
        if not stored:
            missing.append(stored_name(names[0]))
            continue
        loaded.update(
            dict.fromkeys(names, torch.nn.Parameter(read_part(places[stored[0]], stored[0], parameter, device)))
        )
    if missing:
        raise UserError(
            f"{directory} lacks {len(missing)} weights of its model under the names that the model has, first {missing[0]}; "
            "sharded loading needs them: save the model again with this version of transformers"
        )
    # Activation checkpointing puts its prefix back by itself when it loads (torch, checkpoint_wrapper.py).
    loaded = {name.replace("_checkpoint_wrapped_module.", ""): parameter for name, parameter in loaded.items()}
    unexpected = model.load_state_dict(loaded, strict=False, assign=True).unexpected_keys
    if unexpected or any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError(f"base weights could not be put into the sharded model, first {unexpected[:1]}")


def stored_name(name: str) -> str:
    """A parameter's name in the base model's files, without what TargetLoss, PEFT and FSDP have put around it."""
    return plain_name(name).removeprefix("base_model.model.").replace(".base_layer.", ".")


def read_part(file: Path, name: str, parameter: torch.nn.Parameter, device: torch.device) -> torch.Tensor:
    """This rank's rows of a stored tensor as a DTensor laid out like `parameter`, in its dtype."""
    from torch.distributed.tensor import DTensor

    start, stop = 0, parameter.shape[0]
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard(0):  # FSDP2 cuts like torch.chunk
            rows = -(-parameter.shape[0] // parameter.device_mesh.size(dimension))
            start = min(parameter.device_mesh.get_local_rank(dimension) * rows, parameter.shape[0])
            stop = min(start + rows, parameter.shape[0])
    with safe_open(str(file), framework="pt") as weights:
        # A copy: what safetensors hands out may be a window on the file, and all of it would stay in memory.
        part = weights.get_slice(name)[start:stop].to(device=device, dtype=parameter.dtype, copy=True)
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
