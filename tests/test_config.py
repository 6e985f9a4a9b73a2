"""Settings from flags and YAML."""

import pytest

from sft.config import TrainConfig, parse
from sft.errors import UserError

REQUIRED = ["--model_name_or_path", "m", "--dataset_dir", "d", "--output_dir", "o"]


def write(tmp_path, text: str) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_are_those_of_the_reference_run():
    settings = parse(TrainConfig, REQUIRED)
    assert (settings.lora_r, settings.lora_alpha, settings.lora_dropout) == (8, 16, 0.0)
    assert settings.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (settings.per_device_train_batch_size, settings.max_grad_norm) == (1, 1.0)
    assert (settings.learning_rate, settings.lr_scheduler_type, settings.warmup_ratio) == (2e-4, "cosine", 0.03)


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    path = write(tmp_path, "learning_rate: 2e-5\nlora_r: 16\nseed: 7\n")
    settings = parse(TrainConfig, [*REQUIRED, "--config", path, "--seed", "8"])
    assert (settings.learning_rate, settings.lora_r, settings.seed) == (2e-5, 16, 8)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--gradient_checkpointing"], True),
        (["--gradient_checkpointing", "false"], False),
        (["--no_gradient_checkpointing"], False),
        (["--gradient_checkpointing=true"], True),
    ],
)
def test_switches_take_all_usual_forms(flags, expected):
    assert parse(TrainConfig, [*REQUIRED, *flags]).gradient_checkpointing is expected


def test_lists_take_several_words():
    assert parse(TrainConfig, [*REQUIRED, "--target_modules", "q_proj", "v_proj"]).target_modules == [
        "q_proj",
        "v_proj",
    ]


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1])
def test_whole_numbers_are_exact(tmp_path, seed):
    """A float holds whole numbers up to 2^53 only."""
    assert parse(TrainConfig, [*REQUIRED, "--seed", str(seed)]).seed == seed
    assert parse(TrainConfig, [*REQUIRED, "--config", write(tmp_path, f"seed: {seed}\n")]).seed == seed
    assert parse(TrainConfig, [*REQUIRED, "--seed", "1e3"]).seed == 1000


def test_text_stays_as_it_was_typed(tmp_path):
    """YAML would read these as a number, a date, an octal number and a boolean."""
    path = write(tmp_path, "output_dir: 1.0e+5\ndataset_dir: 2026-01-02\ntarget_modules: [007, no]\n")
    settings = parse(TrainConfig, ["--model_name_or_path", "1e5", "--config", path])
    assert (settings.model_name_or_path, settings.output_dir, settings.dataset_dir) == ("1e5", "1.0e+5", "2026-01-02")
    assert settings.target_modules == ["007", "no"]


def test_a_tilde_in_paths_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path, "output_dir: ~/run\nmodel_name_or_path: '~'\n")
    settings = parse(TrainConfig, ["--dataset_dir", "~/data", "--config", "~/" + path.rsplit("/", 1)[1]])
    assert settings.output_dir == f"{tmp_path}/run" and settings.dataset_dir == f"{tmp_path}/data"
    assert settings.model_name_or_path == str(tmp_path) and settings.adapter_name_or_path is None


def test_only_the_command_line_allows_code_of_a_model():
    assert parse(TrainConfig, [*REQUIRED, "--trust_remote_code"]).trust_remote_code
    assert not parse(TrainConfig, REQUIRED).trust_remote_code


def test_none_is_a_value_where_the_field_allows_it(tmp_path):
    path = write(tmp_path, "max_steps: null\nresume_from_checkpoint: none\n")
    settings = parse(TrainConfig, [*REQUIRED, "--config", path])
    assert settings.max_steps is None and settings.resume_from_checkpoint is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lerning_rate", "1"], r"--lerning_rate; did you mean learning_rate\?"),
        (["stray"], "unknown argument stray"),
        (["--learning_rate", "fast"], "learning_rate is 'fast'; expected a number"),
        (["--lora_r", "1.5"], "lora_r is '1.5'; expected a whole number"),
        (["--lora_r", "0"], "lora_r is 0; it must be from 1 to 65536"),
        (["--lora_r", "1e9"], "lora_r is 1000000000; it must be from 1 to 65536"),
        (["--ddp_timeout", "1e15"], r"ddp_timeout is 10+; it must be from 1 to 2592000 \(30 days\)"),
        (["--seed", "1e17"], "seed is '1e17'; expected a whole number"),
        (["--seed", "9" * 5000], r"seed is '9+\.\.\.9+'; expected a whole number$"),
        (["--num_train_epochs", "1e300"], "num_train_epochs is 1e.300; it must be at most"),
        (["--resume_from_checkpoint", ""], "resume_from_checkpoint is empty; give a path, or leave it out"),
        (["--output_dir", "a/" + "x" * 300], "output_dir holds a name of 300 characters .*give a shorter one"),
        (["--dataset_dir", "a\0b"], "dataset_dir holds a NUL character"),
        (["--learning_rate", "0"], "learning_rate is 0.0; it must be above 0"),
        (["--learning_rate", "nan"], "learning_rate is nan"),
        (["--lora_dropout", "1"], "lora_dropout is 1.0; it must be at least 0 and below 1"),
        (["--dtype", "bf16"], r"dtype is 'bf16'; .*did you mean bfloat16\?"),
        (["--report_to", "tensorbord"], r"report_to: 'tensorbord' .*did you mean tensorboard\?"),
        (["--seed"], "argument --seed: expected one argument"),
        (["--gradient_checkpointing", "maybe"], "gradient_checkpointing is 'maybe'; expected true or false"),
    ],
)
def test_wrong_flags_are_named_with_the_remedy(flags, message):
    with pytest.raises(UserError, match=message):
        parse(TrainConfig, [*REQUIRED, *flags])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora_rank: 8\n", r"unknown key 'lora_rank'; did you mean lora_r\?"),
        ("lora_r: [8]\n", "lora_r is \\['8'\\]; expected a whole number"),
        ("seed:\n", "seed has no value"),
        ("- seed\n", "holds a list; expected lines of the form"),
        ("? [seed, x]\n: 1\n", "not valid YAML: .*unhashable key"),
        ("seed: 1\nlora_r: 8\nseed: 2\n", "not valid YAML: the key seed stands twice .*line 3, column 1"),
        ("a: &a [1, 1, 1, 1]\n", "unknown key 'a'"),
        ("lora_r: {a: " + "[" * 3000 + "\n", "nested too deeply|not valid YAML"),
        ("target_modules: [[[[[q_proj]]]]]\n", r"target_modules is \[.*\]; expected text"),
        ("trust_remote_code: true\n", r"trust_remote_code may only stand on the command line.* --trust_remote_code"),
        ("trust_remote_code: false\n", "may only stand on the command line"),
        ("seed: 1\n  lora_r: 8\n", "not valid YAML: .*line 2, column"),
        ("gradient_checkpointing: 3\n", "gradient_checkpointing is '3'; expected true or false"),
    ],
)
def test_wrong_yaml_is_named_with_its_file(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        parse(TrainConfig, [*REQUIRED, "--config", path])
    assert path in str(caught.value)


def test_a_missing_file_and_missing_settings_are_said_at_once(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        parse(TrainConfig, ["--config", str(tmp_path / "nowhere.yaml")])
    with pytest.raises(UserError, match="missing: --model_name_or_path, --dataset_dir, --output_dir"):
        parse(TrainConfig, [])


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(TrainConfig, ["--help"], "text")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in TrainConfig.__dataclass_fields__)


def test_a_high_learning_rate_and_few_steps_are_doubted():
    def doubts(total_steps, **changes):
        settings = TrainConfig(model_name_or_path="m", dataset_dir="d", output_dir="o", **changes)
        return [doubt.split(";")[0] for doubt in settings.doubts(total_steps)]

    assert doubts(100, learning_rate=2.9e-3) == []
    assert doubts(100, learning_rate=3e-3) == ["learning_rate is 0.003"]
    assert doubts(91) == ["91 steps are few: below about 100 an adapter is often still improving"]
    assert doubts(5, max_steps=5) == []  # that is what was asked for


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_train_epochs", "passes over the training rows (default: 1.0)"),
        ("train_longer", "with a larger num_train_epochs or max_steps (default: False)"),
        ("deliver", "best = lowest held-out loss, last = last step (default: best)"),
        ("early_stopping_patience", "in a row without a lower held-out loss; none: never (default: None)"),
        ("micro_batch_tokens", "none: what its memory allows (default: None)"),
        ("fused", "off: plain ones (default: auto)"),
        ("deterministic", "slower on some (default: False)"),
        ("revision", "none: its newest (default: None)"),
    ],
)
def test_help_explains_a_setting_in_words_with_one_default(capsys, name, words):
    with pytest.raises(SystemExit):
        parse(TrainConfig, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    explained = text.split(f" --{name} ")[-1].split(" --")[0]
    assert words in explained and explained.lower().count("default") == 1
