"""The model: frozen base, LoRA adapter, attention over packed rows, and its loss as one module."""

import bisect
import contextlib
import copy
import errno
import itertools
import json
import math
import os
import re
from pathlib import Path

import torch
import transformers
from accelerate import init_empty_weights
from packaging.version import Version
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)  # fmt: skip
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from sft import schemas
from sft.artifacts import read_json
from sft.attention import register_packed_sdpa
from sft.device import flash_ignores_windows, is_out_of_memory
from sft.dropout import DropoutRows
from sft.errors import UserError
from sft.loss import chunked_token_nll, token_nll
from sft.tokenizer import BEFORE_5, explained_loading

# Models whose logits are exactly `lm_head(last hidden state)`, so that they may be computed in chunks. Others scale or
# cap them (Gemma, Cohere, Granite …) and go through their own forward.
PLAIN_HEAD = {"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "smollm3", "olmo2", "internlm2"}
ALL_LINEAR = "all-linear"  # as PEFT calls it
DTYPE_ARGUMENT = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def load_config(name_or_path: str, trust_remote_code: bool = False):
    """The model's configuration, with what transformers 5 writes into rope_parameters where transformers 4 reads it.

    Raises: UserError when it cannot be found, or when transformers 4 would leave something out silently.
    """
    with explained_loading("model_name_or_path", name_or_path), explained_damage(name_or_path):
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise UserError(
            f"model_name_or_path {name_or_path} is quantised ({method}); adapters are trained on and merged into the "
            "unquantised model: give that one"
        )
    rope = dict(getattr(config, "rope_parameters", None) or {}) if BEFORE_5 else {}
    if rope:
        if "rope_theta" not in rope:
            raise UserError(
                f"model_name_or_path {name_or_path} was saved by transformers 5 with rope_parameters that transformers "
                f"{transformers.__version__} cannot read; save it with an older one, or use requirements.txt"
            )
        config.rope_theta = rope.pop("rope_theta")
        config.partial_rotary_factor = rope.pop("partial_rotary_factor", 1.0)
        config.rope_scaling = None if rope["rope_type"] == "default" else rope
    return config


def load_base(
    name_or_path: str,
    dtype: torch.dtype,
    device: torch.device | None = None,
    attn_implementation: str = "packed_sdpa",
    trust_remote_code: bool = False,
    empty: bool = False,
) -> PreTrainedModel:
    """The base model with every weight frozen, its shards read straight to `device` in `dtype`.

    empty: weights stay on the meta device until `weights.fill_from_disk` reads each rank's part of them.
    Raises: UserError when it cannot be found, or when its attention has features that the implementation would ignore.
    """
    register_packed_sdpa()
    config = load_config(name_or_path, trust_remote_code)
    check_attention(config, attn_implementation)
    with explained_loading("model_name_or_path", name_or_path), explained_damage(name_or_path):
        arguments = {
            "attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code, DTYPE_ARGUMENT: dtype
        }  # fmt: skip
        if empty:
            with init_empty_weights(include_buffers=False):  # buffers are computed, not stored
                model = AutoModelForCausalLM.from_config(config, **arguments)
            model.tie_weights()
            with contextlib.suppress(OSError):  # from_config knows the end of an answer by config.json alone
                model.generation_config = GenerationConfig.from_pretrained(name_or_path)
        else:
            # By name: of a torch.device transformers 4.55 hands only the index on, and torch 2.1 takes 0 for a CUDA card.
            placement = {"device_map": {"": str(device)}} if device is not None and device.type != "cpu" else {}
            model, report = AutoModelForCausalLM.from_pretrained(
                name_or_path, config=config, use_safetensors=True, output_loading_info=True, **arguments, **placement
            )
    if not empty and report["missing_keys"]:  # transformers draws them at random, and says so in passing
        raise UserError(
            f"model_name_or_path {name_or_path} lacks {len(report['missing_keys'])} weights of its model, first "
            f"{min(report['missing_keys'])}; copy or download it again"
        )
    model.requires_grad_(False)
    model.config.use_cache = False
    return model


def text_config(config):
    """The language model's part of a configuration; a model that also sees or hears has several."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


@contextlib.contextmanager
def explained_damage(name_or_path: str):
    """Turns what transformers raises for a config.json or weights that do not fit or are damaged into a sentence.

    Raises: UserError.
    """
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        SafetensorError,
        TypeError,
    ) as error:
        if is_out_of_memory(error):
            raise
        for file in Path(name_or_path).glob("*.safetensors"):
            if file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
                raise UserError(f"{file} is a pointer of git-lfs, not the weights; run `git lfs pull` there") from error
        words = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        raise UserError(
            f"model_name_or_path {name_or_path} could not be loaded ({words}); its config.json does not fit its weights, "
            "or a file is damaged; copy or download it again"
        ) from error


def check_attention(config, attn_implementation: str) -> None:
    """Refuses attention features that would be ignored silently: scores with a soft cap, attention sinks, and a
    sliding window where the card's flash attention drops it.

    Raises: UserError naming the feature.
    """
    if getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"{config.model_type} caps its attention scores (attn_logit_softcapping), which packed training would ignore"
        )
    if config.model_type == "gpt_oss":
        raise UserError("gpt_oss has attention sinks, which packed training would ignore; choose another base model")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if attn_implementation == "flash_attention_2" and window and flash_ignores_windows():
        raise UserError(
            f"{config.model_type} uses a sliding window of {window} tokens, which flash_attention_2 on this card ignores; "
            "use attn_implementation: packed_sdpa"
        )


def generation_attention() -> str:
    """The attention for generation over left-padded rows; transformers wants torch 2.1.1 for its sdpa."""
    return "sdpa" if Version(torch.__version__).release >= (2, 1, 1) else "eager"


def language_linears(base: PreTrainedModel) -> tuple[list[str], str | None, str | None]:
    """Names of the language model's linear layers without the head; the head's name; and, where the model has others
    beside (for images, for sound), a regular expression of all that is neither."""
    linear = {name: module for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    head = next((name for name, module in linear.items() if module is base.get_output_embeddings()), None)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    inside = next((f"{name}." for name, module in base.named_modules() if name and module is decoder), "")
    names = [name for name in linear if name.startswith(inside) and name != head]
    beside = len(names) + (head is not None) < len(linear)
    return names, head, rf"(?!{re.escape(inside)}|{re.escape(head or '')}$).*" if beside else None


def add_lora(
    base: PreTrainedModel, r: int, alpha: int, dropout: float, target_modules: list[str], seed: int
) -> PeftModel:
    """`base` with a new LoRA adapter (Hu et al. 2021): A drawn from `seed` on the CPU, B zero, both fp32.

    target_modules: names of linear layers of the language model, or all-linear: all of them but the head. What a model
    has for images or sound beside it stays as it is.
    Raises: UserError when no layer has one of the names, when one is the tied head, or when PEFT refuses one.
    """
    names, head, others = language_linears(base)
    known = {name.rsplit(".", 1)[-1] for name in (*names, head) if name}
    missing = [name for name in target_modules if name.rsplit(".", 1)[-1] not in known]
    if missing and target_modules != [ALL_LINEAR]:
        raise UserError(
            f"target_modules: {', '.join(missing)} not in this model; its linear layers are {', '.join(sorted(known))}; "
            f"{ALL_LINEAR}, given alone, means all of them but the head"
        )
    if head in target_modules and base.get_output_embeddings().weight is base.get_input_embeddings().weight:
        raise UserError(
            f"target_modules: {head} shares its weights with the embedding in this model, so that an adapter on it could "
            "not be merged or served; leave it out"
        )
    config = LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, task_type="CAUSAL_LM", bias="none", exclude_modules=others,
        target_modules=ALL_LINEAR if target_modules == [ALL_LINEAR] else list(target_modules),
    )  # fmt: skip
    try:
        model = get_peft_model(base, config)
    except ValueError as error:
        raise UserError(f"target_modules: {' '.join(target_modules)} cannot be adapted: {error}") from error
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in trainable_parameters(model).items():
        start = torch.zeros(parameter.shape, device="cpu")
        if "lora_A" in name:  # PEFT's distribution, but a function of the seed alone, whatever holds the base's weights
            start.uniform_(-1 / math.sqrt(parameter.shape[1]), 1 / math.sqrt(parameter.shape[1]), generator=draw)
        place(model, name, start)
    return model


def place(model: torch.nn.Module, name: str, value: Tensor) -> None:
    """Makes `value` the parameter of that name, on the device where it is now; on the CPU when that is none (meta)."""
    module, _, kind = name.rpartition(".")
    before = model.get_parameter(name)
    parameter = torch.nn.Parameter(value.to("cpu" if before.is_meta else before.device))
    setattr(model.get_submodule(module), kind, parameter)


def load_adapter(base: PreTrainedModel, name_or_path: str, trainable: bool = False) -> PeftModel:
    """`base` with the adapter of a directory or hub name; safetensors only, nothing is unpickled.

    Raises: UserError when it is missing, when it was pickled, or when its tensors do not fit this base.
    """
    if (Path(name_or_path) / "adapter_config.json").is_file():
        read_json(Path(name_or_path) / "adapter_config.json", schemas.ADAPTER)
    with explained_loading("adapter", name_or_path):
        config = PeftConfig.from_pretrained(name_or_path)
    if Path(name_or_path).is_dir() and not (Path(name_or_path) / "adapter_model.safetensors").is_file():
        raise UserError(
            f"adapter {name_or_path} has no adapter_model.safetensors; pickled adapters (.bin) are not loaded, as "
            "unpickling runs code: convert it with PEFT's save_pretrained on a machine you trust"
        )
    with explained_loading("adapter", name_or_path):
        try:
            model = PeftModel.from_pretrained(
                base, name_or_path, is_trainable=trainable, config=config, use_safetensors=True
            )
            if next(base.parameters()).is_meta:  # PEFT has put the adapter there as well, which loses its values
                stored = load_peft_weights(name_or_path, device="cpu")
                for name in trainable_parameters(model):
                    place(model, name, stored[name.replace(".default.", ".")].float())
            return model
        except SafetensorError as error:
            raise UserError(
                f"adapter {name_or_path}: adapter_model.safetensors is damaged ({error}); copy it again, or take the one in "
                "the run's newest checkpoint"
            ) from error
        except RuntimeError as error:
            if "size mismatch" not in str(error):  # of load_state_dict; others, as out of memory, say what they are
                raise
            raise UserError(
                f"adapter {name_or_path} does not fit the base model: {str(error).splitlines()[-1].strip()}"
            ) from error


def adapted_modules(model: PeftModel) -> set[str]:
    """Names, as the base has them, of the layers that carry the adapter."""
    names = (name for name, _ in model.get_base_model().named_modules())
    return {name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")}


def beyond_plain_lora(config: PeftConfig) -> dict:
    """What an adapter has that plain LoRA (Hu et al. 2021) has not, by PEFT's name; none of it is trained or merged here."""
    if not isinstance(config, LoraConfig):
        return {"peft_type": str(config.peft_type)}
    fields = ("use_dora", "use_rslora", "use_qalora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
              "modules_to_save", "layer_replication", "target_parameters", "trainable_token_indices")  # fmt: skip
    found = {name: getattr(config, name, None) for name in fields}
    found["bias"] = None if config.bias == "none" else config.bias
    return {name: value for name, value in found.items() if value}


class TargetLoss(torch.nn.Module):
    """A causal language model and its loss as one module, so that DDP and FSDP see one forward that returns the loss.

    forward: the tensors of `batching.collate` → nats per target token, (n,) float32.
    """

    def __init__(self, model: torch.nn.Module, chunk_tokens: int = 1024, dropout: DropoutRows | None = None):
        super().__init__()
        self.model = model
        self.dropout = dropout
        self.chunk_tokens = chunk_tokens
        self.packs, self.sharded = True, False  # `packing.choose_forward` asks the model itself
        kinds = {type(module).__name__ for module in self.causal.modules()}
        # Tells FSDP which modules are the layers; a text model may list those of the images it was released with.
        self._no_split_modules = [name for name in self.causal._no_split_modules or () if name in kinds]
        # Keeps DDP from sending the frozen weights from rank 0 to all, for which it copies them: every rank has read them,
        # and on the CPU the ranks of a server share the file's pages (torch, nn/parallel/distributed.py).
        named = [*self.named_parameters(), *self.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = [name for name, tensor in named if not tensor.requires_grad]

    @property
    def causal(self) -> PreTrainedModel:
        """The causal language model inside the adapter."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def answer(self, **arguments):
        """The language model's own output, for generation."""
        return self.causal(**arguments)

    def forward(
        self,
        input_ids: Tensor,  # (1, T) int64: rows one after another, no padding between them
        position_ids: Tensor,  # (1, T) int64: from 0 in each row
        target_positions: Tensor,  # (n,) int64: where in T a target token is predicted
        target_ids: Tensor,  # (n,) int64: the tokens that follow there
        segment_lengths: tuple[int, ...],  # tokens per row, sum T
        cu_seq_lens: Tensor,  # (rows + 1,) int32: running sum of segment_lengths, for varlen kernels
        counted: bool = True,  # False: no rows, the nats of the target count for nothing
    ) -> Tensor:
        if not self.packs:
            nll = self.rows_alone(input_ids, target_positions, target_ids, segment_lengths)
            return nll if counted else nll * 0
        if self.dropout:
            self.dropout.pack(segment_lengths)
        longest = max(segment_lengths)
        arguments = {
            "input_ids": input_ids, "position_ids": position_ids, "segment_lengths": segment_lengths,
            "cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens, "max_length_q": longest, "max_length_k": longest,
        }  # fmt: skip
        nll = self.nll(arguments, target_positions, target_ids)
        return nll if counted else nll * 0

    def nll(self, arguments: dict, target_positions: Tensor, target_ids: Tensor) -> Tensor:
        """Nats per target token, (n,) float32, of one call of the language model."""
        if self.causal.config.model_type in PLAIN_HEAD:
            hidden = self.causal.base_model(**arguments, use_cache=False).last_hidden_state[0, target_positions]
            return chunked_token_nll(hidden, self.causal.get_output_embeddings(), target_ids, self.chunk_tokens)
        logits = self.causal(**arguments, use_cache=False, logits_to_keep=target_positions).logits[0]
        return token_nll(logits, target_ids)

    def rows_alone(
        self, input_ids: Tensor, target_positions: Tensor, target_ids: Tensor, segment_lengths: tuple[int, ...]
    ) -> Tensor:
        """What `forward` returns, by one call of the language model per row, as if there were no others."""
        positions, parts, start, first = target_positions.tolist(), [], 0, 0
        for number, end in enumerate(itertools.accumulate(segment_lengths)):
            if self.dropout and self.training:
                self.dropout.begin_row(number)
            last = bisect.bisect_left(positions, end)
            parts.append(
                self.nll(
                    {"input_ids": input_ids[:, start:end]}, target_positions[first:last] - start, target_ids[first:last]
                )
            )
            start, first = end, last
        if self.sharded:  # each call gathers the layers' weights: all ranks have to make as many
            most = torch.tensor(float(len(parts)), device=input_ids.device)
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
            while len(parts) < most.item():
                parts.append(self.nll({"input_ids": input_ids[:, :1]}, target_positions[:0], target_ids[:0]))
        return torch.cat(parts)


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """(trainable, total) numbers of weights."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trainable in sizes if trainable), sum(n for n, _ in sizes)


def held_parameters(model: torch.nn.Module) -> int:
    """Number of weights that this rank holds itself: all of them, or its shard's."""
    return sum(local_part(p).numel() for p in model.parameters())


def local_part(tensor: Tensor) -> Tensor:
    """What this rank itself holds of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add in front (DDP, TargetLoss) or in the middle (checkpoint wrapper)."""
    for part in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(part, "")
    return name[name.index("base_model.") :] if "base_model." in name else name


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded over ranks (then a collective: call it on every rank), on the CPU."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def local_value(scalar: Tensor) -> Tensor:
    """A scalar that every rank holds, as a plain tensor on its device (a sharded model's gradient norm is a DTensor)."""
    return scalar.full_tensor() if hasattr(scalar, "full_tensor") else scalar


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters by plain name, in model order, which is the same on every rank."""
    return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def adapter_tensors(model: torch.nn.Module, peft_model: PeftModel) -> dict[str, Tensor]:
    """The adapter as PEFT stores it: names without the adapter's own, whole tensors on CPU. Call it on every rank."""
    whole = {n: full_tensor(p).contiguous() for n, p in peft_model.named_parameters() if p.requires_grad}
    # PEFT looks tensors up by the wrapped names and would leave them in the file.
    tensors = {plain_name(n): t for n, t in get_peft_model_state_dict(peft_model, state_dict=whole).items()}
    if len(tensors) != len(whole):
        raise RuntimeError(f"PEFT kept {len(tensors)} of {len(whole)} adapter tensors; a wrapper changed their names")
    return tensors


def write_adapter(directory: Path, tensors: dict[str, Tensor], peft_model: PeftModel) -> None:
    """Writes adapter_config.json and adapter_model.safetensors and reads back that every tensor is there.

    Raises: RuntimeError when the file lacks one (PEFT has been seen to write an adapter of zero tensors under FSDP).
    """
    config = copy.copy(peft_model.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(str(directory))
    path = directory / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["target_modules"] = sorted(settings["target_modules"])  # PEFT writes a set, in no particular order
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    file = directory / "adapter_model.safetensors"
    write_tensors(file, tensors)
    file.chmod(path.stat().st_mode & 0o777)  # safetensors makes files that only their owner may read
    verify_adapter(file, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file. Raises: OSError with number and file, in place of the library's own error for a full disk."""
    try:
        save_file(tensors, str(file), metadata={"format": "pt"})
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))  # as Rust prints what the system said
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(error), str(file)) from error


def verify_adapter(file: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Compares the names and shapes in a safetensors file with the expected ones. Raises: RuntimeError."""
    with safe_open(str(file), framework="pt") as tensors:
        found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if not expected or found != expected:
        wrong = sorted(set(expected) ^ set(found)) or [n for n in expected if expected[n] != found[n]]
        raise RuntimeError(
            f"{file} holds {len(found)} tensors, expected {len(expected)}; first difference: {wrong[:1]}"
        )


def read_adapter(file: Path, peft_model: PeftModel) -> None:
    """Loads adapter tensors written by `write_adapter` into the model. Raises: RuntimeError when one is missing."""
    tensors = load_file(str(file))
    expected = get_peft_model_state_dict(peft_model)
    if set(tensors) != set(expected):
        raise RuntimeError(f"{file} holds {len(tensors)} tensors, the model's adapter has {len(expected)}")
    set_peft_model_state_dict(peft_model, tensors)
