"""Families of chat models, each as a tiny random checkpoint: rows packed where the model allows it, alone where not."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel

import data_prep
import export
from sft import modeling, packing, weights
from sft.batching import collate
from sft.errors import UserError
from tests import families
from tests.conftest import adapter, assert_same_numbers, losses, numbers, once
from tests.test_fsdp import launch_environment
from tools.tiny import make_rows, write_jsonl
from tools.warm import WarmServer

# Layers that mix tokens otherwise than by attention see across rows, or refuse rows that share a forward.
ALONE = {"lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1", "qwen3_next", "qwen3_5", "llama4"}


@pytest.fixture(scope="session")
def family_dir(session_dir):
    """Makes the checkpoint of a family, once per test session."""
    texts = [text for row in make_rows(200) for text in row.values()]
    return lambda name: once(session_dir / f"family-{name}", lambda path: families.save(name, path, texts))


@pytest.fixture(scope="session")
def family_data(session_dir, family_dir):
    """Prepares 60 rows for a family, whose tokenizer transformers may set up in a way of its own."""

    def make(name: str):
        def prepare(path) -> None:
            data_prep.main(
                ["--input", str(write_jsonl(session_dir / f"family-{name}.jsonl", make_rows(60))), "--output_dir", str(path),
                 "--model_name_or_path", str(family_dir(name)), "--eval_fraction", "0.1"]
            )  # fmt: skip

        return once(session_dir / f"family-{name}-data", prepare)

    return make


def make_rows_of_ids(count: int) -> list[dict]:
    draw = np.random.default_rng(5)
    lengths = draw.integers(9, 40, count)
    rows = [draw.integers(3, 300, length) for length in lengths]
    return [{"input_ids": ids, "labels": np.where(np.arange(len(ids)) < 5, -100, ids)} for ids in rows]


class Rows(list):
    """As much of a `datasets.Dataset` as the probe reads."""

    def __getitem__(self, key):
        return [len(row["input_ids"]) for row in self] if key == "length" else super().__getitem__(key)


def plain_nll(directory, row: dict) -> torch.Tensor:
    """Nats of a row's targets by transformers alone, eager attention, nothing of ours."""
    model = load_plain(directory)
    ids = torch.tensor(row["input_ids"])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return nll[torch.tensor(row["labels"][1:] != -100)]


def load_plain(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(directory), attn_implementation="eager", dtype="float32").eval()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_rows_of_a_micro_batch_have_the_loss_of_each_row_alone(name, family_dir, capsys):
    directory = family_dir(name)
    rows = Rows(make_rows_of_ids(4))
    model = modeling.TargetLoss(modeling.load_base(str(directory), torch.float32)).train()
    packing.choose_forward(model, Accelerator(cpu=True), rows)
    said = capsys.readouterr().out
    assert model.packs == (name not in ALONE) and model.training
    assert ("one row per forward" in said) == (name in ALONE)
    with torch.no_grad():
        found = model.eval()(**collate(rows))
    expected = torch.cat([plain_nll(directory, row) for row in rows])
    assert len(found) == sum(len(row["input_ids"]) - 5 for row in rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # float32, sums in another order


def test_rows_longer_than_the_model_has_positions_are_refused():
    config = SimpleNamespace(model_type="llama", max_position_embeddings=64)
    packing.check_positions(config, 64)
    with pytest.raises(UserError, match="longest row has 65 tokens, and llama has 64 positions .* --max_length 64"):
        packing.check_positions(config, 65)
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    packing.check_positions(config, 256)


def test_rows_that_meet_what_the_probe_does_not_are_not_packed():
    config = SimpleNamespace(attention_chunk_size=40, max_position_embeddings=4096)
    assert [packing.changes_with_length(config, longest) for longest in (40, 41)] == [False, True]
    config = SimpleNamespace(max_position_embeddings=4096)
    config.rope_scaling = {"type": "longrope", "original_max_position_embeddings": 100}
    assert [packing.changes_with_length(config, longest) for longest in (100, 101)] == [False, True]


def test_the_tolerance_follows_the_rounding_of_this_model():
    """bf16 has 7 bits after the leading one: a unit of 2^-7 = 0.0078125."""
    assert packing.tolerance(0.0, [torch.float32]) == 1e-4
    assert packing.tolerance(1.0, [torch.float32]) == 1e-3
    assert packing.tolerance(0.0, [torch.float32, torch.bfloat16]) == 4 * 2**-7
    assert packing.tolerance(0.05, [torch.bfloat16]) == pytest.approx(0.2)
    assert packing.tolerance(9.0, [torch.bfloat16]) == 64 * 2**-7


def test_a_base_that_holds_nan_is_named_before_training(family_dir):
    model = modeling.TargetLoss(modeling.load_base(str(family_dir("llama")), torch.float32))
    with torch.no_grad():
        model.model.model.layers[0].self_attn.q_proj.weight[3, 3] = float("nan")
    with pytest.raises(UserError, match="not finite before any training: the base model or the adapter holds NaN"):
        packing.choose_forward(model, Accelerator(cpu=True), Rows(make_rows_of_ids(2)))


@pytest.fixture(scope="module")
def start(warm_server, family_dir, family_data):
    """Runs train.py on a family for four steps at global batch 8, several rows a micro-batch, and returns its output."""

    def run(name: str, run_dir, *argv, config: str = "cpu_1", processes: int = 1) -> str:
        status, output = warm_server.run(
            "--model_name_or_path", family_dir(name), "--dataset_dir", family_data(name), "--output_dir", run_dir,
            "--global_batch_size", 8, "--per_device_train_batch_size", 2, "--max_steps", 4, "--learning_rate", "1e-2",
            "--report_to", "none", *argv, processes=processes, env=launch_environment(config), timeout_s=300,
        )  # fmt: skip
        assert status == 0, output[-6000:]
        return output

    return run


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "gemma3", "qwen3_moe"])
def test_families_train_alike_on_one_process_two_and_sharded(name, start, tmp_path):
    """Ranks whose rows go alone make different numbers of calls; a model that sees has weights that text leaves alone;
    experts are stored one by one and held in one tensor."""
    targets = ["--target_modules", "q_proj", "v_proj"]
    for config, processes in (("cpu_1", 1), ("cpu_2", 2), ("cpu_2_fsdp", 2)):
        if config == "cpu_2_fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
            continue  # as in test_fsdp.py
        output = start(name, tmp_path / config, *targets, config=config, processes=processes)
        assert ("one row per forward" in output) == (name in ALONE)
        assert_same_numbers(tmp_path / "cpu_1", tmp_path / config)
        assert held_out(tmp_path / config) == pytest.approx(held_out(tmp_path / "cpu_1"), rel=1e-5)
    assert not [tensor for tensor in adapter(tmp_path / "cpu_1") if "vision" in tensor]
    if name in ALONE:
        start(name, tmp_path / "small", *targets, "--per_device_train_batch_size", 1)
        assert_same_numbers(tmp_path / "cpu_1", tmp_path / "small")


def held_out(run_dir) -> list[float]:
    found = [record["eval_loss"] for record in numbers(run_dir) if "eval_loss" in record]
    assert len(found) == 2
    return found


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_stored_weight_is_found_under_the_models_own_names(name, family_dir):
    """Independent: what transformers itself loads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = family_dir(name)
    files = weights.places(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(str(directory)), attn_implementation="eager"
        )
    known = weights.sources(model, files)
    expected = dict(load_plain(directory).named_parameters())  # a tied head is left out
    assert len(expected) >= 14 and set(expected) <= set(known)
    for parameter, value in expected.items():
        assert torch.equal(known[parameter].read(files, model, parameter), value), parameter


def test_all_linear_is_every_linear_layer_of_the_language_model_but_the_head(family_dir):
    for name, count in (("qwen2", 14), ("gemma3", 14), ("phi3", 8), ("granitemoehybrid", 10)):
        model = modeling.add_lora(
            modeling.load_base(str(family_dir(name)), torch.float32), 8, 16, 0.0, ["all-linear"], 0
        )
        adapted = modeling.adapted_modules(model)
        assert len(adapted) == count and not [module for module in adapted if "vision" in module or "head" in module]
    with pytest.raises(UserError, match="all-linear cannot be adapted: .* 'out_proj' is incompatible with Mamba"):
        modeling.add_lora(
            modeling.load_base(str(family_dir("falcon_h1")), torch.float32), 8, 16, 0.0, ["all-linear"], 0
        )


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {"phi3": ["qkv_proj", "o_proj"], "lfm2": ["q_proj", "k_proj", "v_proj", "out_proj"],
           "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}  # fmt: skip
TARGETS |= {"qwen3_5": ["all-linear"], "granitemoehybrid": ["all-linear"], "gemma3": ["all-linear"]}


@pytest.fixture(scope="module")
def warm_eval():
    """Starts eval.py as `warm_server` starts train.py."""
    with WarmServer("eval.py") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_goes_from_rows_to_a_merged_model(name, family_dir, start, warm_eval, tmp_path, monkeypatch):
    """data_prep, training on two processes with a stop in the middle, eval and export; the merged model is what PEFT
    makes of base and adapter. FAMILIES_OUTCOMES names a file for the outcomes, of which docs/models.md is made."""
    run_dir, merged = tmp_path / "run", tmp_path / "merged"
    targets = TARGETS.get(name, ATTENTION)
    flags = ["--target_modules", *targets]
    start(name, run_dir, *flags, "--stop_at_step", 2, config="cpu_2", processes=2)
    output = start(name, run_dir, *flags, config="cpu_2", processes=2)
    assert "after step 2 of 4" in output and len(losses(run_dir)) == 4
    assert sum(tensor.abs().sum() > 0 for tensor in adapter(run_dir).values()) == len(adapter(run_dir)) > 0
    status, output_of_eval = warm_eval.run(
        "--run_dir", run_dir, "--limit", 3, "--max_new_tokens", 8, timeout_s=300, env=launch_environment("cpu_2")
    )
    assert status == 0, output_of_eval[-6000:]
    report = json.loads((run_dir / "eval" / "report.json").read_text())
    assert report["base"]["loss"] != report["adapter"]["loss"]
    monkeypatch.setattr("sys.argv", ["export.py", "--run_dir", str(run_dir), "--output_dir", str(merged)])
    export.main()
    exported = json.loads((merged / "export.json").read_text())

    ids = torch.arange(3, 60)[None]
    plain = PeftModel.from_pretrained(load_plain(family_dir(name)), str(run_dir)).eval()
    with torch.no_grad():
        expected = plain(input_ids=ids, use_cache=False).logits
        found = load_plain(merged)(input_ids=ids, use_cache=False).logits
        unchanged = load_plain(family_dir(name))(input_ids=ids, use_cache=False).logits
    scale = expected.abs().max()
    assert (found - expected).abs().max() < 1e-4 * scale < (expected - unchanged).abs().max()  # rounding of float32

    outcome = {
        "family": name, "class": families.FAMILIES[name][0], "targets": targets, "packed": name not in ALONE,
        "adapted": exported["merged_weights"], "first_loss": losses(run_dir)[0], "last_loss": losses(run_dir)[-1],
        "largest_error": exported["verified"]["largest_error"],
    }  # fmt: skip
    assert ("one row per forward" in output) == (name in ALONE)
    if path := os.environ.get("FAMILIES_OUTCOMES"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")
