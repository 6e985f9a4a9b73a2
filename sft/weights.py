"""Base weights on disk: where they are, and each rank reading only its own part of them."""

import copy
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from sft.artifacts import read_json
from sft.errors import UserError
from sft.hub import local_directory
from sft.modeling import plain_name
from sft.tokenizer import BEFORE_5


def weights_directory(name_or_path: str) -> Path:
    """The local directory with a model's safetensors files; a hub name is downloaded, or found in the cache.

    Raises: UserError when it cannot be found or holds no safetensors.
    """
    directory = Path(local_directory(name_or_path)[0])
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{directory} holds no safetensors files; convert the model's weights to safetensors first")
    return directory


def places(directory: Path) -> dict[str, Path]:
    """The file of each stored tensor: as the index says where there is one, as some repositories hold their weights twice.

    Raises: UserError when a file is missing, cut off or no safetensors file at all.
    """
    index = directory / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map", {}) if index.is_file() else {}
    whole = [directory / "model.safetensors"]
    files = {directory / name for name in weight_map.values()} or (
        whole if whole[0].is_file() else directory.glob("*.safetensors")
    )
    found = {}
    for file in sorted(files):
        if not file.is_file():
            raise UserError(f"{file} is missing, though {index} names it; copy or download the model again")
        if file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
            raise UserError(f"{file} is a pointer of git-lfs, not the weights; run `git lfs pull` in {directory}")
        try:
            with safe_open(str(file), framework="pt") as weights:
                found.update(dict.fromkeys(weights.keys(), file))
        except SafetensorError as error:
            raise UserError(f"{file} is damaged ({error}); copy or download the model again") from error
    missing = sorted(set(weight_map) - set(found))
    if missing:
        raise UserError(f"{index} names {missing[0]}, which its file does not hold; copy or download the model again")
    return {name: found[name] for name in weight_map} if weight_map else found


@dataclass(frozen=True)
class Source:
    """The stored tensors that make up one parameter, and what transformers makes it of them with; None: as it is stored."""

    names: list[str]
    converter: object = None
    patterns: tuple[str, ...] = ()  # of the converter, one per name

    def read(self, files: dict[str, Path], model, parameter: str) -> torch.Tensor:
        """The whole parameter, from the files."""
        tensors = []
        for name in self.names:
            with safe_open(str(files[name]), framework="pt") as weights:
                tensors.append(weights.get_tensor(name))
        if self.converter is None:
            return tensors[0]
        converter = copy.deepcopy(self.converter)
        for name, pattern, tensor in zip(self.names, self.patterns, tensors):
            converter.add_tensor(parameter, name, pattern, tensor)
        return converter.convert(parameter, model=model, config=model.config)[parameter]


def sources(model: torch.nn.Module, stored: Iterable[str]) -> dict[str, Source]:
    """Where each of a model's parameters is to be found among the stored names, which may be older than the model's own:
    the rules are those by which transformers itself loads. model: without adapter; may be on the meta device."""
    state = model.state_dict(keep_vars=True)
    renamings, converters = [], []
    if BEFORE_5:
        rules = (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items()
        renamed = {
            name: (functools.reduce(lambda text, rule: re.sub(*rule, text), rules, name), None) for name in stored
        }
    else:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

        mapping = get_model_conversion_mapping(model)
        renamings = [rule for rule in mapping if not isinstance(rule, WeightConverter)]
        converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        prefix = model.base_model_prefix
        renamed = {
            name: rename_source_key(name, renamings, converters, prefix, state)
            for name in sorted(stored, key=dot_natural_key)
        }
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Source] = {}
    for name, (target, pattern) in renamed.items():
        target = target if target in state else name
        if target not in state:
            continue  # kept for other uses of the checkpoint
        if pattern is None or target == name:
            found[target] = Source([name])
        else:
            before = found.get(target, Source([], by_pattern[pattern]))
            found[target] = Source([*before.names, name], before.converter, (*before.patterns, pattern))
    return found


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
    files = places(directory)
    with torch.device("meta"):  # of a copy: from_config writes the attention into the configuration that it is given
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.causal.config), attn_implementation="eager")
    known = sources(plain, files)
    loaded, missing = {}, []
    for parameter, names in wanted.items():
        stored = [stored_name(name) for name in names if stored_name(name) in known]
        if not stored:
            missing.append(stored_name(names[0]))
            continue
        source = known[stored[0]]
        if source.converter is None:
            part = read_rows(files[source.names[0]], source.names[0], *own_rows(parameter))
        else:  # the whole of one parameter at a time
            part = source.read(files, plain, stored[0])[slice(*own_rows(parameter))]
        loaded.update(dict.fromkeys(names, torch.nn.Parameter(as_shard(part, parameter, device))))
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


def own_rows(parameter: torch.nn.Parameter) -> tuple[int, int]:
    """First and last + 1 of a sharded parameter's rows on this rank."""
    start, stop = 0, parameter.shape[0]
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard(0):  # FSDP2 cuts like torch.chunk
            rows = -(-parameter.shape[0] // parameter.device_mesh.size(dimension))
            start = min(parameter.device_mesh.get_local_rank(dimension) * rows, parameter.shape[0])
            stop = min(start + rows, parameter.shape[0])
    return start, stop


def read_rows(file: Path, name: str, start: int, stop: int) -> torch.Tensor:
    """Rows of a stored tensor."""
    with safe_open(str(file), framework="pt") as weights:
        return weights.get_slice(name)[start:stop]


def as_shard(part: torch.Tensor, parameter: torch.nn.Parameter, device: torch.device) -> torch.Tensor:
    """This rank's rows as a DTensor laid out like `parameter`, in its dtype."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        # A copy: what safetensors hands out may be a window on the file, and all of it would stay in memory.
        part.to(device=device, dtype=parameter.dtype, copy=True),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
