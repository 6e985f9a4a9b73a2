"""The report of a run: read back, the same twice, in two languages, with plots."""

import copy
import itertools
import json
import math
import random
import unicodedata
import zlib

import numpy as np
import pytest
from markdown_it import MarkdownIt
from matplotlib.image import imread

from evaluation.markdown import render_report, render_table, render_words
from evaluation.metrics import evaluate_generations, evaluate_losses
from evaluation.phrases import METRICS, PHRASES
from evaluation.report import (
    build_report,
    compare_runs,
    is_report,
    join_predictions,
    load_run,
    write_report,
)
from evaluation.webpage import render_page
from sft.artifacts import write_json
from sft.card import model_card
from sft.errors import UserError
from sft.loss_plot import plot_loss

CONFIG = {
    "model_name_or_path": "models/SmolLM2-135M-Instruct",
    "dataset_dir": "outputs/demo/dataset",
    "output_dir": "outputs/demo/run",
    "learning_rate": 2e-4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "seed": 42,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "dtype": "auto",
    "loss_chunk_tokens": 1024,
    "per_device_train_batch_size": 1,
}
PROVENANCE = {
    "model_name_or_path": CONFIG["model_name_or_path"],
    "model_sha256": "b" * 64,
    "dataset_sha256": "a" * 64,
    "tokenizer_sha256": "c" * 64,
    "template_sha256": "d" * 64,
    "base_dtype": "float32",
    "global_batch_size": 4,
    "total_steps": 91,
}
ENVIRONMENT = {
    "versions": {"python": "3.11.7", "torch": "2.13.0", "accelerate": "1.15.0"},
    "device_name": "cpu",
    "simulated": False,
}
SUMMARY = {
    "world_size": 2,
    "backend": "gloo",
    "device": "cpu",
    "simulated": False,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "global_batch_size": 4,
    "epochs": 1.0,
    "steps": 91,
    "trainable_parameters": 460_800,
    "total_parameters": 134_975_808,
    "first_loss": 3.1234,
    "last_loss": 2.0123,
    "eval_loss": 2.1,
    "train_time_s": 231.4,
    "tokens_per_s": 156.7,
    "peak_memory_bytes": [1610612736, 1825361101],
}
MANIFEST = {
    "rows_read": 380,
    "rows_written": {"train": 361, "eval": 19},
    "rejected": [],
    "truncated": 2,
    "duplicates": 0,
    "tokens": {"train": 30_000, "eval": 1_600},
    "target_tokens": {"train": 20_123, "eval": 1_045},
    "dataset_sha256": "a" * 64,
    "leaks": [],
}
TEXT = "HCCL sums gradients over all cards and ranks so each NPU steps alike 梯度 同步 由 各卡 完成"


def make_rows(count=19):
    draw = random.Random(3)
    return [
        {
            "id": f"q{index:03d}",
            "question": f"What does rank {index} do?",
            "reference": " ".join(draw.choices(TEXT.split(), k=30)) + ".",
            "length": draw.randint(40, 300),
            "target_tokens": draw.randint(20, 90),
        }
        for index in range(count)
    ]


def answer(rows, skill, nats, seed):
    """Answers that copy a word of the reference with probability `skill`, at about `nats` per target token."""
    draw = random.Random(seed)
    texts = [
        " ".join(word if draw.random() < skill else draw.choice(TEXT.split()) for word in row["reference"].split())
        for row in rows
    ]
    nll = [row["target_tokens"] * nats * draw.uniform(0.8, 1.2) for row in rows]
    stopped = [draw.random() < skill for _ in rows]
    tokens = [row["target_tokens"] for row in rows]
    return texts, evaluate_generations(texts, [row["reference"] for row in rows], stopped, "auto", nll, tokens)[1]


def make_predictions(skills=(0.2, 0.8), nats=(3.0, 2.1), seeds=(1, 2)):
    rows = make_rows()
    (base_texts, base_rows), (adapter_texts, adapter_rows) = (answer(rows, *each) for each in zip(skills, nats, seeds))
    return join_predictions(rows, base_rows, adapter_rows, base_texts, adapter_texts)


def make_metrics(steps=91):
    draw = random.Random(5)
    records = [{"step": 0, "eval_loss": 3.0, "eval_target_tokens": 1045}]
    for step in range(1, steps + 1):
        loss = 2 + math.exp(-step / 20) + draw.gauss(0, 0.25)
        records.append({"step": step, "epoch": step / steps, "loss": loss, "learning_rate": 2e-4})
        if step % 30 == 0 or step == steps:
            records.append({"step": step, "eval_loss": 2.1 + math.exp(-step / 15), "eval_target_tokens": 1045})
    return records


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    for name, content in (
        ("config", CONFIG),
        ("provenance", PROVENANCE),
        ("environment", ENVIRONMENT),
        ("summary", SUMMARY),
    ):
        write_json(directory / f"{name}.json", content)
    lines = "".join(json.dumps(record) + "\n" for record in make_metrics())
    (directory / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return directory


@pytest.fixture
def run(run_dir):
    return load_run(run_dir)


@pytest.fixture(scope="module")
def predictions():
    return make_predictions()


def test_a_run_is_read_back_whole(run_dir, predictions):
    run = load_run(str(run_dir))
    assert (run.config, run.provenance, run.environment, run.summary) == (CONFIG, PROVENANCE, ENVIRONMENT, SUMMARY)
    assert sum("loss" in record for record in run.metrics) == 91
    assert (run.report, run.predictions) == (None, [])
    report = build_report(run, predictions, MANIFEST)
    write_report(run_dir / "eval", report, predictions, run.metrics)
    again = load_run(run_dir)
    assert (again.report, again.predictions) == (report, predictions)


def test_a_run_that_is_still_going_is_read_as_far_as_it_got(run_dir):
    (run_dir / "summary.json").unlink()
    with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 92, "lo')
    run = load_run(run_dir)
    assert (run.summary, len(run.metrics)) == ({}, 96)


def test_what_is_not_a_run_or_damaged_is_refused(tmp_path, run_dir):
    with pytest.raises(UserError, match=r"is not a run directory: it holds no config\.json"):
        load_run(tmp_path)
    (run_dir / "eval").mkdir()
    (run_dir / "eval" / "predictions.jsonl").write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"predictions\.jsonl:1 is not valid JSON"):
        load_run(run_dir)
    (run_dir / "eval" / "predictions.jsonl").write_text('{"id": 1}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"predictions\.jsonl:1 is damaged: question is missing"):
        load_run(run_dir)


def test_report_has_the_promised_keys(run, predictions):
    report = build_report(run, predictions, MANIFEST, decoding="greedy|max_new_tokens:64")
    assert {"base", "adapter", "difference", "rows", "signature"} <= report.keys()
    assert list(report["base"]) == list(report["adapter"]) == list(report["difference"]) == list(METRICS)
    assert report["rows"] == 19
    assert report["signature"]["decoding"] == "greedy|max_new_tokens:64"
    for name, difference in report["difference"].items():
        assert difference["mean"] == pytest.approx(report["adapter"][name] - report["base"][name], abs=1e-9)


def test_two_evaluations_give_the_same_files_but_for_the_times(run, predictions, tmp_path):
    for name, seconds in (("one", 1.0), ("two", 2.0)):
        report = build_report(run, copy.deepcopy(predictions), MANIFEST, times={"generation_s": seconds})
        write_report(tmp_path / name, report, predictions, run.metrics)
    one, two = (json.loads((tmp_path / name / "report.json").read_text(encoding="utf-8")) for name in ("one", "two"))
    assert (one.pop("times"), two.pop("times")) == ({"generation_s": 1.0}, {"generation_s": 2.0})
    assert one == two
    for name in ("report.md", "report.zh-CN.md", "predictions.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    "skills, nats, conclusion, english, chinese",
    [
        (
            (0.2, 0.8),
            (3.0, 2.0),
            "helped",
            "The adapter is **better** in loss, perplexity, token_f1",
            "有效果：留出数据的损失下降（依据 19 条数据）",
        ),
        ((0.8, 0.2), (2.0, 3.0), "hurt", "The adapter is **worse** in loss, perplexity, token_f1", "没有，反而变差"),
        ((0.2, 0.8), (2.0, 3.0), "mixed", "The adapter is **worse** in loss, perplexity.", "部分有效"),
        (
            (0.5, 0.5),
            (2.0, 2.0),
            "no_effect",
            "19 rows show no difference in the held-out loss.",
            "在 19 条数据上看不出留出损失的差异",
        ),
    ],
)
def test_conclusion_is_said_in_words(run, skills, nats, conclusion, english, chinese):
    report = build_report(run, make_predictions(skills, nats), MANIFEST)
    assert report["conclusion"] == conclusion
    assert english in render_words(report)
    assert chinese in render_words(report, "zh-CN")


def test_adapter_that_changes_nothing_is_warned_of(run):
    report = build_report(run, make_predictions((0.5, 0.5), (2.0, 2.0), (1, 1)), MANIFEST)
    assert report["warnings"] == ["adapter_changes_nothing"]
    assert report["difference"] == {name: {"mean": 0.0, "ci95": [0.0, 0.0], "p": 1.0} for name in METRICS}
    assert "the adapter changes nothing" in render_report(report)
    assert "适配器没有带来任何变化" in render_report(report, "zh-CN")


def test_other_rows_fewer_rows_and_unfinished_runs_are_said(run_dir, predictions):
    (run_dir / "summary.json").unlink()
    manifest = MANIFEST | {"dataset_sha256": "c" * 64, "rows_written": {"train": 361, "eval": 20}}
    report = build_report(load_run(run_dir), predictions, manifest)
    assert report["warnings"] == ["other_dataset", "fewer_rows", "unfinished"]
    text = render_report(report)
    assert "19 of the 20 held-out rows were evaluated" in text
    assert "their data set has another hash" in text
    assert "has not finished" in text


def test_simulated_hardware_is_named_at_the_top_in_both_languages(run, predictions):
    for language in ("en", "zh-CN"):
        report = build_report(run, predictions, MANIFEST, simulated=True)
        assert "simulated Ascend" in render_report(report, language).split("##")[0]
        assert "simulated Ascend" not in render_report(build_report(run, predictions, MANIFEST), language)
    run.environment["simulated"] = True
    assert build_report(run, predictions, MANIFEST)["simulated"] is True


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_report_tells_what_was_trained_and_on_what(run, predictions, language):
    text = render_report(build_report(run, predictions, MANIFEST), language)
    for fact in ("models/SmolLM2-135M-Instruct", "q_proj, k_proj, v_proj, o_proj", "460,800", "134,975,808",
                 "outputs/demo/dataset", "float32",
                 "a" * 64, "b" * 64, "361", "380", "20,123", "0.0002", "91", "3.1234", "2.0123", "gloo", "torch 2.13.0",
                 "![differences](differences.png)", "![loss](loss.png)", "![length and loss](length_loss.png)"):  # fmt: skip
        assert fact in text, fact
    assert "{" not in text.split("##")[0]


@pytest.mark.parametrize(
    ("summary", "english", "chinese"),
    [
        (
            {"delivered": {"step": 60, "eval_loss": 1.9}, "best": {"step": 60, "eval_loss": 1.9}},
            "of step 60, with the lowest held-out loss, 1.9000 (last step, 91: 2.1000)",
            "第 60 步，留出损失最低，为 1.9000（末步，第 91 步：2.1000）",
        ),
        (
            {"delivered": {"step": 91, "eval_loss": 2.1}, "best": {"step": 60, "eval_loss": 1.9}},
            "of the last step, 91, held-out loss 2.1000 (lowest: 1.9000, of step 60)",
            "末步，第 91 步，留出损失 2.1000（最低 1.9000，第 60 步）",
        ),
        (
            {"delivered": {"step": 91, "eval_loss": 2.1}, "best": {"step": 91, "eval_loss": 2.1}},
            "of the last step, 91, held-out loss 2.1000",
            "末步，第 91 步，留出损失 2.1000",
        ),
    ],
)
def test_report_and_card_name_the_step_of_the_adapter_with_both_losses(run, predictions, summary, english, chinese):
    run.summary.update(summary)
    report = build_report(run, predictions, MANIFEST)
    assert english in render_report(report) and chinese in render_report(report, "zh-CN")
    assert english in render_page(report, predictions, []) and chinese in render_page(report, predictions, [])
    provenance = PROVENANCE | {name: CONFIG[name] for name in CONFIG.keys() - PROVENANCE.keys()}
    assert f"| this adapter | {english} |" in model_card(
        CONFIG, provenance, SUMMARY | {"first_eval_loss": 3.0} | summary
    )


def test_a_damaged_report_is_named(run_dir, run, predictions):
    write_report(run_dir / "eval", build_report(run, predictions, MANIFEST), predictions, run.metrics)
    path = run_dir / "eval" / "report.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert is_report(path)
    for change, words in (
        ({"difference": {"loss": 1}}, "difference.loss is 1; expected an object"),
        ({"adapter": {"loss": "low"}}, "adapter.loss is 'low'; expected a number"),
        ({"base": None}, "base is null; expected a value"),
        ({"rows": "many"}, "rows is 'many'; expected a whole number"),
    ):
        path.write_text(json.dumps(whole | change), encoding="utf-8")
        with pytest.raises(UserError, match=rf"report\.json is damaged .*{words}"):
            load_run(run_dir)
        assert not is_report(path)


def test_both_languages_have_every_phrase_with_the_same_blanks():
    import string

    assert len(PHRASES) > 50
    for key, (english, chinese) in PHRASES.items():
        blanks = [{name for _, name, _, _ in string.Formatter().parse(text) if name} for text in (english, chinese)]
        assert blanks[0] == blanks[1], key


def test_examples_are_the_largest_gains_and_losses_side_by_side(run):
    rows = make_rows(8)
    answers = {
        "base": ["no idea"] * 6 + [row["reference"] for row in rows[6:]],
        "adapter": [row["reference"] for row in rows],
    }
    answers["adapter"][5:] = ["no idea", "other", "other"]
    scores = {
        side: evaluate_generations(texts, [row["reference"] for row in rows], nll=[1.0] * 8, target_tokens=[2] * 8)[1]
        for side, texts in answers.items()
    }
    report = build_report(
        run, join_predictions(rows, scores["base"], scores["adapter"], answers["base"], answers["adapter"]), MANIFEST
    )
    assert len(report["examples"]["best"]) == 3
    assert all(example["adapter_chrf"] == 100 for example in report["examples"]["best"])
    # Row 5 is as bad with the adapter as without: neither a gain nor a loss.
    assert sorted(example["id"] for example in report["examples"]["worst"]) == ["q006", "q007"]


EVIL = [
    "a|b\n# head\n<script>alert(1)</script> *bold* `code` [x](http://y) $m$ " + "长" * 500,
    "x\n\n# Forged heading\n\n<img src=x onerror=alert(1)>",
    "`` ` </script><script>alert(2)</script>\n---\n| a | b |",
    "\x1b]0;title\x07\x1b[2J\u202egnp.exe\u2028\x00 &lt;b&gt; ![x](y)",
    "\n- list\n\n\tcode\n```\nfence\n<!-- c --> <?php ?>",
]


def hostile_report(run):
    """A report in which every text that comes from rows, files or a run directory is hostile."""
    rows, scores = [], ([], [])
    for number, evil in enumerate(EVIL):
        rows.append(make_rows(1)[0] | {"question": evil, "reference": evil, "id": f"{number}{evil}"})
        for side, text, nll in zip(scores, (evil, ""), (3.0, 2.0)):
            side += evaluate_generations([text], [evil], nll=[nll], target_tokens=[3])[1]
    predictions = join_predictions(rows, *scores, EVIL, [""] * len(EVIL))
    leaks = [
        {
            "held_out": {"id": evil, "question": evil},
            "train": {"id": evil, "question": evil},
            "kind": "near",
            "similarity": 0.91,
        }
        for evil in EVIL
    ]
    for content in (run.config, run.provenance, run.environment, run.summary):
        for index, name in enumerate(sorted(content)):
            if isinstance(content[name], str):
                content[name] = EVIL[index % len(EVIL)]
    run.config["target_modules"] = EVIL
    run.environment["versions"] = dict(zip(EVIL, EVIL))
    report = build_report(run, predictions, MANIFEST | {"leaks": leaks}, decoding="|".join(EVIL))
    return report, predictions


def test_text_of_rows_and_files_cannot_act_in_the_report(run):
    """Judged by a Markdown parser: its headings, tables and pictures are ours, and there is neither HTML nor a link."""
    tame = render_report(build_report(run, make_predictions()[:5], MANIFEST))
    report, _ = hostile_report(run)
    for language in ("en", "zh-CN"):
        text = render_report(report, language)
        parser = MarkdownIt("commonmark", {"html": True}).enable(["table"])
        tokens = parser.parse(text)
        inline = [child for token in tokens for child in token.children or []]
        kinds = {token.type for token in [*tokens, *inline]}
        assert not kinds & {"html_block", "html_inline", "link_open", "fence", "code_block", "hr", "lheading_open"}
        assert [token.content for token in inline if token.type == "image"] == [
            "differences",
            "loss",
            "length and loss",
        ]
        headings = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
        assert len(headings) == tame.count("\n## ") + 1 == 9
        assert not {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Zl")} and "\u202e" not in text
        for table in text.split("\n\n"):  # as many cells in each line, whatever stands in them
            if table.startswith("| "):
                assert len({line.replace(r"\|", "").count("|") for line in table.splitlines()}) == 1
    assert r"a\|b # head \<script\>alert(1)\</script\> \*bold\*" in render_report(report)
    assert "长…" in text and "长" * 401 not in text


def test_leaks_are_named_as_the_manifest_has_them(run, predictions):
    """The pair as `find_leaks` of data_prep.py writes it; its own test makes such a pair from files."""
    leak = {
        "held_out": {"id": "a-7", "question": "Which rank writes?"}, "train": {"id": "b-3", "question": "Which rank wrote?"},
        "kind": "near", "similarity": 0.913,
    }  # fmt: skip
    report = build_report(run, predictions, MANIFEST | {"leaks": [leak]})
    assert "- `a-7` Which rank writes? ≈ `b-3` Which rank wrote? (0.91)\n" in render_report(report)
    assert "- `a-7` Which rank writes? ≈ `b-3` Which rank wrote?（0.91）\n" in render_report(report, "zh-CN")


def test_losses_alone_make_a_report_too(run, tmp_path):
    rows = make_rows()
    tokens = [row["target_tokens"] for row in rows]
    base, adapter = ([nats * count for count in tokens] for nats in (3.0, 2.5))
    predictions = join_predictions(rows, evaluate_losses(base, tokens)[1], evaluate_losses(adapter, tokens)[1])
    report = build_report(run, predictions, MANIFEST)
    assert list(report["difference"]) == ["loss", "perplexity"]
    write_report(tmp_path / "eval", report, predictions, run.metrics)
    assert predictions[0]["base"] is None
    assert "better** in loss, perplexity." in (tmp_path / "eval" / "report.md").read_text(encoding="utf-8")


def test_table_is_aligned_for_a_terminal(run, predictions):
    lines = render_table(build_report(run, predictions, MANIFEST)).splitlines()
    assert len(lines) == 2 + len(METRICS)
    assert len({len(line) for line in lines}) == 1


def test_plots_are_pictures_for_long_short_and_empty_runs(run, predictions, tmp_path, recwarn):
    write_report(tmp_path, build_report(run, predictions, MANIFEST), predictions, run.metrics)
    plot_loss(make_metrics(3), tmp_path / "short.png")
    plot_loss([], tmp_path / "empty.png")
    pictures = sorted(tmp_path.glob("*.png"))
    assert [picture.name for picture in pictures] == [
        "differences.png",
        "empty.png",
        "length_loss.png",
        "loss.png",
        "short.png",
    ]
    for picture in pictures:
        pixels = imread(picture)
        assert min(pixels.shape[:2]) >= 500
        assert pixels.std() > 0.01, picture.name
    assert not recwarn.list


def test_two_runs_are_compared_on_the_rows_that_both_evaluated(run, predictions, tmp_path):
    better = make_predictions((0.2, 0.95), (3.0, 1.5), (1, 9))
    directories = []
    for name, rows in (("first", predictions), ("second", better[::-1][:15])):
        directory = tmp_path / name
        write_json(directory / "config.json", CONFIG)
        write_report(directory / "eval", build_report(run, rows, MANIFEST), rows, run.metrics)
        directories.append(directory)
    first, second = map(load_run, directories)
    difference = compare_runs(first, second)
    assert difference["loss"]["ci95"][1] < 0 < difference["rougeL"]["ci95"][0]
    assert compare_runs(first, first)["loss"] == {"mean": 0.0, "ci95": [0.0, 0.0], "p": 1.0}
    with pytest.raises(UserError, match=r"holds no eval/predictions\.jsonl; run eval\.py --run_dir"):
        compare_runs(first, run)


@pytest.mark.parametrize("rows, needed", [(1, 6), (3, 6), (5, 6)])
def test_a_handful_of_rows_gets_no_verdict(run, predictions, rows, needed):
    report = build_report(run, predictions[:rows], MANIFEST)
    assert report["conclusion"] == "too_few" and set(report["verdicts"].values()) == {"too few rows"}
    assert report["rows_needed"] == needed  # the difference is so clear that no more are needed
    assert f"{rows} rows are too few to tell whether it helped: at least 6 are needed." in render_words(report)
    assert "too few rows" in render_table(report) and "数据太少" in render_table(report, "zh-CN")
    assert build_report(run, predictions[:6], MANIFEST)["conclusion"] == "helped"


def test_too_small_a_difference_is_said_with_the_rows_that_it_would_take(run):
    report = build_report(run, make_predictions((0.5, 0.5), (2.0, 2.0)), MANIFEST)
    assert report["conclusion"] == "no_effect" and report["rows_needed"] > 19
    assert f"would take about {report['rows_needed']:,} rows to show" in render_words(report)
    assert f"大约需要 {report['rows_needed']:,} 条数据" in render_words(report, "zh-CN")


@pytest.fixture(scope="module")
def answered_alike():
    """40 questions with 6 scored answers each, none better than the others: any two of them may be base and adapter."""
    rows, pool = make_rows(40), []
    for row in rows:
        texts = [answer([row], skill=0.5, nats=2.0, seed=hash_of(row["id"], number))[0][0] for number in range(6)]
        stopped = [hash_of(row["id"], number) % 3 > 0 for number in range(6)]
        pool.append(evaluate_generations(texts, [row["reference"]] * 6, stopped, "en")[1])
    return rows, pool


def hash_of(*parts) -> int:
    return zlib.crc32(repr(parts).encode())


def verdicts_of_draws(run, answered_alike, rows, draws, lower=0.0):
    """Conclusions and verdicts of evaluations that differ by chance only, but for `lower` nats per token of the adapter."""
    questions, pool = answered_alike
    draw = np.random.default_rng(rows)
    found = []
    for _ in range(draws):
        predictions = []
        for number in draw.integers(len(questions), size=rows):
            tokens = int(draw.lognormal(3.5, 0.8)) + 1
            scores = [pool[number][pick] for pick in draw.integers(6, size=2)]
            # How far a side's loss of a row is from the row's own differs widely from row to row, and is never negative.
            nats = tokens * draw.gamma(4, 0.5) + tokens * draw.gamma(1, 0.2, size=2) - tokens * np.array([0, lower])
            sides = [{**score, "nll": float(nll), "target_tokens": tokens} for score, nll in zip(scores, nats)]
            row = {**questions[number], "target_tokens": tokens}
            predictions += join_predictions([row], sides[:1], sides[1:], [""], [""])
        report = build_report(run, predictions, MANIFEST, resamples=400)
        found.append((report["conclusion"], set(report["verdicts"].values())))
    return found


def shares(found) -> tuple[float, float, float]:
    """Parts of the evaluations whose headline names a difference, that name one in any metric, that say "helped"."""
    headline = [conclusion in ("helped", "hurt", "mixed") for conclusion, _ in found]
    anything = [bool(verdicts & {"better", "worse", "longer", "shorter"}) for _, verdicts in found]
    return float(np.mean(headline)), float(np.mean(anything)), float(np.mean([said == "helped" for said, _ in found]))


def test_chance_is_seldom_taken_for_a_difference_and_a_difference_seldom_for_chance(run, answered_alike):
    # 4 % of 100 would exceed 9 once in 200 suites if the draws were not always the same; by intervals alone 33 do.
    headline, anything, _ = shares(verdicts_of_draws(run, answered_alike, 19, 100))
    assert headline <= 0.09 and anything <= 0.1
    assert shares(verdicts_of_draws(run, answered_alike, 19, 40, lower=0.5))[2] >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 6, 19, 50, 200])
def test_at_most_one_evaluation_in_twenty_is_wrong_when_nothing_changed(run, answered_alike, rows, capsys):
    headline, anything, _ = shares(verdicts_of_draws(run, answered_alike, rows, 1000))
    _, _, helped = shares(verdicts_of_draws(run, answered_alike, rows, 100, lower=0.5))
    with capsys.disabled():
        print(
            f"\n{rows} rows, no difference: headline {headline:.1%}, any metric {anything:.1%}; -0.5 nats: helped {helped:.0%}"
        )
    assert headline <= 0.05 and anything <= 0.05
    assert helped >= {5: 0, 6: 0.2, 19: 0.8, 50: 0.9, 200: 0.9}[rows]  # else "mixed", by one metric in twenty
