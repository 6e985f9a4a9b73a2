"""train.py through the real command line: exact, the same on any number of ranks, resumable."""

import json
import re

import pytest
import torch

from tests.conftest import adapter, assert_same_numbers, launch, losses, must, numbers, run_script, train

HIDDEN = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def two_ranks_dir(tmp_path_factory, tiny_model_dir, dataset_dir):
    """The same run as tiny_run_dir by two gloo ranks with accumulation 2."""
    path = tmp_path_factory.mktemp("two") / "run"
    result = must(train("cpu_2", tiny_model_dir, dataset_dir, path))
    assert "Global batch 4 = 1 per device × 2 accumulation × 2 ranks on cpu: 91 steps an epoch" in result.stdout
    return path


def test_the_run_directory_holds_what_it_promises(tiny_run_dir):
    expected = {"adapter_config.json", "adapter_model.safetensors", "README.md", "provenance.json", "config.json",
                "environment.json", "metrics.jsonl", "loss.png", "summary.json", "checkpoint-90", "checkpoint-91"}  # fmt: skip
    found = {path.name for path in tiny_run_dir.iterdir()}
    assert expected <= found, expected - found
    summary = json.loads((tiny_run_dir / "summary.json").read_text())
    assert (summary["world_size"], summary["gradient_accumulation_steps"], summary["global_batch_size"]) == (1, 4, 4)
    assert (summary["steps"], summary["epochs"], summary["device"], summary["simulated"]) == (91, 1.0, "cpu", False)
    assert summary["trainable_parameters"] == sum(tensor.numel() for tensor in adapter(tiny_run_dir).values()) == 7168
    assert summary["eval_loss"] < summary["first_eval_loss"] and summary["last_loss"] < summary["first_loss"]


def test_an_epoch_is_91_steps_and_its_last_has_one_row(tiny_run_dir):
    rows = [record["rows"] for record in numbers(tiny_run_dir) if "rows" in record]
    assert rows == [4] * 90 + [1]


def test_two_ranks_give_the_numbers_of_one(tiny_run_dir, two_ranks_dir):
    assert_same_numbers(tiny_run_dir, two_ranks_dir)
    summary = json.loads((two_ranks_dir / "summary.json").read_text())
    assert (summary["world_size"], summary["gradient_accumulation_steps"], summary["backend"]) == (2, 2, "gloo")
    assert len(summary["peak_memory_bytes"]) == 2


def test_four_ranks_give_the_numbers_of_one(tmp_path, tiny_run_dir, tiny_model_dir, dataset_dir):
    must(train("cpu_2", tiny_model_dir, dataset_dir, tmp_path / "run", flags=["--num_processes", "4"]))
    assert_same_numbers(tiny_run_dir, tmp_path / "run")


def test_two_rows_a_micro_batch_give_the_numbers_of_one(tmp_path, tiny_run_dir, tiny_model_dir, dataset_dir):
    flags = ["--per_device_train_batch_size", "2"]
    result = must(train("cpu_2", tiny_model_dir, dataset_dir, tmp_path / "run", *flags))
    assert "Global batch 4 = 2 per device × 1 accumulation × 2 ranks" in result.stdout
    assert_same_numbers(tiny_run_dir, tmp_path / "run")


def test_first_loss_and_held_out_loss_are_those_of_plain_transformers(tiny_run_dir, tiny_model_dir, dataset_dir):
    """Σ NLL / Σ target tokens with nothing of ours: one row at a time, the model's own logits, labels shifted here."""
    import datasets
    from transformers import AutoModelForCausalLM

    from sft.batching import epoch_order

    model = AutoModelForCausalLM.from_pretrained(str(tiny_model_dir), attn_implementation="eager")

    def independent_loss(rows) -> float:
        nll, count = 0.0, 0
        for row in rows:
            with torch.no_grad():
                logits = model(torch.tensor([row["input_ids"]])).logits[0].double()
            labels = torch.tensor(row["labels"])[1:]
            keep = labels != -100
            nll -= torch.log_softmax(logits[:-1], dim=-1)[keep, labels[keep]].sum().item()
            count += int(keep.sum())
        return nll / count

    train_rows = datasets.load_from_disk(str(dataset_dir / "train"))
    first_rows = [train_rows[int(row)] for row in epoch_order(42, 0, 361)[:4]]
    assert losses(tiny_run_dir)[0] == pytest.approx(independent_loss(first_rows), rel=1e-5)
    held_out = list(datasets.load_from_disk(str(dataset_dir / "eval")))
    assert len(held_out) == 19
    assert numbers(tiny_run_dir)[0]["eval_loss"] == pytest.approx(independent_loss(held_out), rel=1e-5)


def test_the_adapter_loads_with_peft_and_has_the_last_held_out_loss(tiny_run_dir, tiny_model_dir, dataset_dir):
    import datasets
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(tiny_model_dir), attn_implementation="eager")
    model = PeftModel.from_pretrained(base, str(tiny_run_dir))
    nll, count = 0.0, 0
    for row in datasets.load_from_disk(str(dataset_dir / "eval")):
        labels = torch.tensor([row["labels"]])
        kept = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            nll += model(torch.tensor([row["input_ids"]]), labels=labels).loss.double().item() * kept
        count += kept
    summary = json.loads((tiny_run_dir / "summary.json").read_text())
    assert summary["eval_loss"] == pytest.approx(nll / count, rel=1e-5)


@pytest.mark.parametrize("config", ["cpu_1", "cpu_2"])
def test_a_stopped_run_goes_on_with_the_numbers_of_an_unbroken_one(tmp_path, tiny_model_dir, dataset_dir, config):
    """Stopped in the second epoch, with dropout: bit for bit the same metrics and adapter."""
    flags = ["--max_steps", "100", "--lora_dropout", "0.1"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    must(train(config, tiny_model_dir, dataset_dir, whole, *flags))
    stopped = must(train(config, tiny_model_dir, dataset_dir, broken, *flags, "--stop_at_step", "95"))
    assert "Stopped after step 95 of 100" in stopped.stdout
    assert not (broken / "summary.json").exists() and len(losses(broken)) == 95
    resumed = must(train(config, tiny_model_dir, dataset_dir, broken, *flags))
    assert "after step 95 of 100" in resumed.stdout
    assert numbers(broken) == numbers(whole)
    assert all(torch.equal(tensor, adapter(broken)[name]) for name, tensor in adapter(whole).items())
    again = must(train(config, tiny_model_dir, dataset_dir, broken, *flags))
    assert "is complete at step 100: nothing to do" in again.stdout


def test_base_weights_are_bit_unchanged_after_training(tmp_path, tiny_model_dir, dataset_dir):
    """Runs main() of train.py in a process of its own that keeps hold of the base model."""
    program = f"""
import sys, torch
import train
from sft import modeling
load, kept = modeling.load_base, []
modeling.load_base = lambda *args, **kwargs: kept.append(load(*args, **kwargs)) or kept[0]
sys.argv = ["train.py", "--model_name_or_path", {str(tiny_model_dir)!r}, "--dataset_dir", {str(dataset_dir)!r},
            "--output_dir", {str(tmp_path / "run")!r}, "--max_steps", "5", "--report_to", "none", "--learning_rate", "0.01"]
train.main()
fresh = load({str(tiny_model_dir)!r}, torch.float32)
after = {{name.replace(".base_layer", ""): p for name, p in kept[0].named_parameters() if "lora_" not in name}}
before = dict(fresh.named_parameters())
assert set(before) == set(after) and len(before) > 20, (len(before), len(after))
assert all(torch.equal(before[name], after[name]) and after[name].grad is None for name in before)
print("unchanged", len(before))
"""
    result = must(run_script("-c", program))
    assert "unchanged" in result.stdout


def test_the_reference_run_has_5046272_trainable_parameters():
    """Qwen2.5-7B-Instruct's published shape on the meta device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sft.modeling import add_lora, parameter_counts

    config = Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        base = Qwen2ForCausalLM(config)
        base.requires_grad_(False)
        model = add_lora(base, 8, 16, 0.0, ["q_proj", "k_proj", "v_proj", "o_proj"], seed=42)
    assert parameter_counts(model) == (5_046_272, 7_615_616_512 + 5_046_272)


def refuse(result, *words: str) -> None:
    """A user's mistake: exit status 2, one message that holds the words, no traceback."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    message = result.stderr[result.stderr.index("error: ") :]
    assert all(word in message for word in words), message


def test_wrong_use_is_one_sentence_and_writes_nothing(tmp_path, tiny_model_dir, dataset_dir, tiny_run_dir):
    """Plain `python train.py`, whose exit status is ours (accelerate launch turns any into 1)."""
    common = ["train.py", "--model_name_or_path", tiny_model_dir, "--report_to", "none"]
    out = tmp_path / "out"
    refuse(
        run_script(*common, "--dataset_dir", tmp_path / "no", "--output_dir", out), "no does not exist", "data_prep.py"
    )
    config = tmp_path / "run.yaml"
    config.write_text("lerning_rate: 1\n")
    refuse(run_script(*common, "--config", config), "unknown key 'lerning_rate'", "did you mean learning_rate?")
    ok = ["--dataset_dir", dataset_dir, "--output_dir"]
    refuse(run_script(*common, *ok, out, "--global_batch_size", 5, "--per_device_train_batch_size", 2), "4 or 6")
    refuse(run_script(*common, *ok, out, "--target_modules", "q_proj", "query"), "target_modules: query", "k_proj")
    refuse(run_script(*common, *ok, out, "--target_modules", "q_proj", "lm_head"), "lm_head shares its weights")
    refuse(run_script(*common, *ok, tmp_path), "is not empty and holds no run")
    refuse(run_script(*common, *ok, tiny_run_dir, "--global_batch_size", 4, "--seed", 1), "seed was 42, now 1")
    refuse(run_script(*common, *ok, tiny_run_dir, "--resume_from_checkpoint", "none"), "resume_from_checkpoint: auto")
    refuse(run_script(*common, *ok, out, "--resume_from_checkpoint", tmp_path / "x"), "is not a directory")
    missing = ["train.py", "--model_name_or_path", "no/such/model", "--report_to", "none", *ok, out]
    refuse(run_script(*missing), "no/such/model is not a directory")
    assert not out.exists()


def test_a_data_set_made_with_another_tokenizer_is_refused(tmp_path, tiny_model_dir, dataset_dir):
    import shutil

    other = tmp_path / "other-model"
    shutil.copytree(tiny_model_dir, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "{# changed #}")
    result = run_script(
        "train.py", "--model_name_or_path", other, "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "out"
    )
    refuse(result, "made with another template", "data_prep.py --model_name_or_path")


def test_trackers_get_the_numbers(tmp_path, tiny_model_dir, dataset_dir):
    run_dir = tmp_path / "run"
    must(train("cpu_1", tiny_model_dir, dataset_dir, run_dir, "--max_steps", 3, "--report_to", "tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (run_dir / "tensorboard").glob("*/events.out.tfevents.*")  # torch 2.1 puts settings a level deeper
    scalars = EventAccumulator(str(events.parent)).Reload().Scalars("loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3]
    assert [scalar.value for scalar in scalars] == pytest.approx(losses(run_dir), rel=1e-6)


def test_shapes_can_be_rounded_up_and_memory_spared_without_changing_the_numbers(
    tmp_path, tiny_run_dir, tiny_model_dir, dataset_dir
):
    flags = ["--pad_to_multiple_of", 32, "--gradient_checkpointing", "--loss_chunk_tokens", 7, "--stop_at_step", 20]
    must(train("cpu_1", tiny_model_dir, dataset_dir, tmp_path / "run", *flags))
    assert losses(tmp_path / "run") == pytest.approx(losses(tiny_run_dir)[:20], rel=1e-5)


def test_training_goes_on_from_an_adapter(tmp_path, tiny_run_dir, tiny_model_dir, dataset_dir):
    run_dir = tmp_path / "run"
    must(
        train(
            "cpu_1", tiny_model_dir, dataset_dir, run_dir, "--adapter_name_or_path", tiny_run_dir, "--stop_at_step", 1
        )
    )
    before = json.loads((tiny_run_dir / "summary.json").read_text())["eval_loss"]
    assert numbers(run_dir)[0]["eval_loss"] == pytest.approx(before, rel=1e-6)


def test_a_damaged_or_exchanged_data_set_is_refused(tmp_path, tiny_model_dir, dataset_dir):
    import shutil

    common = [
        "train.py",
        "--model_name_or_path",
        tiny_model_dir,
        "--report_to",
        "none",
        "--output_dir",
        tmp_path / "out",
    ]
    exchanged, damaged = tmp_path / "exchanged", tmp_path / "damaged"
    for copy in (exchanged, damaged):
        shutil.copytree(dataset_dir, copy)
    shutil.rmtree(exchanged / "train")
    shutil.copytree(dataset_dir / "eval", exchanged / "train")
    refuse(run_script(*common, "--dataset_dir", exchanged), "does not hold the rows that", "data_prep.py --overwrite")
    (file,) = (damaged / "train").glob("*.arrow")
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = b"\xff" * 4000
    file.write_bytes(content)
    refuse(run_script(*common, "--dataset_dir", damaged), "damaged", "data_prep.py --overwrite")
    assert not (tmp_path / "out").exists()


def test_settings_that_contradict_the_adapter_to_start_from_are_refused(
    tmp_path, tiny_run_dir, tiny_model_dir, dataset_dir
):
    words = ["--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "out"]
    result = run_script(
        "train.py", *words, "--adapter_name_or_path", tiny_run_dir, "--lora_r", 4, "--report_to", "none"
    )
    refuse(result, "has lora_r 8, the settings say otherwise")
    assert not (tmp_path / "out").exists()


def test_a_model_that_lacks_a_weight_is_refused(tmp_path, tiny_model_dir, dataset_dir):
    """transformers would draw it at random."""
    import shutil

    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    result = run_script(
        "train.py", "--model_name_or_path", model, "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "run",
        "--report_to", "none", "--max_steps", 1,
    )  # fmt: skip
    assert result.returncode == 2
    assert "lacks 1 weights of its model, first model.layers.1.mlp.up_proj.weight" in result.stderr


def test_no_ddp_model_is_left_when_the_process_group_ends(tmp_path, tiny_model_dir, dataset_dir):
    """Else its reducer may wait for the group's thread for ever: the run is done, and does not end."""
    result = must(
        launch("cpu_2", "-m", "tests.programs.who_holds_the_group", "--model_name_or_path", tiny_model_dir,
               "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "run", "--global_batch_size", 4, "--max_steps", 1,
               "--report_to", "none")
    )  # fmt: skip
    assert sorted(re.findall(r"rank (\d): (\d+) DDP models", result.stdout)) == [("0", "0"), ("1", "0")]
