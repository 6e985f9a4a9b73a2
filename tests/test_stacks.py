"""Two stacks, one pipeline: what the oldest and the newest libraries write, the other reads, with the same numbers.

This stack is the Python that runs the tests; the other one is $OTHER_STACK, or .venv-cann8 (`make test-cann8` makes it).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sft import device
from sft.errors import UserError
from tests.conftest import ROOT, make_rows, must, once, train, write_jsonl

OTHER = Path(os.environ.get("OTHER_STACK", ROOT / ".venv-cann8" / "bin" / "python"))
STACKS = {"this": sys.executable, "other": str(OTHER)}
STEPS = 20
TRAIN = ("--max_steps", STEPS, "--save_steps", 10, "--save_total_limit", 3, "--global_batch_size", 4,
         "--learning_rate", 1e-3)  # fmt: skip
# fp32 sums in the kernels of two torch releases differ in their last digits; 20 steps at losses of about 6 move that to 1e-6.
TOLERANCE = 1e-4

MAKE_MODEL = """
import sys
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from tests import conftest
from tools import tiny
directory = Path(sys.argv[1])
directory.mkdir(parents=True)
tokenizer = tiny.save_tokenizer(directory, [text for row in conftest.make_rows(200) for text in row.values()])
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id, bos_token_id=None, rope_theta=500.0, attn_implementation="eager",
)
import torch
torch.manual_seed(0)
model = LlamaForCausalLM(config)
for parameter in model.parameters():
    parameter.data.mul_(3.0) if parameter.dim() > 1 else None
model.save_pretrained(str(directory))
"""
DESCRIBE = """
import json, sys
import torch, transformers
from sft import artifacts, modeling
from sft.tokenizer import load_tokenizer
found = {"transformers": transformers.__version__, "torch": torch.__version__}
for directory in sys.argv[1:]:
    tokenizer = load_tokenizer(directory)
    model = modeling.load_base(directory, torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(64)[None], segment_lengths=(64,)).logits
    found[directory] = {
        "tokenizer_sha256": artifacts.tokenizer_sha256(tokenizer), "template_sha256": artifacts.template_sha256(tokenizer),
        "model_sha256": artifacts.model_sha256(directory), "logits": logits[0, -1].tolist(),
    }
print(json.dumps(found))
"""


def run(stack: str, *argv) -> subprocess.CompletedProcess:
    command = [STACKS[stack], *map(str, argv)]
    return must(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300))


def opposite(stack: str) -> str:
    return "other" if stack == "this" else "this"


@pytest.fixture(scope="module")
def crossed(session_dir, tiny_model_dir) -> Path:
    """A folder where each stack made a model, a data set, a run, and then went on with what the other had made:

    model-S  saved by S                      data-S      made by S with the newest stack's model
    run-S    trained by S on data-(not S)    resumed-S   from step 10 of run-(not S), trained by S
    eval-S   run-(not S) evaluated by S      described-S.json  what S makes of the models
    """
    if not OTHER.is_file():
        reason = f"{OTHER} is not there: `make test-cann8` makes the other stack"
        pytest.fail(reason) if os.environ.get("REQUIRE_STACKS") else pytest.skip(reason)

    def make(folder: Path) -> None:
        folder.mkdir()
        source = write_jsonl(folder / "rows.jsonl", make_rows(380))
        for stack in STACKS:
            run(stack, "-c", MAKE_MODEL, folder / f"model-{stack}")
        models = [folder / f"model-{stack}" for stack in STACKS]
        for stack in STACKS:
            described = run(stack, "-c", DESCRIBE, *models, tiny_model_dir).stdout.splitlines()[-1]
            (folder / f"described-{stack}.json").write_text(described)
        model = models[0]
        for stack in STACKS:
            run(stack, "data_prep.py", "--input", source, "--model_name_or_path", model,
                "--output_dir", folder / f"data-{stack}")  # fmt: skip
        for stack in STACKS:
            run(stack, "train.py", "--model_name_or_path", model, "--dataset_dir", folder / f"data-{opposite(stack)}",
                "--output_dir", folder / f"run-{stack}", *TRAIN)  # fmt: skip
        for stack in STACKS:
            theirs = folder / f"run-{opposite(stack)}"
            run(stack, "train.py", "--model_name_or_path", model, "--dataset_dir", folder / f"data-{stack}",
                "--output_dir", folder / f"resumed-{stack}", "--resume_from_checkpoint", theirs / "checkpoint-10",
                *TRAIN)  # fmt: skip
            run(stack, "eval.py", "--run_dir", theirs, "--output_dir", folder / f"eval-{stack}",
                "--max_new_tokens", 8)  # fmt: skip
            shutil.rmtree(theirs / "eval", ignore_errors=True)

    return once(session_dir / "crossed-stacks", make)


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def described(crossed: Path) -> tuple[dict, dict]:
    return read(crossed / "described-this.json"), read(crossed / "described-other.json")


@pytest.mark.skipif(device.torch_version() >= (2, 6), reason="this torch has FSDP2: tests/test_fsdp.py")
def test_sharding_is_refused_with_an_older_torch(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"asks for FSDP, which needs torch 2\.6 or newer, and this is torch 2\.1\.0"):
        device.sharding_plugin(state=None)


@pytest.mark.skipif(
    device.torch_version() != (2, 6), reason="newer ones can: tests/test_fsdp.py; older ones have no FSDP2"
)
def test_sharding_on_the_cpu_is_refused_with_torch_2_6(tmp_path, tiny_model_dir, dataset_dir):
    refused = train("cpu_2_fsdp", tiny_model_dir, dataset_dir, tmp_path / "run")
    assert "error: the launch configuration asks for FSDP on the CPU, for which torch 2.6.0" in refused.stderr
    assert refused.returncode and not (tmp_path / "run").exists()


def test_the_stacks_are_two(crossed):
    this, other = described(crossed)
    assert (this["torch"], this["transformers"]) != (other["torch"], other["transformers"])


@pytest.mark.parametrize("saver", STACKS)
def test_a_saved_model_is_the_same_to_both_stacks(crossed, saver):
    """transformers 5 writes tokenizer classes and rope_parameters that 4.55 does not know."""
    this, other = (found[next(key for key in found if key.endswith(f"model-{saver}"))] for found in described(crossed))
    assert {k: v for k, v in this.items() if k != "logits"} == {k: v for k, v in other.items() if k != "logits"}
    assert this["logits"] == pytest.approx(other["logits"], abs=TOLERANCE)


def test_a_tokenizer_that_the_stacks_read_differently_has_two_hashes(crossed, tiny_model_dir):
    """transformers 5 puts Qwen2's own normalizer and pre-tokenizer in place of those in this model's tokenizer.json."""
    this, other = described(crossed)
    same_library = this["transformers"].split(".")[0] == other["transformers"].split(".")[0]
    this, other = this[str(tiny_model_dir)], other[str(tiny_model_dir)]
    assert (this["tokenizer_sha256"] == other["tokenizer_sha256"]) == same_library
    assert this["template_sha256"] == other["template_sha256"]


def test_both_stacks_make_the_same_data_set(crossed):
    this, other = (read(crossed / f"data-{stack}" / "manifest.json") for stack in STACKS)
    hashes = [key for key in this if key.endswith("_sha256")]
    assert sorted(hashes) == [
        "dataset_sha256", "source_sha256", "split_sha256", "template_sha256", "tokenizer_sha256"
    ]  # fmt: skip
    assert {key: this[key] for key in hashes} == {key: other[key] for key in hashes}
    assert this["versions"] != other["versions"]


def test_both_stacks_train_with_the_same_losses(crossed):
    this, other = losses(crossed / "run-this"), losses(crossed / "run-other")
    assert list(this) == list(other) == list(range(1, STEPS + 1))
    assert list(this.values()) == pytest.approx(list(other.values()), abs=TOLERANCE)
    assert this[1] - this[STEPS] > 0.1  # something was learnt, so that equality says something


@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_goes_on_from_the_checkpoint_of_the_other(crossed, stack):
    resumed, unbroken = losses(crossed / f"resumed-{stack}"), losses(crossed / f"run-{stack}")
    assert list(resumed) == list(range(11, STEPS + 1))
    assert [resumed[step] for step in resumed] == pytest.approx([unbroken[step] for step in resumed], abs=TOLERANCE)


@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_evaluates_the_adapter_of_the_other(crossed, stack):
    report = read(crossed / f"eval-{stack}" / "report.json")
    trained = read(crossed / f"run-{opposite(stack)}" / "summary.json")
    assert report["adapter"]["loss"] == pytest.approx(trained["eval_loss"], abs=TOLERANCE)
    assert report["rows"] == 19
