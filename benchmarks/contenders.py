"""The jobs that step_time.py and startup.py compare: `train.py`, TRL's SFTTrainer, and a plain DDP loop.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/contenders.py ours|trl|plain --…

Each trains the same rows, step for step, with the same adapter shape, optimizer and learning rate. With
BENCHMARK_ADDRESS in the environment every step waits for its turn; without it the job runs through.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.measure import Turns, peak_memory_bytes  # noqa: E402
from sft import device, errors  # noqa: E402
from sft.config import option, parse  # noqa: E402

TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]
IGNORED = -100


@dataclass
class JobConfig:
    """What all jobs are told."""

    model_name_or_path: str = option(help="base model")
    dataset_dir: str = option(help="data set made by data_prep.py")
    output_dir: str = option(help="a directory to write to")
    global_batch_size: int = option(4, "rows per step over all ranks, one row per micro-batch")
    steps: int = option(8, "optimizer steps")
    max_length: int = option(512, "what the padded loop pads to")
    learning_rate: float = option(1e-3, "constant")


class FreeRun:
    """Stands for `Turns` when no benchmark is there to give orders: prints when each step ended."""

    def wait(self) -> str:
        return "step"

    def done(self, **record) -> None:
        print(f"step done at {time.time():.3f}, peak memory {peak_memory_bytes()}", flush=True)


def turns() -> Turns | FreeRun:
    return Turns() if "BENCHMARK_ADDRESS" in os.environ else FreeRun()


def rows_in_order(job: JobConfig):
    """The training rows in the order in which `train.py` takes them, for one rank and micro-batches of one row."""
    from sft.batching import BatchPlan
    from sft.dataset import Dataset

    rows = Dataset(job.dataset_dir, ("train",)).train
    plan = BatchPlan(rows["length"], rows["target_tokens"], 42, 1, job.global_batch_size, 1)
    return rows.select([row for step in range(job.steps) for row in plan.rows(step)])


def ours(job: JobConfig) -> None:
    """`train.py` as it is. It waits for its turn before the loop and each time it has recorded a step."""
    line = turns()
    sys.argv = ["train.py", *map(str, (
        "--model_name_or_path", job.model_name_or_path, "--dataset_dir", job.dataset_dir, "--output_dir", job.output_dir,
        "--global_batch_size", job.global_batch_size, "--max_steps", job.steps, "--learning_rate", job.learning_rate,
        "--lr_scheduler_type", "constant", "--warmup_ratio", 0, "--eval_on_start", "false", "--eval_steps", 10**6,
        "--save_steps", 10**6, "--report_to", "none", "--overwrite_output_dir",
    ))]  # fmt: skip
    device.set_environment_defaults()
    import train

    loop, record = train.train, train.Run.record
    products: list = []
    batches = None

    def loop_in_turns(run, loader, *rest):
        nonlocal batches
        batches = TimedLoader(loader)
        line.wait()
        return loop(run, batches, *rest)

    def record_and_wait(run, step, loss, *rest):
        record(run, step, loss, *rest)
        line.done(loss=float(loss), data_s=batches.take_seconds())
        if step == run.total_steps:
            return
        while line.wait() == "floor":
            line.done(**time_products(run, step, products))

    train.train, train.Run.record = loop_in_turns, record_and_wait
    train.main()


class TimedLoader:
    """Batches, and how long they kept the loop waiting."""

    def __init__(self, loader):
        self.loader, self.seconds = loader, 0.0

    def __iter__(self):
        batches = iter(self.loader)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def take_seconds(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def time_products(run, step: int, linears: list) -> dict:
    """Seconds of all matrix products of a step on this rank, nothing else: {"linear": …, "attention": …}.

    The shapes are those of the step's own micro-batches. Linear layers: y = x Wᵀ, the gradient of x (not where nothing
    below is trained) and of the adapter's W; the head at target positions. Attention: the two products of each row and
    head and their four gradients, full squares.
    """
    import torch

    config = run.learner.peft_model.config
    causal = run.learner.peft_model.get_base_model()
    if not linears:
        head = causal.get_output_embeddings()
        modules = [(name, m) for name, m in causal.named_modules() if isinstance(m, torch.nn.Linear)]
        modules = [(name, m) for name, m in modules if not hasattr(m, "base_layer")]
        for name, m in modules:
            first = (
                ".layers.0.self_attn." in f".{name}" and not name.endswith("lora_B.default") and ".o_proj" not in name
            )
            linears.append((m.weight.detach(), m.weight.requires_grad, not first, m is head))
    rank = run.accelerator.process_index
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seconds = {"linear": 0.0, "attention": 0.0}
    with torch.no_grad():
        for micro_batch in run.plan.layout(step - 1):
            rows = micro_batch[rank]
            tokens, targets = int(run.plan.lengths[rows].sum()), int(run.plan.target_tokens[rows].sum())
            widths = {size for weight, *_ in linears for size in weight.shape}
            data = {width: torch.randn(tokens, width) for width in widths}
            started = time.perf_counter()
            for weight, trained, grad_of_input, is_head in linears:
                x, g = (data[width][:targets] if is_head else data[width] for width in reversed(weight.shape))
                torch.nn.functional.linear(x, weight)
                if grad_of_input:
                    g @ weight
                if trained:
                    g.t() @ x
            seconds["linear"] += time.perf_counter() - started
            for length in run.plan.lengths[rows].tolist():
                a, b = torch.randn(2, config.num_attention_heads, length, head_dim)
                square = torch.randn(config.num_attention_heads, length, length)
                flipped, across = square.transpose(1, 2), b.transpose(1, 2)
                started = time.perf_counter()
                for _ in range(config.num_hidden_layers):
                    a @ across, square @ b, a @ across, flipped @ b, square @ b, flipped @ a
                seconds["attention"] += time.perf_counter() - started
    return seconds


def trl(job: JobConfig) -> None:
    """TRL's SFTTrainer on the same tokens and labels, everything else as TRL has it unless it would be slower here."""
    line = turns()
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class InTurns(TrainerCallback):
        losses: list = []  # noqa: RUF012 -- filled by the trainer's log

        def on_train_begin(self, *_, **__):
            line.wait()

        def on_log(self, args, state, control, logs=None, **__):
            if "loss" in (logs or {}):
                line.done(loss=float(logs["loss"]))
                if state.global_step < job.steps:
                    line.wait()

    datasets.disable_caching()  # TRL maps its rows, and would leave the result in the directory that they came from
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = SFTConfig(
        output_dir=job.output_dir, max_steps=job.steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=job.global_batch_size // ranks, learning_rate=job.learning_rate,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        train_sampling_strategy="sequential", max_length=job.max_length, seed=42, disable_tqdm=True,
        # Defaults that would slow TRL down on a CPU: bf16 products, recomputation, pinned memory.
        bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
        model_init_kwargs={"dtype": torch.float32},
    )  # fmt: skip
    trainer = SFTTrainer(
        model=job.model_name_or_path,
        args=arguments,
        train_dataset=rows_in_order(job).select_columns(["input_ids", "labels"]),
        processing_class=AutoTokenizer.from_pretrained(job.model_name_or_path),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=TARGET_MODULES, task_type="CAUSAL_LM"),
        callbacks=[InTurns()],
    )
    trainer.train()


def plain(job: JobConfig) -> None:
    """The loop that one writes by hand with Accelerate; on the order "padded" a step is padded to max_length."""
    line = turns()
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(42)
    model = AutoModelForCausalLM.from_pretrained(job.model_name_or_path, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGET_MODULES, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    rows = rows_in_order(job).with_format("torch", columns=["input_ids", "labels"])
    ranks, accumulation = accelerator.num_processes, job.global_batch_size // accelerator.num_processes
    step = 0
    while step < job.steps:
        order = line.wait()
        losses = []
        for index in range(accumulation):
            row = rows[step * job.global_batch_size + index * ranks + accelerator.process_index]
            extra = max(0, job.max_length - len(row["input_ids"])) if order == "padded" else 0
            pad = torch.nn.functional.pad
            last = index + 1 == accumulation
            with torch.enable_grad() if last else accelerator.no_sync(model):
                loss = model(
                    input_ids=pad(row["input_ids"], (0, extra))[None],
                    attention_mask=pad(torch.ones_like(row["input_ids"]), (0, extra))[None],
                    labels=pad(row["labels"], (0, extra), value=IGNORED)[None],
                ).loss
                accelerator.backward(loss / accumulation)
            losses.append(loss.item())
        if order == "step":  # a padded one has the same gradient and is only timed
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        optimizer.zero_grad()
        mean = accelerator.gather(torch.tensor(losses)).mean()
        line.done(loss=float(mean))
    del model, optimizer
    device.end(accelerator)


def main() -> None:
    kind = sys.argv.pop(1)
    {"ours": ours, "trl": trl, "plain": plain}[kind](parse(JobConfig, description=__doc__))


if __name__ == "__main__":
    errors.run(main)
