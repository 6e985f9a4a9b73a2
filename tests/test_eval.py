"""eval.py: the same numbers whatever the ranks and batches, answers as transformers gives them, nothing scored twice."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from eval import EvalConfig, main, score_losses
from evaluation import answering
from evaluation.metrics import evaluate_generations
from evaluation.report import load_run
from sft import artifacts, device, encoding, modeling
from sft.artifacts import sha256_json
from sft.encoding import encode_dialogue, encode_dialogues, encode_prompt
from sft.errors import RunFailed, UserError
from sft.tokenizer import load_tokenizer
from tests.conftest import ENVIRONMENT, ROOT, launch, must, run_script
from tests.test_dataset import change_rows
from tools import tiny

FILES = [".lock", "differences.png", "length_loss.png", "loss.png", "predictions.jsonl", "report.html", "report.json", "report.md", "report.zh-CN.md"]  # fmt: skip
METRICS = [
    "loss", "perplexity", "exact_match", "token_f1", "rougeL", "bleu", "chrf", "stop_rate", "empty_rate", "truncated_rate",
    "repetition", "mean_length",
]  # fmt: skip


def read_report(directory) -> dict:
    return json.loads((Path(directory) / "report.json").read_text(encoding="utf-8"))


def read_predictions(directory) -> list[dict]:
    lines = (Path(directory) / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def without_times(report: dict) -> dict:
    assert report["times"].keys() == {"losses_s", "answers_s"}
    return {key: value for key, value in report.items() if key != "times"}


@pytest.fixture(scope="module")
def one_rank(tiny_run_dir, tmp_path_factory):
    """An evaluation by one process, launched as a user would: (its directory, what it printed)."""
    directory = tmp_path_factory.mktemp("one-rank") / "eval"
    result = must(launch("cpu_1", "eval.py", "--run_dir", tiny_run_dir, "--output_dir", directory))
    return directory, result.stdout


@pytest.fixture
def run_copy(tiny_run_dir, tmp_path) -> Path:
    """A run directory that a test may spoil."""
    return Path(shutil.copytree(tiny_run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("eval")))


@pytest.fixture(scope="module")
def tiny_model(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(
        str(tiny_model_dir), attn_implementation=modeling.generation_attention()
    ).eval()


@pytest.fixture(scope="module")
def tiny_gpt2():
    """A model with learned positions: counted from the wrong place they change everything, which RoPE would hide."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=600, n_positions=256, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3)
    config._attn_implementation = modeling.generation_attention()
    return GPT2LMHeadModel(config).eval()


PROMPTS = [[5, 6, 7], [40], list(range(100, 160)), [9, 8, 7, 6, 5, 4, 3], [77, 78] * 8, [11, 12, 13, 14]]


def test_report_holds_both_sides_and_their_differences(one_rank):
    directory, printed = one_rank
    report = read_report(directory)
    assert sorted(os.listdir(directory)) == FILES  # no partial results are left behind
    assert list(report["base"]) == list(report["adapter"]) == list(report["difference"]) == METRICS
    assert report["rows"] == 19 and report["warnings"] == []
    assert report["signature"]["decoding"].startswith("greedy|max_new_tokens:")
    assert "|stop:<|im_end|>|" in report["signature"]["decoding"]
    low, high = report["difference"]["loss"]["ci95"]
    assert low < report["difference"]["loss"]["mean"] < high < 0  # training helped
    assert (
        "| loss ↓" in printed and "The adapter is better in loss" in printed and str(directory / "report.md") in printed
    )


def test_adapter_loss_is_the_last_eval_loss_of_training(one_rank, tiny_run_dir):
    report = read_report(one_rank[0])
    summary = json.loads((tiny_run_dir / "summary.json").read_text())
    # Rows are packed otherwise than in training: float32 sums in another order.
    assert report["adapter"]["loss"] == pytest.approx(summary["eval_loss"], abs=1e-6)
    assert report["base"]["loss"] == pytest.approx(summary["first_eval_loss"], abs=1e-6)


def test_two_ranks_and_another_batch_size_give_the_same_report(one_rank, tiny_run_dir, tmp_path):
    must(launch("cpu_2", "eval.py", "--run_dir", tiny_run_dir, "--output_dir", tmp_path / "eval", "--batch_size", 3))
    one, two = read_report(one_rank[0]), read_report(tmp_path / "eval")
    for side in ("base", "adapter"):
        assert two[side]["loss"] == pytest.approx(one[side]["loss"], abs=1e-6)
        assert {**two[side], "loss": 0, "perplexity": 0} == {**one[side], "loss": 0, "perplexity": 0}
    texts = [[(row["id"], row["base"], row["adapter"]) for row in read_predictions(place)]
             for place in (one_rank[0], tmp_path / "eval")]  # fmt: skip
    assert texts[0] == texts[1] and len(texts[0]) == 19


@pytest.mark.skipif(
    device.torch_version() < (2, 6) or not hasattr(torch.cpu.Stream, "record_event"),
    reason="FSDP2 on the CPU needs a torch newer than 2.6",
)
def test_two_ranks_with_half_of_the_model_each_give_the_same_report(one_rank, tiny_run_dir, tmp_path):
    """Nine answers a batch, so that one rank has a batch more than the other, and ends before it."""
    arguments = ["--run_dir", tiny_run_dir, "--output_dir", tmp_path / "eval", "--batch_size", 9]
    printed = must(launch("cpu_2_fsdp", "eval.py", *arguments)).stdout
    assert "on this rank 58,144 of 116,288." in printed
    one, two = read_report(one_rank[0]), read_report(tmp_path / "eval")
    for side in ("base", "adapter"):
        assert two[side]["loss"] == pytest.approx(one[side]["loss"], abs=1e-6)
    texts = [[(row["id"], row["base"], row["adapter"]) for row in read_predictions(place)]
             for place in (one_rank[0], tmp_path / "eval")]  # fmt: skip
    assert texts[0] == texts[1] and len(texts[0]) == 19
    assert two["signature"]["decoding"] == one["signature"]["decoding"]


def test_other_files_are_sets_of_their_own_in_the_same_report(one_rank, run_copy, tmp_path):
    """One holds the held-out rows again: read from their texts, they must have the figures of the run's own."""
    again, other = tmp_path / "again.jsonl", tmp_path / "other.csv"
    rows = [{"question": row["question"], "answer": row["reference"]} for row in read_predictions(one_rank[0])]
    again.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    other.write_text(
        "instruction,output\n" + "".join(f"天空 {n}?,蓝色 {n}\n" for n in range(7)) + "no answer,\n", encoding="utf-8"
    )
    main(["--run_dir", str(run_copy), "--eval_input", str(again), str(other)])
    report, alone = read_report(run_copy / "eval"), read_report(one_rank[0])
    assert list(report["other_sets"]) == [str(again), str(other)] and alone["other_sets"] == {}
    for part in (report, report["other_sets"][str(again)]):
        assert (
            part["rows"] == 19 and part["conclusion"] == alone["conclusion"] and part["verdicts"] == alone["verdicts"]
        )
        for side in ("base", "adapter"):
            assert part[side] == pytest.approx(alone[side], abs=1e-6)
    assert report["other_sets"][str(other)]["rows"] == 7
    assert report["warnings"] == []
    lines = read_predictions(run_copy / "eval")
    assert [line.get("set") for line in lines] == [None] * 19 + [str(again)] * 19 + [str(other)] * 7
    assert len(load_run(run_copy).predictions) == 19
    for name in ("report.md", "report.html"):
        text = (run_copy / "eval" / name).read_text(encoding="utf-8")
        assert "Other sets of rows" in text and str(other) in text
    assert (run_copy / "eval" / "report.md").read_text(encoding="utf-8").count("| loss ↓") == 3


def test_killed_evaluation_goes_on_and_gives_the_same_report(one_rank, tiny_run_dir, tmp_path, capsys):
    arguments = ["--run_dir", str(tiny_run_dir), "--output_dir", str(tmp_path / "eval")]
    process = subprocess.Popen(
        ["nice", "-n", "5", sys.executable, "eval.py", *arguments],  # on busy cores the kill comes in time
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("adapter: 19 of 19 rows to answer"):
            process.kill()
            break
    errors = process.communicate()[1]
    assert process.returncode == -9, errors
    assert sorted(os.listdir(tmp_path / "eval")) == [".lock", ".partial-0.jsonl"]
    main(arguments)
    printed = capsys.readouterr().out
    assert "base: 0 of 19 rows to answer" in printed
    assert without_times(read_report(tmp_path / "eval")) == without_times(read_report(one_rank[0]))
    assert sorted(os.listdir(tmp_path / "eval")) == FILES


def test_batch_size_changes_no_loss_and_a_limit_takes_the_first_rows(run_copy):
    reports = []
    for size in (1, 5, 64):
        main(["--run_dir", str(run_copy), "--no_generation", "--limit", "7", "--batch_size", str(size)])
        reports.append(read_report(run_copy / "eval"))
    assert list(reports[0]["adapter"]) == ["loss", "perplexity"]
    for report in reports:
        assert report["rows"] == 7 and report["warnings"] == ["fewer_rows"]
        for side in ("base", "adapter"):
            assert report[side]["loss"] == pytest.approx(reports[0][side]["loss"], abs=1e-6)
    assert [row["adapter"] for row in read_predictions(run_copy / "eval")] == [None] * 7


def test_untrained_adapter_is_told(run_copy, capsys):
    tensors = load_file(str(run_copy / "adapter_model.safetensors"))
    zeroed = {name: tensor * ("lora_B" not in name) for name, tensor in tensors.items()}
    save_file(zeroed, str(run_copy / "adapter_model.safetensors"), metadata={"format": "pt"})
    summary = json.loads((run_copy / "summary.json").read_text())
    del summary["adapter_sha256"]
    (run_copy / "summary.json").write_text(json.dumps(summary))
    main(["--run_dir", str(run_copy), "--limit", "5", "--max_new_tokens", "4"])
    assert "warning: the adapter changes nothing" in capsys.readouterr().err
    report = read_report(run_copy / "eval")
    assert report["warnings"] == ["adapter_changes_nothing", "fewer_rows"]
    assert len(report["difference"]) == 12
    assert all(low <= 0 <= high for low, high in (value["ci95"] for value in report["difference"].values()))


@pytest.mark.parametrize("name", ["tiny_model", "tiny_gpt2"])
def test_generation_is_that_of_transformers_row_by_row(name, request):
    model = request.getfixturevalue(name)
    stop_ids = [2, 17, 200, 401, 402]  # random weights end at any of these sooner or later
    batched = dict(answering.generate(modeling.TargetLoss(model), PROMPTS, 40, stop_ids))
    for index, prompt in enumerate(PROMPTS):
        input_ids = torch.tensor([prompt])
        expected = model.generate(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=40,
            eos_token_id=stop_ids, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert batched[index] == expected
    assert sorted(batched) == list(range(6))


def test_rows_leave_the_batch_when_they_stop(tiny_model):
    free = dict(answering.generate(modeling.TargetLoss(tiny_model), PROMPTS, 12, []))
    stop = free[2][4]  # the third prompt's answer meets it at its fifth token at the latest
    order, answers = zip(*answering.generate(modeling.TargetLoss(tiny_model), PROMPTS, 12, [stop]))
    for index, tokens in zip(order, answers):
        cut = free[index].index(stop) + 1 if stop in free[index] else 12
        assert tokens == free[index][:cut]  # those that stay go on as if nothing had happened
    assert [len(tokens) for tokens in answers] == sorted(len(tokens) for tokens in answers)
    assert len(answers[0]) < 12


def test_prompt_ends_where_the_last_answer_begins(tiny_tokenizer):
    assert answering.prompt_length([-100, -100, 5, 6]) == 2
    assert answering.prompt_length([-100, 7, 8, -100, -100, 5, 6, -100]) == 5
    asked = [
        {"role": "user", "content": "rank?"},
        {"role": "assistant", "content": "step"},
        {"role": "user", "content": "梯度?"},
    ]
    row = encode_dialogue(tiny_tokenizer, [*asked, {"role": "assistant", "content": "通信"}], 512)
    assert row.input_ids[: answering.prompt_length(row.labels)] == encode_prompt(tiny_tokenizer, asked)


def test_answers_stop_at_the_templates_end_of_turn_and_every_known_eos(tiny_tokenizer, tiny_model):
    end_of_turn = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    tiny_model.generation_config.eos_token_id = [0, end_of_turn]
    assert encoding.stop_token_ids(tiny_tokenizer, tiny_model.generation_config) == [0, end_of_turn]
    tiny_model.generation_config.eos_token_id = None
    assert encoding.stop_token_ids(tiny_tokenizer, tiny_model.generation_config) == [end_of_turn]


SWITCHED = (  # as Qwen3's: a thought stands in the last answer only, switched off by an empty one in the prompt
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last and m['role'] == 'assistant' %}<think>\n"
    "{{ m.get('reasoning_content') or '' }}\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PREFILLED = SWITCHED.replace(
    "</think>\n\n{% endif %}{% endif %}", "</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)  # Qwen3.6
NOT_SWITCHED = SWITCHED.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", ""
)


@pytest.mark.parametrize("template", [SWITCHED, PREFILLED, NOT_SWITCHED, tiny.CHAT_TEMPLATE])
@pytest.mark.parametrize("thought", ["rank 0 writes", ""])
def test_a_perfect_answer_of_a_thinking_model_has_full_marks(template, thought, tiny_tokenizer):
    """What the row's labels say is what a model that has learnt it by heart says to the row's prompt."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = template
    if thought and template == tiny.CHAT_TEMPLATE:
        return  # such rows are refused when they are prepared
    answer = {"role": "assistant", "content": "通信 step", **({"reasoning_content": thought} if thought else {})}
    (row,) = encode_dialogues(tokenizer, [[{"role": "user", "content": "rank?"}, answer]], 512)
    assert row.reason == "" and row.mode == ("thinking" if thought else "plain")
    length = answering.prompt_length(row.labels)
    stop_ids = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    said = row.labels[length : row.labels.index(stop_ids[0], length) + 1]
    read = answering.read_answer(tokenizer, row.input_ids[:length], said, stop_ids)
    assert read == {"answer": "通信 step", "thought": thought, "stopped": True}
    scores, _ = evaluate_generations([read["answer"]], [row.reference])
    assert scores["exact_match"] == 1.0
    if thought:  # cut inside of the thought
        size = next(size for size in range(1, len(said)) if "rank 0" in tokenizer.decode(said[:size]))
        cut = answering.read_answer(tokenizer, row.input_ids[:length], said[:size], stop_ids)
        assert cut["answer"] == "" and not cut["stopped"] and cut["thought"].startswith("rank 0")


def test_a_question_is_asked_in_the_mode_of_most_rows(tmp_path, dataset_dir):
    manifest = json.loads((dataset_dir / "manifest.json").read_text())
    assert answering.trained_mode(tmp_path) == "off"
    for modes, mode in (({"plain": 3, "thinking": 2}, "off"), ({"plain": 2, "thinking": 3}, "on"), ({}, "off")):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "modes": modes}))
        assert answering.trained_mode(tmp_path) == mode


def test_partial_results_survive_a_cut_line_and_other_ranks_find_them(tmp_path):
    accelerator = Accelerator(cpu=True)
    partial = answering.PartialResults(tmp_path, accelerator)
    partial.add([{"key": "k", "id": "a", "answer": "梯度"}])
    with open(tmp_path / ".partial-7.jsonl", "wb") as file:  # of an eighth rank that was killed while writing
        file.write('\n{"key": "k", "id": "b", "answer": "x"}\n{"key": "k", "id": "c", "answer": "梯'.encode()[:-1])
    partial.add([{"key": "k", "id": "d", "answer": "y"}])
    found = answering.PartialResults(tmp_path, accelerator).found
    assert {key: record["answer"] for key, record in found.items()} == {
        ("k", "a"): "梯度",
        ("k", "b"): "x",
        ("k", "d"): "y",
    }
    partial.remove()
    assert os.listdir(tmp_path) == []


def claim(dataset: Path, **split_hashes: str) -> None:
    """Lets a manifest name other content for some splits."""
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["split_sha256"] |= split_hashes
    manifest["dataset_sha256"] = sha256_json(manifest["split_sha256"])
    (dataset / "manifest.json").write_text(json.dumps(manifest))


def spoil(case: str, run: Path, dataset: Path) -> list[str]:
    """Does to copies of a run and its data set what the case says; returns the arguments to evaluate with."""
    arguments = ["--run_dir", str(run), "--dataset_dir", str(dataset)]
    if case == "no run":
        shutil.rmtree(run)
    elif case == "unfinished":
        for name in ("adapter_model.safetensors", "adapter_config.json", "summary.json"):
            (run / name).unlink()
    elif case == "damaged adapter":
        (run / "adapter_model.safetensors").write_bytes(b"")
    elif case == "damaged settings":
        (run / "config.json").write_text("{}")
    elif case == "no data set":
        shutil.rmtree(dataset)
    elif case == "lost data set":
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "dataset_dir": str(dataset / "moved")}))
        return arguments[:2]
    elif case == "nothing held out":
        change_rows(dataset, "eval", lambda rows: [])
        arguments += ["--allow_other_dataset"]
    elif case == "other template":
        manifest = json.loads((dataset / "manifest.json").read_text())
        (dataset / "manifest.json").write_text(json.dumps({**manifest, "template_sha256": "0" * 64}))
    elif case in ("other data set", "other data set accepted"):
        claim(dataset, train="0" * 64)  # other training rows, the same held-out ones
        if case == "other data set accepted":
            arguments += ["--allow_other_dataset", "--no_generation", "--limit", "3"]
    elif case == "other base model":
        provenance = json.loads((run / "provenance.json").read_text())
        (run / "provenance.json").write_text(json.dumps({**provenance, "model_sha256": "0" * 64}))
    elif case.startswith("foreign"):
        own = run.parent / "own"
        own.mkdir()
        (own / {"foreign report": "report.json", "foreign plot": "loss.png"}[case]).write_text('{"mine": [1, 2]}')
        arguments += ["--output_dir", str(own)]
    elif case == "linked":
        (run.parent / "elsewhere").mkdir()
        (run / "eval").symlink_to(run.parent / "elsewhere")
    elif case == "occupied":
        arguments += ["--output_dir", str(run)]
    elif case in ("nothing to ask", "file twice"):
        others = run.parent / "others.jsonl"
        others.write_text('{"question": "q"}\n')
        arguments += ["--eval_input", *[str(others)] * (2 if case == "file twice" else 1)]
    elif case == "no rows":
        arguments += ["--limit", "0"]
    elif case == "negative seed":
        arguments += ["--seed", "-1"]
    return arguments


REFUSALS = {
    "no run": r"run is not a run directory: it holds no config\.json",
    "unfinished": r"is not a finished run: it has no adapter_config\.json, adapter_model\.safetensors, "
    r"summary\.json \(checkpoint-\d+, checkpoint-91 there\); the train\.py command that began it",
    "no data set": r"data does not exist",
    "damaged adapter": r"its adapter_model.safetensors is damaged .* goes on from its last checkpoint and finishes it",
    "damaged settings": r"config\.json is damaged or was written by another program: model_name_or_path is missing",
    "lost data set": r"moved, is not there .*; give its place with --dataset_dir",
    "nothing held out": r"holds no rows out \(it was made with eval_fraction 0 .*give another with --dataset_dir",
    "other data set": r"is not the data set that .* was trained on \(dataset_sha256 [0-9a-f]{12}….*--allow_other_dataset",
    "other template": r"data was made with another template than .* has",
    "other base model": r"is not the base model that .* the run's is 000000000000…\).*--model_name_or_path",
    "foreign report": r"output_dir .*own holds report\.json but no evaluation; choose another directory",
    "foreign plot": r"output_dir .*own holds loss\.png but no evaluation; choose another directory",
    "linked": r"run/eval is a link to elsewhere; give the place to write to with --output_dir",
    "occupied": r"output_dir .*run holds .* but no evaluation; choose another directory",
    "negative seed": r"seed is -1; it must be 0 or more",
    "nothing to ask": r"--eval_input .*others\.jsonl has no row that can be asked: .*others\.jsonl:1 .*answer",
    "file twice": r"--eval_input names a file twice: .*; name each once",
    "no rows": r"limit is 0; it must be at least 1",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_use_is_refused_with_a_remedy(case, run_copy, dataset_dir, tmp_path):
    arguments = spoil(case, run_copy, Path(shutil.copytree(dataset_dir, tmp_path / "data")))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=REFUSALS[case]):
        main(arguments)
    assert sorted(tmp_path.rglob("*")) == before  # nothing was written


def test_losses_that_are_not_finite_are_no_verdict(tmp_path):
    """A NaN compares with nothing: taken for a difference, it would have been called better."""
    rows = datasets.Dataset.from_dict({"id": ["a", "b"], "length": [3, 3]})
    partial = answering.PartialResults(tmp_path, Accelerator(cpu=True))
    key = artifacts.sha256_json({"what": "loss"})
    partial.found = {(key, "a"): {"nll": 1.0}, (key, "b"): {"nll": float("nan")}}
    with pytest.raises(RunFailed, match="the adapter model's loss of row b is not finite, so nothing can be compared"):
        score_losses("adapter", None, rows, EvalConfig(run_dir="run"), partial, {})


def test_only_the_command_line_lets_a_models_code_run(run_copy, tiny_model_dir, dataset_dir, tmp_path):
    """The run directory asks for it, as one that was handed on by somebody else may."""
    model_dir, ran = Path(shutil.copytree(tiny_model_dir, tmp_path / "model")), tmp_path / "ran"
    (model_dir / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    described = json.loads((model_dir / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (model_dir / "config.json").write_text(json.dumps({**described, "model_type": "own", "auto_map": code}))
    tokenizer_sha256 = artifacts.tokenizer_sha256(load_tokenizer(str(model_dir)))  # the family's rules are not applied
    dataset = Path(shutil.copytree(dataset_dir, tmp_path / "data"))
    for path, changed in (
        (run_copy / "config.json", {"trust_remote_code": True, "model_name_or_path": str(model_dir)}),
        (run_copy / "provenance.json", {"model_sha256": None, "tokenizer_sha256": tokenizer_sha256}),
        (dataset / "manifest.json", {"tokenizer_sha256": tokenizer_sha256}),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    arguments = ["--run_dir", str(run_copy), "--dataset_dir", str(dataset), "--no_generation", "--limit", "6"]
    with pytest.raises(
        UserError, match=r"needs Python code that lies beside its weights; .* --trust_remote_code on the"
    ):
        main(arguments)
    with pytest.raises(UserError, match="--trust_remote_code on the command line"):
        answering.ask(run_copy, "rank?", max_new_tokens=1)
    assert not ran.exists()
    main([*arguments, "--trust_remote_code"])
    assert ran.exists() and read_report(run_copy / "eval")["rows"] == 6


def test_three_evaluations_at_once_end_well_or_with_a_sentence(run_copy):
    command = [sys.executable, "eval.py", "--run_dir", str(run_copy), "--limit", "6", "--max_new_tokens", "8"]
    started = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]  # fmt: skip
    ends = [(process.communicate(timeout=300)[1], process.returncode) for process in started]
    assert {status for _, status in ends} <= {0, 2} and 0 in {status for _, status in ends}
    for errors, status in ends:
        refusal = (
            f"error: another eval.py is writing {run_copy / 'eval'}; wait for it, or give this one another --output_dir"
        )
        assert status == 0 or refusal in errors, errors
    assert read_report(run_copy / "eval")["rows"] == 6
    assert sorted(os.listdir(run_copy / "eval")) == FILES


def test_partial_results_do_not_follow_a_link(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / ".partial-0.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=r"could not write .*\.partial-0\.jsonl: Too many levels of symbolic links"):
        answering.PartialResults(tmp_path / "eval", Accelerator(cpu=True)).add([{"key": "k", "id": "a"}])
    assert (tmp_path / "victim").read_text() == "mine"


def test_other_data_set_is_accepted_on_request_and_named(run_copy, dataset_dir, tmp_path):
    main(spoil("other data set accepted", run_copy, Path(shutil.copytree(dataset_dir, tmp_path / "data"))))
    assert read_report(run_copy / "eval")["warnings"] == ["other_dataset", "fewer_rows"]


def test_mistake_ends_with_one_sentence_and_status_2(tmp_path):
    result = run_script("eval.py", "--run_dir", tmp_path / "none")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
