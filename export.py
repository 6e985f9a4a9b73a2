"""A run's adapter merged into its base: a plain model directory that any server loads, verified before it is called done.

    python export.py --run_dir outputs/demo/run --output_dir outputs/demo/merged

W + scaling · B A is computed in float32 one weight at a time and written file by file, so merging needs the memory of
one output file. Verifying loads the model in float32: base with adapter first, then the merged one.
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

import torch
from peft import LoraConfig, PeftConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sft import artifacts, config, modeling
from sft.batching import collate
from sft.card import merged_card
from sft.config import option, require
from sft.encoding import encode_prompt
from sft.errors import RunFailed, UserError
from sft.tokenizer import load_tokenizer
from sft.weights import weights_directory

STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# How far a logit of the merged model may be from base + adapter, as a share of the largest logit. Both are computed in
# float32, so the difference is the rounding of the stored weights: 8, 11 and 24 bits of mantissa.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
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
        check_hub()
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
    base_dir = weights_directory(base_name)
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

    with artifacts.new_directory(output_dir, replace=settings.overwrite) as directory:
        dtype = write_weights(base_dir, directory, deltas, scaling(lora), settings.dtype, settings.max_shard_size_bytes)
        write_configs(base_dir, directory, tokenizer, dtype)
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
        artifacts.write_text(directory / "README.md", merged_card(origin))
    print(
        f"Merged {len(deltas)} weights into {output_dir} as {dtype}: logits within {difference['largest_error']:.1e} of base + "
        f"adapter (allowed {difference['tolerance']:.0e}); the adapter itself moves them by up to {difference['largest_change']:.1e}."
    )
    if settings.push_to_hub:
        upload(output_dir, settings.push_to_hub, settings.private)


def read_run(directory: Path) -> tuple[LoraConfig, dict[str, tuple[Tensor, Tensor]], dict]:
    """The LoRA settings, its (A, B) by the base weight they change, and where the run came from.

    Raises: UserError when the directory holds no adapter, or one that is not plain LoRA.
    """
    file = directory / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(
            f"{directory} holds no adapter_model.safetensors; give a finished run or a checkpoint of train.py"
        )
    lora = PeftConfig.from_pretrained(str(directory))
    plain = isinstance(lora, LoraConfig) and not (
        lora.use_dora or lora.fan_in_fan_out or lora.rank_pattern or lora.alpha_pattern or lora.modules_to_save
    )
    try:
        tensors = load_file(str(file))
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}); export a checkpoint of the run instead") from error
    pattern = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
    names = [match for name in tensors if (match := pattern.fullmatch(name))]
    if not plain or len(names) != len(tensors):
        raise UserError(f"{directory} is not a plain LoRA adapter; merge it with PEFT's merge_and_unload instead")
    deltas = {
        f"{module}.weight": tuple(tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        for module in sorted({match[1] for match in names})
    }
    for folder in (directory, directory.parent):  # a checkpoint's run is one level up
        if (folder / "provenance.json").is_file():
            return lora, deltas, artifacts.read_json(folder / "provenance.json")
    return lora, deltas, {"model_name_or_path": lora.base_model_name_or_path}


def scaling(lora: LoraConfig) -> float:
    """What B A is multiplied with: alpha / r (Hu et al. 2021), alpha / √r for rank-stabilised LoRA."""
    return lora.lora_alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)


def write_weights(
    base_dir: Path, directory: Path, deltas: dict, factor: float, dtype_name: str, max_shard_size_bytes: int
) -> str:
    """Writes the merged weights as safetensors and their index; returns the dtype's name.

    Raises: UserError when a weight that the adapter changes is not in the base.
    """
    places, stored = {}, {}  # weight → its file; dtype → bytes, as the base is stored
    sizes = {}
    for file in sorted(base_dir.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                part = weights.get_slice(name)
                places[name] = file
                sizes[name] = math.prod(part.get_shape())
                stored[part.get_dtype()] = stored.get(part.get_dtype(), 0) + sizes[name]
    missing = sorted(set(deltas) - set(places))
    if missing:
        raise UserError(
            f"{len(missing)} of {len(deltas)} weights that the adapter changes are not in {base_dir}, first {missing[0]}; "
            "it was trained on another architecture, or the base stores its weights under other names"
        )
    if dtype_name == "auto":
        dtype_name = STORED_DTYPES.get(max(stored, key=stored.get), "bfloat16")
    dtype = getattr(torch, dtype_name)

    groups, total = [[]], 0
    for name in places:
        size = sizes[name] * dtype.itemsize
        if groups[-1] and total + size > max_shard_size_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    weight_map = {}
    for number, names in enumerate(groups, start=1):
        part = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        save_file(
            {name: merged_weight(places[name], name, deltas.get(name), factor, dtype) for name in names},
            str(directory / part),
            metadata={"format": "pt"},
        )
        os.chmod(directory / part, directory.stat().st_mode & 0o666)  # safetensors makes files only for their owner
        weight_map.update(dict.fromkeys(names, part))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values()) * dtype.itemsize}, "weight_map": weight_map}
        artifacts.write_json(directory / "model.safetensors.index.json", index)
    return dtype_name


def merged_weight(
    file: Path, name: str, pair: tuple[Tensor, Tensor] | None, factor: float, dtype: torch.dtype
) -> Tensor:
    """One weight of the base, with scaling · B A added in float32 when the adapter changes it. Raises: UserError."""
    with safe_open(str(file), framework="pt") as weights:
        weight = weights.get_tensor(name)
    if pair is not None:
        a, b = (side.float() for side in pair)
        if weight.shape != (b.shape[0], a.shape[1]):
            raise UserError(
                f"the adapter changes a {b.shape[0]} × {a.shape[1]} weight, but {name} is {tuple(weight.shape)}"
            )
        weight = weight.float() + factor * (b @ a)
    return weight.to(dtype).contiguous() if weight.is_floating_point() else weight


def write_configs(base_dir: Path, directory: Path, tokenizer, dtype: str) -> None:
    """Writes config.json with the new dtype, generation_config.json and the tokenizer with its chat template.

    Generation ends at what ended it in the base and at the tokenizer's end of turn, which the adapter learnt to write.
    """
    settings = artifacts.read_json(base_dir / "config.json")
    settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = dtype
    artifacts.write_json(directory / "config.json", settings)
    path = base_dir / "generation_config.json"
    generation = artifacts.read_json(path) if path.is_file() else {"_from_model_config": True}
    stops = generation.get("eos_token_id", settings.get("eos_token_id"))
    stops = stops if isinstance(stops, list) else [stops]
    generation["eos_token_id"] = list(dict.fromkeys(s for s in (*stops, tokenizer.eos_token_id) if s is not None))
    artifacts.write_json(directory / "generation_config.json", generation)
    tokenizer.save_pretrained(str(directory))
    for file in base_dir.glob("*.py"):  # code of models that need trust_remote_code
        shutil.copy(file, directory)


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


def check_hub() -> None:
    """Refuses an upload that cannot work before anything is computed. Raises: UserError."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError("push_to_hub needs the network, but HF_HUB_OFFLINE is set; unset it, or leave push_to_hub out")
    if not get_token():
        raise UserError(f"push_to_hub needs a token for {constants.ENDPOINT}; run `hf auth login` or export HF_TOKEN")


def upload(directory: Path, repository: str, private: bool) -> None:
    """Uploads a directory to the hub that HF_ENDPOINT names. Raises: RunFailed, leaving the directory as it is."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=str(directory), commit_message="Add the merged model"
        )
    except (*HfHubHTTPError.__bases__, OSError) as error:  # whichever HTTP library this version of the hub uses
        raise RunFailed(
            f"{repository} could not be uploaded to {api.endpoint}: {str(error).strip().splitlines()[0]}. The merged model is "
            f"complete in {directory}; `hf upload {repository} {directory}` tries the upload alone"
        ) from error
    print(f"Uploaded to {commit.commit_url}")


if __name__ == "__main__":
    errors.run(main)
