"""A run's adapter merged into its base: a plain model directory that any server loads, verified before it is called done.

    python export.py --run_dir outputs/demo/run --output_dir outputs/demo/merged

W + scaling · B A is computed in float32 one weight at a time and written file by file, so merging needs the memory of
one output file. Verifying loads the model in float32: base with adapter first, then the merged one. All else that the
base's directory holds (tokenizer, chat template, code, tensors that text does not use) is taken over as it is.
"""

from sft import device, errors

if __name__ == "__main__":
    device.set_environment_defaults()  # torch reads them when it is imported

import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sft import artifacts, checkpoint, config, encoding, hub, modeling, run_directory, schemas, serving, weights
from sft.batching import collate
from sft.card import merged_card
from sft.config import option, require
from sft.encoding import encode_prompt
from sft.errors import RunFailed, UserError
from sft.tokenizer import explained_loading, load_tokenizer

STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# How far a logit of the merged model may be from base + adapter, as a share of the largest logit. Both are computed in
# float32, so the difference is the rounding of the stored weights: 8, 11 and 24 bits of mantissa.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Of the base's files: weights, in whatever form, and what is written anew.
NOT_COPIED = re.compile(
    r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)$|\.index\.json$|^(README\.md|Modelfile|export\.json)$"
)
PROBES = (
    "What is gradient accumulation?",
    "How are two cards kept in step?",
    "什么是梯度累积？",
    "List three colours.",
)


@dataclass
class ExportConfig:
    """All settings of export.py."""

    run_dir: str = option(help="run directory of train.py, one of its checkpoints, or any LoRA adapter directory")
    output_dir: str = option(help="directory for the merged model, made by this script")
    model_name_or_path: str | None = option(None, "where the base model is now, if it has moved since training")
    dtype: str = option("auto", "of the written weights; auto: as the base is stored", choices=("auto", *TOLERANCE))
    max_shard_size_bytes: int = option(4 << 30, "size of one weights file, which is also what merging needs in memory")
    overwrite: bool = option(False, "replace output_dir once the new model is complete")
    trust_remote_code: bool = option(False, "run Python code that comes with the model (only if you trust its author)")
    push_to_hub: str | None = option(None, "upload the merged model to this hub repository, owner/name")
    private: bool = option(True, "make the hub repository private when it does not exist yet")

    def __post_init__(self) -> None:
        require(self, "max_shard_size_bytes", lambda value: value >= 1, "at least 1")
        if self.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push_to_hub):
            raise UserError(f"push_to_hub is {self.push_to_hub!r}; expected a repository name: owner/name")


def main() -> None:
    settings = config.parse(ExportConfig, description=__doc__)
    if settings.push_to_hub:
        hub.check()
    output_dir = Path(settings.output_dir)
    if output_dir.exists() and not settings.overwrite:
        raise UserError(f"output_dir {output_dir} exists; choose another directory or give --overwrite")
    if output_dir.exists() and not (output_dir / "export.json").is_file():
        raise UserError(
            f"output_dir {output_dir} holds no merged model of this script, and --overwrite replaces nothing else"
        )

    # What is merged into what.
    adapter_dir = Path(settings.run_dir)
    lora, deltas, provenance = read_run(adapter_dir)
    base_name = settings.model_name_or_path or provenance["model_name_or_path"]
    if not settings.model_name_or_path:  # of a hub, the commit that was trained
        base_name = hub.local_directory(base_name, provenance.get("model_commit"))[0]
    base_dir = weights.weights_directory(base_name)
    files = weights.places(base_dir)
    for kept in (adapter_dir, base_dir):
        if output_dir.resolve() in (kept.resolve(), *kept.resolve().parents):
            raise UserError(
                f"output_dir {output_dir} is or holds {kept}, which it is made from; choose another directory"
            )
    recorded = provenance.get("model_sha256")
    if recorded and (found := artifacts.model_sha256(base_name)) and found != recorded:
        raise UserError(
            f"{base_name} is not the model that {adapter_dir} was trained on (model_sha256 {recorded[:12]}… and "
            f"{found[:12]}…); give the right one with --model_name_or_path"
        )
    tokenizer = load_tokenizer(base_name, settings.trust_remote_code)
    deltas = by_stored_name(deltas, base_name, files, settings.trust_remote_code)

    with artifacts.new_directory(output_dir, replace=settings.overwrite) as directory:
        dtype = write_weights(files, directory, deltas, scaling(lora), settings.dtype, settings.max_shard_size_bytes)
        stop_ids = write_rest(base_dir, directory, tokenizer, dtype)
        difference = verify(base_name, adapter_dir, directory, tokenizer, dtype, settings.trust_remote_code)
        origin = {
            "base_model": provenance["model_name_or_path"],
            "model_sha256": recorded or artifacts.model_sha256(base_name),
            "adapter_sha256": artifacts.sha256_file(adapter_dir / "adapter_model.safetensors"),
            "dataset_sha256": provenance.get("dataset_sha256"),
            "lora_r": lora.r,
            "lora_alpha": lora.lora_alpha,
            "target_modules": sorted(lora.target_modules),
            "dtype": dtype,
            "merged_weights": len(deltas),
            "verified": difference,
            "versions": artifacts.library_versions(),
        }
        artifacts.write_json(directory / "export.json", origin)
        artifacts.write_text(
            directory / "README.md", merged_card(origin, serving.launch_lines("DIRECTORY", tokenizer, stop_ids))
        )
        artifacts.write_text(directory / "Modelfile", serving.modelfile(tokenizer, stop_ids))
    print(
        f"Merged {len(deltas)} weights into {output_dir} as {dtype}: logits within {difference['largest_error']:.1e} of base + "
        f"adapter (allowed {difference['tolerance']:.0e}); the adapter itself moves them by up to {difference['largest_change']:.1e}.\n"
        f"To serve it:\n{serving.launch_lines(str(output_dir), tokenizer, stop_ids)}"
    )
    if settings.push_to_hub:
        hub.upload(output_dir, settings.push_to_hub, settings.private)


def read_run(directory: Path) -> tuple[LoraConfig, dict[str, tuple[Tensor, Tensor]], dict]:
    """The LoRA settings, (A, B) by the parameter of the base that they change, and where the run came from.

    Raises: UserError when the directory holds no adapter, one that is not plain LoRA, or not the one that was trained.
    """
    file = directory / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(
            f"{directory} holds no adapter_model.safetensors; give a finished run or a checkpoint of train.py"
        )
    damage = checkpoint.problem(directory) if (directory / checkpoint.CHECKSUMS).is_file() else None
    if (directory / "summary.json").is_file():
        damage = run_directory.unfinished(directory)
    if damage:
        raise UserError(f"{directory} cannot be merged: {damage}; export a checkpoint of the run, or a copy of it")
    if (directory / "adapter_config.json").is_file():
        artifacts.read_json(directory / "adapter_config.json", schemas.ADAPTER)
    with explained_loading("run_dir", str(directory)):
        lora = PeftConfig.from_pretrained(str(directory))
    try:
        tensors = load_file(str(file))
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}); export a checkpoint of the run instead") from error
    pattern = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
    names = [match for name in tensors if (match := pattern.fullmatch(name))]
    beyond = modeling.beyond_plain_lora(lora)
    beyond.pop("use_rslora", None)  # a matter of `scaling` alone
    if beyond or len(names) != len(tensors):
        raise UserError(
            f"{directory} is not a plain LoRA adapter ({beyond or 'other tensors'}); merge it with PEFT's merge_and_unload"
        )
    modules = sorted({match[1] for match in names})
    deltas = {
        f"{module}.weight": tuple(tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        for module in modules
    }
    for folder in (directory, directory.parent):  # a checkpoint's run is one level up
        if (folder / "provenance.json").is_file():
            return lora, deltas, artifacts.read_json(folder / "provenance.json", schemas.ORIGIN)
    return lora, deltas, {"model_name_or_path": lora.base_model_name_or_path}


def scaling(lora: LoraConfig) -> float:
    """What B A is multiplied with: alpha / r (Hu et al. 2021), alpha / √r for rank-stabilised LoRA."""
    return lora.lora_alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)


def by_stored_name(deltas: dict, base_name: str, files: dict[str, Path], trust_remote_code: bool) -> dict:
    """The deltas by the names that the base's files have for the weights. Raises: UserError when one is not there."""
    configuration = modeling.load_config(base_name, trust_remote_code)
    with modeling.explained_damage(base_name), init_empty_weights():
        model = AutoModelForCausalLM.from_config(
            configuration, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    known = weights.sources(model, files)
    stored = {name: known[name].names[0] for name in deltas if name in known and not known[name].converter}
    missing = sorted(set(deltas) - set(stored))
    if missing:
        raise UserError(
            f"{len(missing)} of {len(deltas)} weights that the adapter changes are not in {base_name}, first {missing[0]}; "
            "it was trained on another architecture, or the base stores these weights in another form"
        )
    return {stored[name]: pair for name, pair in deltas.items()}


def write_weights(
    places: dict[str, Path], directory: Path, deltas: dict, factor: float, dtype_name: str, max_shard_size_bytes: int
) -> str:
    """Writes the merged weights as safetensors and their index; returns the name of the dtype that most of them have.

    places: the base's weights and the file of each. dtype_name: of all weights; auto: each as the base stores it.
    Raises: UserError when an adapted weight is stored in a form that cannot be added to.
    """
    sizes, stored = {}, {}  # bytes to write; the name of the dtype that the base has
    for file in sorted(set(places.values())):
        with safe_open(str(file), framework="pt") as tensors:
            for name in (name for name in tensors.keys() if places.get(name) == file):  # noqa: SIM118
                part = tensors.get_slice(name)
                stored[name] = STORED_DTYPES.get(part.get_dtype())
                if name in deltas and not stored[name]:
                    raise UserError(
                        f"{name} is stored as {part.get_dtype()} in {file}; merge into the unquantised base model"
                    )
                written = getattr(torch, dtype_name if dtype_name != "auto" else stored[name] or "bfloat16")
                sizes[name] = math.prod(part.get_shape()) * written.itemsize
    dtype = None if dtype_name == "auto" else getattr(torch, dtype_name)
    groups, total = [[]], 0
    for name in places:
        if groups[-1] and total + sizes[name] > max_shard_size_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += sizes[name]
    weight_map = {}
    for number, names in enumerate(groups, start=1):
        part = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        merged = {name: merged_weight(places[name], name, deltas.get(name), factor, dtype) for name in names}
        modeling.write_tensors(directory / part, merged)
        os.chmod(directory / part, directory.stat().st_mode & 0o666)  # safetensors makes files only for their owner
        weight_map.update(dict.fromkeys(names, part))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        artifacts.write_json(directory / "model.safetensors.index.json", index)
    return dtype_name if dtype else max(filter(None, stored.values()), key=list(stored.values()).count)


def merged_weight(
    file: Path, name: str, pair: tuple[Tensor, Tensor] | None, factor: float, dtype: torch.dtype | None
) -> Tensor:
    """One weight of the base, with scaling · B A added in float32 when the adapter changes it; dtype None: as it was.

    Raises: UserError when the adapter is for a weight of another shape.
    """
    with safe_open(str(file), framework="pt") as tensors:
        weight = tensors.get_tensor(name)
    dtype = dtype if dtype and weight.is_floating_point() else weight.dtype
    if pair is not None:
        a, b = (side.float() for side in pair)
        if weight.shape != (b.shape[0], a.shape[1]):
            raise UserError(
                f"the adapter changes a {b.shape[0]} × {a.shape[1]} weight, but {name} is {tuple(weight.shape)}"
            )
        weight = weight.float() + factor * (b @ a)
    return weight.to(dtype).contiguous()


def write_rest(base_dir: Path, directory: Path, tokenizer, dtype: str) -> list[int]:
    """Writes config.json with the new dtype, copies what else the base has, tokenizer and template byte for byte, and
    makes generation end where the chat template ends an answer. Returns the token ids that end one."""
    for file in base_dir.iterdir():
        if file.is_file() and not file.name.startswith(".") and not NOT_COPIED.search(file.name):
            shutil.copyfile(file, directory / file.name)
    settings = artifacts.read_json(base_dir / "config.json", schemas.OBJECT)
    for part in (settings, *(value for value in settings.values() if isinstance(value, dict))):  # text_config …
        for name in ("torch_dtype", "dtype"):
            if name in part or (part is settings and name == "dtype" and "torch_dtype" not in part):
                part[name] = dtype
    artifacts.write_json(directory / "config.json", settings)
    path = base_dir / "generation_config.json"
    generation = artifacts.read_json(path, schemas.OBJECT) if path.is_file() else {"_from_model_config": True}
    known = SimpleNamespace(eos_token_id=generation.get("eos_token_id", settings.get("eos_token_id")))
    generation["eos_token_id"] = encoding.stop_token_ids(tokenizer, known)
    artifacts.write_json(directory / "generation_config.json", generation)
    return generation["eos_token_id"]


def verify(base_name: str, adapter_dir: Path, directory: Path, tokenizer, dtype: str, trust_remote_code: bool) -> dict:
    """How far merged logits are from base + adapter, in shares of the largest logit.

    Raises: RunFailed when that exceeds the dtype's tolerance, or when the merged model is as near to the bare base as
    to base + adapter: the update was lost or rounded away.
    """
    batches = [collate([{"input_ids": ids, "labels": ids}]) for ids in (
        encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in PROBES
    )]  # fmt: skip
    model = modeling.load_base(base_name, torch.float32, trust_remote_code=trust_remote_code)
    base = probe_logits(model, batches)
    adapted = probe_logits(modeling.load_adapter(model, str(adapter_dir)), batches)
    del model
    merged = probe_logits(
        modeling.load_base(str(directory), torch.float32, trust_remote_code=trust_remote_code), batches
    )
    if not torch.isfinite(adapted).all():
        raise UserError(
            f"base + adapter of {adapter_dir} gives logits that are not finite: the training has diverged (lower its "
            "learning_rate); there is nothing worth merging"
        )
    scale = adapted.abs().max()
    found = {
        "largest_error": float((merged - adapted).abs().max() / scale),
        "largest_change": float((adapted - base).abs().max() / scale),
        "tolerance": TOLERANCE[dtype],
        "tokens": int(sum(batch["input_ids"].numel() for batch in batches)),
    }
    if not found["largest_error"] <= found["tolerance"]:
        raise RunFailed(
            f"the merged model's logits differ from base + adapter by {found['largest_error']:.1e} of the largest, more than "
            f"{found['tolerance']:.0e}: nothing was written. Keep serving base + adapter, and report this"
        )
    if not torch.linalg.norm(merged - adapted) < torch.linalg.norm(merged - base):
        raise RunFailed(
            f"the merged model is as near to the bare base as to base + adapter (the adapter moves logits by "
            f"{found['largest_change']:.1e} of the largest): rounding to {dtype} lost the update, or the adapter is untrained. "
            "Nothing was written; try --dtype float32, or serve base + adapter"
        )
    return found


@torch.no_grad()
def probe_logits(model: torch.nn.Module, batches: list[dict]) -> Tensor:
    """Logits at every position of the probes, (tokens, V) float32."""
    model.eval()
    rows = [
        model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], segment_lengths=batch["segment_lengths"]
        ).logits[0]
        for batch in batches
    ]
    return torch.cat(rows).float()


if __name__ == "__main__":
    errors.run(main)
