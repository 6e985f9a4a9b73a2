"""Which card this process computes on, and what differs between vendors. Nothing else in the package names one."""

import ctypes
import gc
import os
import platform
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import psutil

from sft.artifacts import library_versions
from sft.environment import NPU_ENVIRONMENT, npu_environment
from sft.errors import RunFailed, UserError
from sft.masking import mask_variables
from sft.simulation import is_simulated_home

Result = TypeVar("Result")

# Read when the first communicator or matrix product of a process is made (HCCL and NCCL docs, "Environment variables";
# cuBLAS docs, "Results reproducibility"): sums over ranks and inside a product in an order that is always the same.
DETERMINISTIC_ENVIRONMENT = {"HCCL_DETERMINISTIC": "true", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
REFUSED_PARALLELISM = {  # reproduced in docs/parallelism.md
    "TP": "tensor parallelism is not supported; use dp_shard_size (FSDP) instead",
    "CP": "context parallelism computes wrong logits; set it to 1 and shorten max_length, or use more FSDP cards",
    "SP": "sequence parallelism needs DeepSpeed, which is not supported; set it to 1",
}
HCCL_EXEC_TIMEOUT_DEFAULT_S = 1836  # HCCL docs: how long a started collective waits for its peers


def set_environment_defaults() -> None:
    """Sets what has to be in the environment before torch is imported; call it first thing in a script."""
    for name, value in npu_environment(library_versions().get("torch_npu")).items():
        os.environ.setdefault(name, value)


def check_mixed_precision() -> None:
    """Refuses half precisions that need a loss scaler, before anything is loaded. Raises: UserError."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked not in ("no", "bf16"):
        raise UserError(
            f"the launch configuration says mixed_precision: {asked}, for which this training has no loss scaler: one "
            "overflow would end it; choose bf16, or no on cards without it (accelerate launch --mixed_precision no wins "
            "over the file)"
        )


def make_deterministic() -> None:
    """Has torch and the communication libraries give the same bits for the same work; call it before `start`."""
    import torch

    os.environ.update(DETERMINISTIC_ENVIRONMENT)
    torch.use_deterministic_algorithms(True)


def follow_launcher() -> None:
    """Has the kernel send this rank SIGTERM when torchrun or Accelerate, which started it, dies: nobody else would tell.

    Call it before anything slow. In training the signal saves and stops, before that it ends the process, so that no
    orphan keeps a card or a run directory. Linux only (prctl(2), PR_SET_PDEATHSIG = 1).
    """
    launched = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()  # set by one or the other
    if launched and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@dataclass(frozen=True)
class Promise:
    """What the launch configuration said would run: `kind` is "npu", "cpu" or "accelerator" (any card)."""

    source: str
    kind: str
    num_processes: int | None


def launch_promise() -> Promise | None:
    """What `accelerate launch` was asked for, read from the command line of the launching process.

    The launcher does not hand the kind of device on to its children: with an NPU configuration and no usable NPU it
    starts CPU processes that know nothing of each other (accelerate 1.15, utils/launch.py). None when this process
    was started in another way (plain python, torchrun, a notebook).
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    for parent in psutil.Process().parents():
        try:
            words = parent.cmdline()
            folder = parent.cwd()
        except psutil.Error:
            continue
        launch = [
            i for i, word in enumerate(words[:6]) if word == "launch" or word.endswith(("accelerate-launch", ".launch"))
        ]
        if not launch or "accelerate" not in " ".join(words[: launch[0] + 1]):
            continue
        arguments, _ = launch_command_parser().parse_known_args(words[launch[0] + 1 :])
        path = os.path.join(folder, arguments.config_file) if arguments.config_file else default_config_file
        settings = load_config_from_file(path) if os.path.isfile(path) and not arguments.cpu else None
        kind = "accelerator"
        if arguments.cpu or (settings and (settings.use_cpu or settings.distributed_type == "MULTI_CPU")):
            kind = "cpu"
        elif settings and settings.distributed_type == "MULTI_NPU" and not arguments.multi_gpu:
            kind = "npu"
        processes = arguments.num_processes or (settings.num_processes if settings else None)
        source = arguments.config_file or (default_config_file if settings else "accelerate launch")
        return Promise(source, kind, processes)
    return None


def _why_no_card() -> str:
    from accelerate.utils import is_npu_available

    if "torch_npu" not in library_versions():
        return "torch_npu is not installed in this environment (pip install -r requirements-npu.txt)"
    if os.environ.get("ASCEND_RT_VISIBLE_DEVICES") == "":
        return "ASCEND_RT_VISIBLE_DEVICES is set to nothing, which hides every card"
    if not os.environ.get("ASCEND_HOME_PATH"):
        return "CANN's set_env.sh was not sourced (ASCEND_HOME_PATH is not set)"
    if not is_npu_available():
        return "torch_npu is installed but finds no card"
    return "the cards are there"


def check_launch(promise: Promise | None, device_type: str, num_processes: int) -> None:
    """Refuses a start in which ranks would not know of each other, or on another kind of device than was promised.

    Raises: UserError naming what was expected, what was found, the likely reason and the remedy.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != num_processes:
        raise UserError(
            f"the launcher started {started} processes but this one joined a group of {num_processes}: each would "
            f"train alone and overwrite the other; no usable accelerator was found ({_why_no_card()}); "
            "for a CPU run use accelerate_configs/cpu_2.yaml"
        )
    if promise is None:
        return
    if promise.kind == "npu" and device_type != "npu":
        raise UserError(
            f"{promise.source} promises Ascend NPUs but the device found is {device_type}: {_why_no_card()}; "
            "`python doctor.py` tests the installation; to train on CPU use accelerate_configs/cpu_1.yaml or cpu_2.yaml"
        )
    if promise.kind == "accelerator" and device_type == "cpu":
        raise UserError(
            f"{promise.source} does not ask for the CPU (use_cpu: true) but no accelerator was found "
            f"({_why_no_card()}); `python doctor.py` tests the installation; to train on CPU use "
            "accelerate_configs/cpu_1.yaml or cpu_2.yaml"
        )
    if promise.num_processes and promise.num_processes != num_processes:
        raise UserError(
            f"{promise.source} promises {promise.num_processes} processes but {num_processes} started: with "
            "distributed_type MULTI_CPU Accelerate starts one process and leaves the others to mpirun; use "
            "accelerate_configs/cpu_2.yaml, or distributed_type MULTI_GPU with use_cpu: true"
        )


def start(
    ddp_timeout: int = HCCL_EXEC_TIMEOUT_DEFAULT_S + 24, trackers: tuple[str, ...] = (), project_dir: str | None = None
):
    """The `Accelerator` of this process, on the device and in the group that the launch configuration promised.

    ddp_timeout: seconds after which a collective that does not complete is an error.
    Raises: UserError when the group or the device is not the promised one (`check_launch`), or when the time-out does
    not exceed HCCL's own, which would make torch_npu replace it.
    """
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import PartialState
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
        ProjectConfiguration,
        patch_environment,
    )

    promise = launch_promise()
    use_cpu = promise.kind == "cpu" if promise else not any_card()
    if not use_cpu and promise and not any_card():
        check_launch(promise, "cpu", int(os.environ.get("WORLD_SIZE", "1")))
    if not use_cpu:
        check_cards(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # Not Accelerate's own cpu:N, to which `.to` copies a model whose pages the ranks would else share; and torch 2.1 has no
    # torch.cpu.set_device, which Accelerate would call (accelerate 1.15, state.py).
    with patch_environment(**({"ACCELERATE_TORCH_DEVICE": "cpu"} if use_cpu else {})):
        state = PartialState(cpu=use_cpu, timeout=timedelta(seconds=ddp_timeout))
    check_launch(promise, state.device.type, state.num_processes)
    if not (state.is_main_process and sys.stderr.isatty()):
        from transformers.utils import logging

        logging.disable_progress_bar()
    if state.device.type == "npu":
        _prepare_npu(ddp_timeout)
    project = ProjectConfiguration(project_dir=project_dir, logging_dir=project_dir) if project_dir else None
    return Accelerator(
        cpu=use_cpu,
        fsdp_plugin=sharding_plugin(state),
        log_with=[name for name in trackers if name != "none"] or None,
        project_config=project,
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
        kwargs_handlers=[
            # Every trainable weight gets a gradient, buffers never change: no search, no broadcast per forward.
            DistributedDataParallelKwargs(find_unused_parameters=False, broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=ddp_timeout)),
        ],
    )  # fmt: skip


def end(accelerator) -> None:
    """Ends trackers and process group. The caller must not hold the prepared model any more.

    DDP's reducer must be gone before: when it is the last to hold a gloo group, its destructor waits, with Python's lock
    in hand, for the group's thread, which may want that lock to free its last tensor. The process then hangs after its
    work is done (torch 2.13, c10d::Reducer and ProcessGroupGloo::runLoop; one of 40 short runs on busy cores).
    """
    gc.collect()
    accelerator.end_training()


def sharding_plugin(state):
    """Accelerate's FSDP2 plugin when the launch configuration asks for sharding, else None.

    Raises: UserError for kinds of sharding that are known to lose or bend results.
    """
    sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) for name in ("TP", "CP", "SP")}
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        sizes = {}
    for name, size in sizes.items():
        if size > 1:
            raise UserError(f"parallelism_config_{name.lower()}_size is {size}: {REFUSED_PARALLELISM[name]}")
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if torch_version() < (2, 6):  # accelerate 1.15, constants.FSDP2_PYTORCH_VERSION
        raise UserError(
            "the launch configuration asks for FSDP, which needs torch 2.6 or newer, and this is torch "
            f"{library_versions()['torch']}; use a configuration without it (every card then holds the whole base)"
        )
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("fsdp_version is 1, under which PEFT saves adapters without a tensor; set fsdp_version: 2")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise UserError("fsdp_offload_params is true, which is not supported; set it to false and use more cards")
    layers = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")  # the wizard writes '' for Enter (accelerate 1.15)
    if layers is not None and not all(name.strip() for name in layers.split(",")):
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap is {layers!r}, which names no layer; delete that line of the launch "
            "configuration: the model's own decoder layers are then taken"
        )
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if state.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise UserError(
            f"the launch configuration asks for FSDP on the CPU, for which torch {library_versions()['torch']} is too old; "
            "use a configuration without it, or the torch of requirements.txt"
        )
    if state.device.type == "cpu" and state.use_distributed:
        # Accelerate shards on cards only and would run DDP here without a word (accelerate 1.15, state.py).
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # ranks read their own shards instead (sft/weights.py)
    return FullyShardedDataParallelPlugin(
        cpu_ram_efficient_loading=False,
        # Accelerate's own policy would add up gradients and return the loss in half precision.
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=getattr(torch, half), reduce_dtype=torch.float32)
        if half
        else MixedPrecisionPolicy(),
    )


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    major, minor = library_versions()["torch"].split(".")[:2]
    return int(major), int(minor)


def store_has(store, key: str) -> bool:
    """Whether a store of torch.distributed holds that key."""
    if torch_version() >= (2, 6):
        return store.check([key])
    try:  # torch 2.1 does not hand `check` to Python
        store.wait([key], timedelta(milliseconds=10))
    except RuntimeError:
        return False
    return True


def any_card() -> bool:
    """Whether an NPU or a CUDA card can be used by this process."""
    import torch
    from accelerate.utils import is_npu_available

    return is_npu_available() or torch.cuda.is_available()


def check_cards(processes: int) -> None:
    """Refuses more processes on this server than cards that they see. Raises: UserError."""
    import torch
    from accelerate.utils import is_npu_available

    cards = torch.npu.device_count() if is_npu_available() else torch.cuda.device_count()
    if processes > cards:
        names = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        shown = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        raise UserError(
            f"{processes} processes on this server but {cards} {'card is' if cards == 1 else 'cards are'} visible"
            f"{f' ({shown})' if shown else ''}; make as many visible, or give accelerate launch --num_processes {cards}"
        )


def _prepare_npu(ddp_timeout: int) -> None:
    import torch

    # Kernels come from the shipped library instead of being compiled per shape (torch_npu docs, set_compile_mode).
    torch.npu.set_compile_mode(jit_compile=False)
    given = os.environ.get("HCCL_EXEC_TIMEOUT") or str(HCCL_EXEC_TIMEOUT_DEFAULT_S)
    if not given.isdecimal():
        raise UserError(
            f"HCCL_EXEC_TIMEOUT is {given}; expected whole seconds, for example {HCCL_EXEC_TIMEOUT_DEFAULT_S}"
        )
    exec_timeout = int(given)
    if ddp_timeout <= exec_timeout:
        raise UserError(
            f"ddp_timeout is {ddp_timeout} s but HCCL_EXEC_TIMEOUT is {exec_timeout} s; torch_npu wants the first above "
            f"the second: set ddp_timeout to at least {exec_timeout + 24}, or export a smaller HCCL_EXEC_TIMEOUT"
        )


def base_dtype(requested: str, device):
    """The torch dtype of the frozen base weights. "auto": bfloat16 where the card computes it, float32 elsewhere.

    On CPUs without bf16 units a bf16 matrix product is a hundred times slower than an fp32 one, so "auto" never picks
    it there. Raises: UserError when bfloat16 is asked of a card that lacks it (Ascend910A, CUDA before Ampere).
    """
    import torch

    supported = device.type != "cpu" and getattr(torch, device.type).is_bf16_supported()
    if requested == "auto":
        return torch.bfloat16 if supported else torch.float32
    if requested == "bfloat16" and not supported and device.type != "cpu":
        raise UserError(f"dtype is bfloat16 but {device_name(device)} has no bf16 units; use dtype: float32")
    return getattr(torch, requested)


def describe_precision(base, accelerator) -> str:
    """What is kept and computed in which type, in words. base: the torch dtype of the frozen weights."""
    kept = f"base weights {str(base).removeprefix('torch.')}, adapter and loss float32"
    if accelerator.mixed_precision == "no":
        return f"{kept}, products in the type of their weights"
    more = "; for float32 give accelerate launch --mixed_precision no" if str(base) == "torch.float32" else ""
    return f"{kept}, all products in bfloat16 (mixed_precision: {accelerator.mixed_precision} of the launch{more})"


def device_name(device) -> str:
    """The card's model name, for people."""
    import torch

    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return getattr(torch, device.type).get_device_name(device)


def synchronize(device) -> None:
    """Waits until the card has done all that it was given."""
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def peak_memory_bytes(device) -> int:
    """Most memory in use at once so far: allocated on the card, or on CPU the resident set of the process."""
    import torch

    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return getattr(torch, device.type).max_memory_allocated(device)


def memory_bytes(device) -> int:
    """All of a card's memory."""
    import torch

    return getattr(torch, device.type).get_device_properties(device).total_memory


def is_sharded(accelerator) -> bool:
    """Whether each rank holds a part of the weights only (FSDP2)."""
    return accelerator.is_fsdp2


def is_simulated(device) -> bool:
    """Whether CANN here is the test suite's simulation, which marks its home directory. Never a run on hardware."""
    return device.type == "npu" and is_simulated_home(os.environ.get("ASCEND_HOME_PATH"))


def describe(accelerator) -> dict:
    """What the run is made on, for environment.json. One object collective: call it on every rank."""
    import torch
    from accelerate.utils import gather_object

    mine = {"rank": accelerator.process_index, "host": socket.gethostname(), "device": str(accelerator.device)}
    ranks = gather_object([mine])
    return {
        "device": str(accelerator.device),
        "device_name": device_name(accelerator.device),
        "backend": backend(),
        "distributed_type": str(accelerator.distributed_type.value),
        "world_size": accelerator.num_processes,
        "ranks": ranks,
        "simulated": is_simulated(accelerator.device),
        "mixed_precision": accelerator.mixed_precision,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "variables": mask_variables(
            {
                name: os.environ[name]
                for name in sorted(os.environ)
                if name.startswith(
                    ("HCCL_", "NCCL_", "PYTORCH_", "ASCEND_RT_", "CUDA_VISIBLE", "OMP_NUM", "ACCELERATE_")
                )
                or name in {**NPU_ENVIRONMENT, **DETERMINISTIC_ENVIRONMENT}
            }
        ),
        "versions": library_versions(),
    }


def backend() -> str | None:
    """The communication backend of the process group; None for one process alone."""
    import torch.distributed

    return torch.distributed.get_backend() if torch.distributed.is_initialized() else None


def run_on_main(accelerator, function: Callable[[], Result]) -> Result:
    """What `function` returned on the main process, on every rank; what it raised there ends every rank, with its cause.

    One object collective. The only place where ranks learn what the main process alone can see: the run directory may
    lie on a disk of the first server.
    """
    from accelerate.utils import broadcast_object_list

    outcome, error = [None, None, None], None
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except Exception as raised:
            error = raised
            outcome = [None, str(raised) or type(raised).__name__, isinstance(raised, UserError)]
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome, from_process=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise UserError(outcome[1]) if outcome[2] else RunFailed(outcome[1])
    return outcome[0]


def run_on_all(function: Callable[[], Result]) -> Result:
    """What `function` returned on this rank; a UserError on any rank is raised on all, as nobody waits for a rank that left.

    One object collective. Servers have disks of their own, so that one alone may lack a file.
    """
    from accelerate.utils import gather_object

    result, error = None, None
    try:
        result = function()
    except UserError as raised:
        error = str(raised)
    for rank, (host, text) in enumerate(gather_object([(socket.gethostname(), error)])):
        if text is not None:
            raise UserError(f"rank {rank} ({host}): {text}" if rank else text)
    return result


def clear_overflow(device) -> None:
    """Forgets overflows so far, where cards note them in a flag."""
    overflowed(device)


def overflowed(device) -> bool:
    """Whether a number left its type's range on this card since the last call, which clears the flag.

    Only cards that saturate instead of giving inf are asked (Ascend910A: torch_npu/npu/utils.py, is_support_inf_nan
    and get_npu_overflow_flag); there it costs one transfer to the host. On others inf and nan are in the numbers.
    """
    if device.type != "npu":
        return False
    from torch_npu.npu import utils

    if utils.is_support_inf_nan():
        return False
    found = utils.get_npu_overflow_flag()
    if found:
        utils.clear_npu_overflow_flag()
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the card's memory, or the host's on CPU, is used up."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower())
        or "can't allocate memory" in str(error)
    )


def has_fused_operators(device) -> bool:
    """Whether the card's libraries have one operator for packed attention, RMSNorm, rotary angles and SwiGLU: Atlas A2
    and A3 (torch_npu docs, "supported products" of each)."""
    return device.type == "npu" and device_name(device).startswith(("Ascend910B", "Ascend910_9"))


def has_varlen_attention(device) -> bool:
    """Whether torch itself has FlashAttention over packed rows for this card: CUDA since Ampere."""
    import torch

    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from torch.nn.attention import varlen  # noqa: F401  torch 2.10
    except ImportError:
        return False
    return True


def flash_ignores_windows() -> bool:
    """Whether the cards' flash attention drops a sliding window silently: on NPU (transformers 5.24,
    integrations/npu_flash_attention.py takes the argument and does not use it)."""
    from accelerate.utils import is_npu_available

    return is_npu_available()
