"""How much faster eval.py's generation answers than `generate` of transformers called row by row, on the same ranks.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/eval_speed.py \\
        --model_name_or_path models/SmolLM2-135M-Instruct

Both answer the same questions greedily with the same adapted model; rows are dealt to the ranks alike. They take turns,
so that what else the machine does meets both; the slowest rank counts.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate.utils import gather_object  # noqa: E402

from evaluation import answering  # noqa: E402
from sft import artifacts, device, encoding, errors, modeling  # noqa: E402
from sft.batching import deal_by_tokens  # noqa: E402
from sft.config import option, parse  # noqa: E402
from sft.encoding import encode_prompt  # noqa: E402
from sft.tokenizer import load_tokenizer  # noqa: E402


@dataclass
class SpeedConfig:
    """All settings of this benchmark."""

    model_name_or_path: str = option(
        "models/SmolLM2-135M-Instruct", "base model; it gets a new adapter of the usual kind"
    )
    input: str = option(str(ROOT / "data" / "ascend_qa_en.jsonl"), "jsonl file with questions")
    rows: int = option(20, "questions, taken evenly from the file")
    batch_size: int = option(16, "rows that eval.py's generation answers at once")
    max_new_tokens: int = option(64, "tokens of an answer, at most")
    rounds: int = option(3, "times that each way is measured")
    output: str = option(str(ROOT / "outputs" / "benchmarks" / "eval_speed.json"), "where the figures go")


def main() -> None:
    settings = parse(SpeedConfig, description=__doc__)
    accelerator = device.start()
    tokenizer = load_tokenizer(settings.model_name_or_path)
    base = modeling.load_base(
        settings.model_name_or_path, device.base_dtype("auto", accelerator.device), accelerator.device
    )
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = modeling.add_lora(base, 8, 16, 0.0, modules, seed=0).to(accelerator.device).eval()
    base.set_attn_implementation(modeling.generation_attention())
    stop_ids = encoding.stop_token_ids(tokenizer, base.generation_config)
    prompts = read_prompts(settings, tokenizer)
    lengths = np.array([len(prompt) for prompt in prompts])
    share = deal_by_tokens(range(len(prompts)), lengths, accelerator.num_processes, len(prompts))
    mine = [prompts[row] for row in share[accelerator.process_index]]

    def row_by_row() -> list[list[int]]:
        return [generate_one(model, prompt, settings.max_new_tokens, stop_ids) for prompt in mine]

    def batched() -> list[list[int]]:
        answers = []
        for start in range(0, len(mine), settings.batch_size):
            batch = mine[start : start + settings.batch_size]
            answers += [
                tokens
                for _, tokens in sorted(
                    answering.generate(modeling.TargetLoss(base), batch, settings.max_new_tokens, stop_ids)
                )
            ]
        return answers

    times = {"row by row": [], "eval.py": []}
    equal = tokens = 0
    for number in range(settings.rounds):
        one_by_one, seconds = measure(accelerator, row_by_row)
        times["row by row"].append(seconds)
        together, seconds = measure(accelerator, batched)
        times["eval.py"].append(seconds)
        shown = ", ".join(f"{way} {seconds[-1]:.1f} s" for way, seconds in times.items())
        accelerator.print(f"round {number + 1} of {settings.rounds}: {shown}", flush=True)
        equal = sum(gather_object([one == other for one, other in zip(one_by_one, together)]))
        tokens = sum(gather_object([len(answer) for answer in together]))
    rows_per_s = {way: len(prompts) / statistics.median(seconds) for way, seconds in times.items()}
    result = {
        "settings": asdict(settings),
        "world_size": accelerator.num_processes,
        "device_name": device.device_name(accelerator.device),
        "threads_per_rank": torch.get_num_threads(),
        "seconds": times,
        "rows_per_s": rows_per_s,
        "speedup": rows_per_s["eval.py"] / rows_per_s["row by row"],
        "tokens": tokens,
        "equal_answers": equal,
        "versions": artifacts.library_versions(),
    }
    if accelerator.is_main_process:
        artifacts.write_json(settings.output, result)
        print(
            "| way        | seconds, each round  | rows/s, median |\n| ---------- | -------------------- | -------------- |"
        )
        for way, seconds in times.items():
            print(f"| {way:10} | {' '.join(f'{one:.1f}' for one in seconds):20} | {rows_per_s[way]:14.3f} |")
        print(
            f"{result['speedup']:.1f} times as many rows per second; {equal} of {len(prompts)} answers the same, {tokens} "
            f"tokens. {settings.output}"
        )
    accelerator.end_training()


def read_prompts(settings: SpeedConfig, tokenizer) -> list[list[int]]:
    """Token ids of evenly spaced questions of the file."""
    lines = Path(settings.input).read_text(encoding="utf-8").splitlines()
    chosen = np.linspace(0, len(lines) - 1, min(settings.rows, len(lines))).astype(int)
    questions = [json.loads(lines[index])["question"] for index in chosen]
    return [encode_prompt(tokenizer, [{"role": "user", "content": question}]) for question in questions]


@torch.no_grad()
def generate_one(model, prompt: list[int], max_new_tokens: int, stop_ids: list[int]) -> list[int]:
    """The answer as `generate` of transformers gives it to one prompt."""
    input_ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, use_cache=True,
        max_new_tokens=max_new_tokens, eos_token_id=stop_ids, pad_token_id=stop_ids[0],
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def measure(accelerator, work) -> tuple[list, float]:
    """What this rank's share of the work gives, and the seconds until all ranks are done."""
    accelerator.wait_for_everyone()
    started = time.perf_counter()
    result = work()
    accelerator.wait_for_everyone()
    return result, max(gather_object([time.perf_counter() - started]))


if __name__ == "__main__":
    errors.run(main)
