"""Runs the reference fine-tuning on this machine and leaves evidence: reproduction.md and reproduction.json.

    python -m tools.reproduce --model_name_or_path Qwen/Qwen2.5-7B-Instruct --cards 1,2

The doctor, collectives, data, the reference run on each number of cards, equality of card counts, evaluation. A step that
fails is recorded with the doctor's explanation and the others go on. The same command again repeats only what is missing.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from doctor.explanations import explain  # noqa: E402
from sft.errors import UserError, run  # noqa: E402
from tools.reproduction_report import render  # noqa: E402

COMPARED_STEPS = 20  # of the runs that are compared step by step
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


@dataclass
class Step:
    """One command of the reproduction."""

    name: str
    command: list[str]
    needs: list[str] = field(default_factory=list)  # steps without which it makes no sense
    timeout_s: float = 6 * 3600


def main() -> None:
    settings = parse_arguments()
    output = Path(settings.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    results = {}
    for step in plan_steps(settings):
        results[step.name] = run_step(step, output, results)
        write_reproduction(settings, output, results)
    print(f"\n{output / 'reproduction.md'}", flush=True)
    failed = [name for name, result in results.items() if result["status"] != "done"]
    if failed:
        print(f"not done: {', '.join(failed)}; mend the cause and run the same command again", flush=True)
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default="Qwen/Qwen2.5-7B-Instruct", help="hub name or local directory")
    parser.add_argument(
        "--cards", default="1,2", help="numbers of cards (of processes on the CPU), first the reference"
    )
    parser.add_argument("--kind", choices=("auto", "npu", "cuda", "cpu"), default="auto", help="where to run")
    parser.add_argument("--input", default="data/ascend_qa_zh.jsonl", help="question-answer pairs")
    parser.add_argument("--output_dir", default="outputs/reproduce", help="where everything goes")
    parser.add_argument("--max_steps", type=int, help="shorten the reference run (for a test of the machinery)")
    parser.add_argument("--eval_rows", type=int, help="answer so many held-out rows (default: all)")
    settings = parser.parse_args()
    try:
        settings.cards = sorted({int(count) for count in settings.cards.split(",")})
    except ValueError:
        raise UserError(f"--cards {settings.cards}: give numbers, for example 1,2,8") from None
    if min(settings.cards) < 1:
        raise UserError(f"--cards {settings.cards[0]}: give numbers from 1 on, for example 1,2,8")
    if settings.kind == "auto":
        settings.kind = find_kind()
    return settings


def find_kind() -> str:
    """The kind of card that torch sees, asked in a process of its own: a broken installation must not end this one."""
    code = (
        "import torch; npu = hasattr(torch, 'npu') and torch.npu.is_available(); "
        "print('npu' if npu else 'cuda' if torch.cuda.is_available() else 'cpu')"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = asked.stdout.strip().splitlines()
    # Where torch cannot even be imported the doctor says why; an Ascend tree means that NPUs were meant.
    return said[-1] if asked.returncode == 0 and said else "npu" if Path("/usr/local/Ascend").is_dir() else "cpu"


def launch(kind: str, cards: int, *script: str, fp32: bool = False) -> list[str]:
    """The command that starts a script on so many cards of a kind."""
    config = ROOT / "accelerate_configs" / f"{kind}_{1 if cards == 1 else 8 if kind == 'cuda' else 2}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    if cards > 1:
        command += ["--num_processes", str(cards), "--main_process_port", "0"]
    return [*command, *(["--mixed_precision", "no"] if fp32 else []), *script]


def plan_steps(settings: argparse.Namespace) -> list[Step]:
    """All steps, in order."""
    output, kind, model = Path(settings.output_dir), settings.kind, settings.model_name_or_path
    dataset, small, small_dataset = (str(output / name) for name in ("dataset", "small-model", "small-dataset"))
    config = ROOT / "accelerate_configs" / f"{kind}_{1 if settings.cards[-1] == 1 else 8 if kind == 'cuda' else 2}.yaml"
    python = sys.executable
    steps = [Step("doctor", [python, "doctor.py", "--json", "--accelerate_config", str(config)], timeout_s=900)]
    for cards in settings.cards:
        if cards > 1:
            steps.append(
                Step(f"collectives-{cards}", launch(kind, cards, "doctor.py", "--collectives"), timeout_s=1800)
            )
    prepare = [python, "data_prep.py", "--input", settings.input, "--model_name_or_path"]
    steps.append(Step("data", [*prepare, model, "--output_dir", dataset]))
    steps.append(Step("small-model", [python, "-m", "tools.reproduce", "make-small-model", model, small]))
    steps.append(Step("small-data", [*prepare, small, "--output_dir", small_dataset], ["small-model"]))
    training = ["--report_to", "none", "--dataset_dir"]
    short = ["--max_steps", str(COMPARED_STEPS), "--eval_on_start", "false", "--learning_rate", "1e-3"]
    for cards in settings.cards:
        batch = ["--global_batch_size", str(max(4, cards))]
        for suffix, flags in (("", []), ("-deterministic", ["--deterministic", "true"])):
            small_run = ["--model_name_or_path", small, "--dtype", "float32", *training, small_dataset]
            name = f"small-{cards}{suffix}"
            small_run += [*short, *batch, *flags, "--output_dir", str(output / name)]
            command = launch(kind, cards, "train.py", *small_run, fp32=True)
            steps.append(Step(name, command, ["small-data"]))
    for cards in settings.cards:
        batch = ["--global_batch_size", str(max(4, cards))]
        reference = ["--config", "configs/qwen2.5-7b.yaml", "--model_name_or_path", model, *training, dataset, *batch]
        reference += ["--dtype", "float32"] if kind == "cpu" else []
        length = ["--max_steps", str(settings.max_steps)] if settings.max_steps else []
        for suffix, flags in (("", length), ("-deterministic", ["--deterministic", "true", *short[:4]])):
            name = f"reference-{cards}{suffix}"
            command = launch(kind, cards, "train.py", *reference, *flags, "--output_dir", str(output / name))
            steps.append(Step(name, command, ["data"]))
        estimate = ["doctor.py", "--estimate", "--json", "--config", "configs/qwen2.5-7b.yaml"]
        estimate += ["--model_name_or_path", model, "--accelerate_config", launch(kind, cards)[4]]
        steps.append(Step(f"estimate-{cards}", [python, *estimate]))
    last = f"reference-{settings.cards[-1]}"
    evaluate = launch(kind, settings.cards[-1], "eval.py", "--run_dir", str(output / last))
    steps.append(
        Step("evaluation", evaluate + (["--limit", str(settings.eval_rows)] if settings.eval_rows else []), [last])
    )
    return steps


def run_step(step: Step, output: Path, results: dict) -> dict:
    """Runs one step, or takes what it left the last time. Never raises for what the command does."""
    folder = output / "steps"
    folder.mkdir(exist_ok=True)
    record, log = folder / f"{step.name}.json", folder / f"{step.name}.log"
    command_sha256 = hashlib.sha256(json.dumps(step.command).encode()).hexdigest()
    if record.is_file():
        try:
            before = json.loads(record.read_text(encoding="utf-8"))
        except ValueError:  # cut off by a kill
            before = {}
        if before.get("status") == "done" and before.get("command_sha256") == command_sha256:
            print(f"== {step.name}: done before", flush=True)
            return before
    missing = [name for name in step.needs if results.get(name, {}).get("status") != "done"]
    result = {"name": step.name, "command": step.command, "command_sha256": command_sha256, "seconds": 0.0}
    if missing:
        print(f"== {step.name}: left out, as {', '.join(missing)} failed", flush=True)
        return result | {"status": "left out", "because": missing}
    print(f"== {step.name}", flush=True)
    started = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=step.timeout_s)
        except subprocess.TimeoutExpired:
            status = "late"
        finally:  # a launcher that was interrupted may leave ranks behind: they are in its session
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text(encoding="utf-8", errors="replace")
    allowed = (0, 3) if step.name == "doctor" else (0,)  # 3: the doctor's answer is no, and it says why
    result |= {"seconds": time.perf_counter() - started, "exit_status": status, "log": str(log)}
    result["status"] = "done" if status in allowed else "failed"
    if result["status"] == "failed":
        known = explain(text)
        result["message"] = f"no end after {step.timeout_s:.0f} s" if status == "late" else known["message"]
        result["explanations"] = [{key: row[key] for key in ("id", "meaning", "check")} for row in known["failures"]]
        print(f"   failed: {result['message']}", flush=True)
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    temporary.replace(record)
    return result


def write_reproduction(settings: argparse.Namespace, output: Path, results: dict) -> None:
    """Writes both files anew after each step, so that an interruption leaves what is known so far."""
    evidence = {
        "model": settings.model_name_or_path,
        "kind": settings.kind,
        "cards": settings.cards,
        "max_steps": settings.max_steps,
        "steps": results,
    }
    text, facts = render(evidence, output)
    (output / "reproduction.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (output / "reproduction.md").write_text(text, encoding="utf-8")


def make_small_model(model: str, directory: str) -> None:
    """A random Qwen2 of about a million weights beside its embeddings, with the tokenizer of `model`, in float32."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    config = Qwen2Config(
        **SMALL, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip
    tokenizer.save_pretrained(directory)
    Qwen2ForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    if sys.argv[1:2] == ["make-small-model"]:
        run(lambda: make_small_model(*sys.argv[2:]))
    else:
        run(main)
