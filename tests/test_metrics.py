"""Scores of generated answers against sacrebleu and rouge-score called directly, and against figures worked by hand."""

import itertools
import json
import subprocess
import sys
from statistics import NormalDist

import evaluate
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

from evaluation.metrics import (
    BETTER,
    compare,
    evaluate_generations,
    evaluate_losses,
    judge,
    language_of,
    normalise,
    rows_needed,
    score_row,
    signature_of,
    split_words,
)
from sft.errors import UserError

ENGLISH = [
    ("HCCL carries the gradients between the cards.", "HCCL is the library that carries gradients between NPUs."),
    ("Set the batch size to 4.", "Set per_device_train_batch_size to 4 and accumulate twice."),
    ("LoRA trains two small matrices per layer.", "LoRA trains two small matrices per layer."),
    ("", "A barrier makes every rank wait."),
    ("I do not know, I do not know, I do not know.", "Use bf16 on Ascend 910B."),
]
CHINESE = [
    ("梯度同步由HCCL完成，每张卡各算一份。", "每张卡的梯度由 HCCL 同步。"),
    ("学习率应设为 2e-4。", "学习率默认是2e-4，采用余弦退火。"),
    ("不知道", "全局批大小等于每卡批大小乘以累积步数再乘以卡数。"),
    ("", "检查点只由主进程写入。"),
]


def split(pairs):
    return [list(column) for column in zip(*pairs)]


@pytest.mark.parametrize("pairs, tokenizer", [(ENGLISH, "13a"), (CHINESE, "zh")])
def test_corpus_bleu_and_chrf_are_those_of_sacrebleu(pairs, tokenizer):
    predictions, references = split(pairs)
    scores, rows = evaluate_generations(predictions, references)
    # Relative 1e-12: the same formula in another order of floating-point operations.
    assert scores["bleu"] == pytest.approx(
        BLEU(tokenize=tokenizer).corpus_score(predictions, [references]).score, rel=1e-12
    )
    assert scores["chrf"] == pytest.approx(CHRF().corpus_score(predictions, [references]).score, rel=1e-12)
    for row, prediction, reference in zip(rows, predictions, references):
        assert row["chrf"] == pytest.approx(CHRF().sentence_score(prediction, [reference]).score, rel=1e-12)


def test_corpus_bleu_smooths_missing_orders_as_sacrebleu_does():
    predictions, references = ["the cat sat down there", "a dog"], ["the dog is sitting here", "a dog"]
    scores, _ = evaluate_generations(predictions, references)
    # Matches 3, 1, 0, 0 of 7, 5, 3, 2: precisions 3/7, 1/5, 1/(2·3), 1/(4·2); equal lengths, so no brevity penalty.
    assert scores["bleu"] == pytest.approx(100 * (3 / 7 * 1 / 5 * 1 / 6 * 1 / 8) ** 0.25)
    assert scores["bleu"] == pytest.approx(BLEU().corpus_score(predictions, [references]).score)


def test_mixed_rows_make_one_bleu_corpus_each_cut_by_its_own_tokenizer():
    predictions, references = split(ENGLISH + CHINESE)
    scores, rows = evaluate_generations(predictions, references)
    assert [row["language"] for row in rows] == ["en"] * 5 + ["zh"] * 4
    english, chinese = BLEU(tokenize="13a").tokenizer, BLEU(tokenize="zh").tokenizer
    cut_predictions, cut_references = (
        [english(text) for text in column[:5]] + [chinese(text) for text in column[5:]]
        for column in (predictions, references)
    )
    expected = BLEU(tokenize="none").corpus_score(cut_predictions, [cut_references]).score
    assert scores["bleu"] == pytest.approx(expected, rel=1e-12)


def test_rouge_l_is_that_of_rouge_score():
    scorer = RougeScorer(["rougeL"])
    for prediction, reference in ENGLISH:
        expected = scorer.score(reference, prediction)["rougeL"].fmeasure
        assert score_row(prediction, reference)["rougeL"] == pytest.approx(expected, rel=1e-12)


def test_rouge_l_of_chinese_is_that_of_rouge_score_over_jieba_words():
    class Words:
        def tokenize(self, text):
            return split_words(text, "zh")

    scorer = RougeScorer(["rougeL"], tokenizer=Words())
    for prediction, reference in CHINESE:
        expected = scorer.score(reference, prediction)["rougeL"].fmeasure
        assert score_row(prediction, reference)["rougeL"] == pytest.approx(expected, rel=1e-12)


def test_english_scores_worked_by_hand():
    row = score_row("The cat sat on a mat!", "A cat is on the mat")
    # Without articles: cat sat on mat | cat is on mat, 3 words in common of 4 and 4.
    assert row["token_f1"] == 0.75
    # With them: the cat sat on a mat | a cat is on the mat; longest common subsequence cat on mat, 3 of 6 and 6.
    assert row["rougeL"] == 0.5
    assert row["exact_match"] == 0.0
    assert score_row("The  cat, sat.", "cat sat")["exact_match"] == 1.0


def test_chinese_scores_worked_by_hand():
    assert split_words("梯度同步用HCCL，很快。", "zh") == ["梯度", "同步", "用", "hccl", "很快"]
    row = score_row("梯度同步很快", "梯度同步用HCCL，很快。")
    # 梯度 同步 很快 are 3 of 3 and 3 of 5: F1 = 2·3 / 8.
    assert row["token_f1"] == 0.75
    assert row["rougeL"] == 0.75
    assert score_row("使用 HCCL 同步梯度", "使用ＨＣＣＬ同步梯度。")["exact_match"] == 1.0


@pytest.mark.parametrize(
    "sentence", ["梯度由 HCCL 在各卡之间同步。", "是", "不知道", "设置 ASCEND_RT_VISIBLE_DEVICES=0,1 后重启。"]
)
def test_chinese_sentence_has_full_marks_against_itself(sentence):
    scores, rows = evaluate_generations([sentence], [sentence])
    assert rows[0]["language"] == "zh"
    assert {name: scores[name] for name in ("exact_match", "token_f1", "rougeL")} == dict.fromkeys(
        ("exact_match", "token_f1", "rougeL"), 1.0
    )
    assert (scores["bleu"], scores["chrf"], rows[0]["chrf"]) == (100.0, 100.0, 100.0)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Cf"]), min_size=1, max_size=40))
def test_any_answer_has_full_marks_against_itself_and_none_against_silence(text):
    if not text.strip():
        return
    scores, _ = evaluate_generations([text], [text])
    full = {"exact_match": 1.0, "token_f1": 1.0, "rougeL": 1.0, "bleu": 100.0, "chrf": 100.0}
    assert {name: scores[name] for name in full} == pytest.approx(full)
    silent, _ = evaluate_generations([" "], [text])
    assert {name: silent[name] for name in full} == dict.fromkeys(full, 0.0)


def test_empty_answers_count_as_wrong():
    scores, rows = evaluate_generations(["yes it is", "", " \n"], ["yes it is"] * 3)
    assert [row["empty"] for row in rows] == [False, True, True]
    for name, expected in {"exact_match": 1 / 3, "token_f1": 1 / 3, "rougeL": 1 / 3, "empty_rate": 2 / 3}.items():
        assert scores[name] == pytest.approx(expected)
    # One of three references answered: the brevity penalty is e^(1 − 9/3).
    assert scores["bleu"] == pytest.approx(100 * np.exp(-2))
    nothing, _ = evaluate_generations(["", "", ""], ["a b", "中文", ""])
    assert {name: nothing[name] for name in ("exact_match", "token_f1", "rougeL", "bleu", "chrf", "empty_rate")} == {
        "exact_match": 0.0, "token_f1": 0.0, "rougeL": 0.0, "bleu": 0.0, "chrf": 0.0, "empty_rate": 1.0
    }  # fmt: skip


def test_loss_is_nats_per_target_token_not_the_mean_of_rows():
    scores, _ = evaluate_generations(["a", "b"], ["a", "b"], nll=[2.0, 30.0], target_tokens=[4, 12])
    assert scores["loss"] == 2.0
    assert scores["perplexity"] == pytest.approx(7.38905609893065)


def test_health_of_generation_worked_by_hand():
    scores, rows = evaluate_generations(
        ["a b c d a b c d", "ok", "梯度同步", ""], ["x", "ok", "梯度", "y"], [False, True, True, True]
    )
    # Words a b c d a b c d: five 4-grams, the last equals the first.
    assert [row["repetition"] for row in rows] == pytest.approx([0.2, 0, 0, 0])
    assert [row["words"] for row in rows] == [8, 1, 2, 0]
    expected = {"stop_rate": 0.75, "truncated_rate": 0.25, "empty_rate": 0.25, "repetition": 0.05, "mean_length": 2.75}
    assert {name: scores[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Use HCCL on NPU.", "en"),
        ("使用 HCCL。", "zh"),
        ("用 torch.distributed.init_process_group(backend='hccl', timeout=timedelta(seconds=1860)) 初始化", "zh"),
        (
            "The term 集合通信 means collective communication, the exchange of data between all of the ranks in a job.",
            "en",
        ),
        ("ひらがなだけ", "zh"),
        ("Привет", "en"),
        ("", "en"),
    ],
)
def test_language_is_told_by_characters_against_words(text, expected):
    assert language_of(text) == expected


def test_language_can_be_overridden():
    assert score_row("昇腾芯片", "昇腾 芯片", language="en")["token_f1"] == 0.0
    assert score_row("昇腾芯片", "昇腾 芯片", language="zh")["exact_match"] == 1.0
    with pytest.raises(UserError, match="'fr' is unknown: choose one of auto, en, zh"):
        evaluate_generations(["a"], ["a"], language="fr")


def test_normalise_keeps_what_is_nothing_but_punctuation():
    assert normalise("The U.S. （Ｔｅｓｔ）", "en") == "us test"
    assert normalise("!", "en") == "!" != normalise("?", "en")
    assert normalise("学习 率：2e-4", "zh") == "学习率2e4"


def bootstrap_slowly(base, adapter, score, seed, resamples):
    """Scores each resample from its texts, by sacrebleu itself."""
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        picked = generator.integers(len(base), size=len(base))
        drawn.append(score([adapter[i] for i in picked]) - score([base[i] for i in picked]))
    return np.percentile(drawn, [2.5, 97.5])


def test_bootstrap_over_sums_equals_scoring_each_resample_with_sacrebleu():
    predictions, references = split(ENGLISH)
    base = list(zip(predictions, references))
    adapter = [(reference[: len(reference) * 2 // 3], reference) for reference in references]
    _, base_rows = evaluate_generations(predictions, references)
    _, adapter_rows = evaluate_generations([prediction for prediction, _ in adapter], references)
    difference = compare(base_rows, adapter_rows, seed=7, resamples=200)
    for name, metric in {"bleu": BLEU(effective_order=True), "chrf": CHRF()}.items():

        def score(pairs, metric=metric):
            predictions, references = split(pairs)
            return metric.corpus_score(predictions, [references]).score

        assert difference[name]["mean"] == pytest.approx(score(adapter) - score(base))
        assert difference[name]["ci95"] == pytest.approx(bootstrap_slowly(base, adapter, score, 7, 200))


def test_bootstrap_of_loss_resamples_sums_of_tokens():
    texts = ["a"] * 3
    nll = {"base": [9.0, 2.0, 40.0], "adapter": [6.0, 2.0, 20.0]}
    _, base_rows = evaluate_generations(texts, texts, nll=nll["base"], target_tokens=[3, 1, 10])
    _, adapter_rows = evaluate_generations(texts, texts, nll=nll["adapter"], target_tokens=[3, 1, 10])
    difference = compare(base_rows, adapter_rows)["loss"]
    assert difference["mean"] == pytest.approx((28 - 51) / 14)
    # The widest resamples, each of odds 1/27 > 2.5 %: three times row 2 (no change), three times row 3 (20 − 40 of 10).
    assert difference["ci95"] == pytest.approx([-2.0, 0.0])
    # Nats differ by -3, 0 and -20: 4 of the 8 sign patterns give 23 or -23, two for each as the 0 has two signs.
    assert difference["p"] == 4 / 8


def p_slowly(base, adapter, score):
    """Scores the texts after each possible way of swapping the two sides, by sacrebleu itself."""
    seen = abs(score(adapter) - score(base))
    ways = list(itertools.product([False, True], repeat=len(base)))
    as_far = 0
    for way in ways:
        left = [b if swap else a for swap, a, b in zip(way, base, adapter)]
        right = [a if swap else b for swap, a, b in zip(way, base, adapter)]
        as_far += abs(score(right) - score(left)) >= seen - 1e-9
    return as_far / len(ways)


def test_p_is_the_rank_among_all_swaps_scored_with_sacrebleu():
    predictions, references = split(ENGLISH)
    base = list(zip(predictions, references))
    adapter = [(reference[: len(reference) * 2 // 3], reference) for reference in references]
    _, base_rows = evaluate_generations(predictions, references)
    _, adapter_rows = evaluate_generations([prediction for prediction, _ in adapter], references)
    difference = compare(base_rows, adapter_rows)
    for name, metric in {"bleu": BLEU(effective_order=True), "chrf": CHRF()}.items():

        def score(pairs, metric=metric):
            predictions, references = split(pairs)
            return metric.corpus_score(predictions, [references]).score

        assert difference[name]["p"] == p_slowly(base, adapter, score)


def test_p_of_many_rows_is_close_to_the_normal_approximation():
    draw = np.random.default_rng(4)
    nats = draw.normal(0.12, 1.0, size=300)
    _, base_rows = evaluate_losses([50.0] * 300, [20] * 300)
    _, adapter_rows = evaluate_losses((50.0 + nats).tolist(), [20] * 300)
    z = abs(nats.sum()) / np.sqrt((nats**2).sum())
    expected = 2 * (1 - NormalDist().cdf(z))
    # 10,000 swaps: three standard errors of a p of 0.04 are 0.006.
    assert compare(base_rows, adapter_rows)["loss"]["p"] == pytest.approx(expected, abs=0.006)


def differences(**p_values):
    return {name: {"mean": -0.1 if name in ("loss", "perplexity") else 0.1, "p": p} for name, p in p_values.items()}


@pytest.mark.parametrize(
    "p_values, better",
    [
        ({"loss": 0.04, "perplexity": 0.9}, ["loss", "perplexity"]),
        ({"loss": 0.041, "perplexity": 0.001}, []),  # perplexity is e^loss: one test for both
        # After the loss the others share 5 %: 0.01 of 5 tests, then 0.0125 of 4, then 0.0167 of 3 stops it.
        ({"loss": 0.01, "bleu": 0.0125, "chrf": 0.01, "rougeL": 0.017, "token_f1": 0.018, "stop_rate": 0.019}, ["loss", "bleu", "chrf"]),
        # Without it they share 1 %: 0.005 of 2 tests, then 0.01.
        ({"loss": 0.5, "bleu": 0.01, "chrf": 0.005}, ["bleu", "chrf"]),
        ({"loss": 0.5, "bleu": 0.006, "chrf": 0.006}, []),
        ({"bleu": 0.025, "chrf": 0.05}, ["bleu", "chrf"]),  # no loss among the metrics: all 5 %
    ],
)  # fmt: skip
def test_the_loss_is_judged_first_and_the_others_share_what_is_left(p_values, better):
    verdicts = judge(differences(**p_values))
    assert list(verdicts) == list(p_values)
    assert [name for name, verdict in verdicts.items() if verdict == "better"] == better
    assert set(verdicts.values()) <= {"better", "no difference shown"}


@pytest.mark.parametrize(
    "name, mean, verdict",
    [
        ("loss", -0.1, "better"), ("loss", 0.1, "worse"), ("bleu", 0.1, "better"), ("stop_rate", -0.1, "worse"),
        ("mean_length", 1.0, "longer"), ("mean_length", -1.0, "shorter"),
    ],
)  # fmt: skip
def test_verdict_follows_the_sign_and_what_is_better(name, mean, verdict):
    assert judge({name: {"mean": mean, "p": 0.001}}) == {name: verdict}
    assert judge({name: {"mean": mean, "p": 0.06}}) == {name: "no difference shown"}


def test_truncated_rate_is_judged_with_stop_rate_and_counts_once():
    values = {
        "stop_rate": {"mean": 0.5, "p": 0.025},
        "truncated_rate": {"mean": -0.5, "p": 0.025},
        "chrf": {"mean": 0.1, "p": 0.5},
    }
    assert judge(values) == {"stop_rate": "better", "truncated_rate": "better", "chrf": "no difference shown"}


def test_rows_needed_show_a_difference_four_times_in_five():
    """The formula against a count: evaluations of as many rows as it asks for, of differences like those it was given."""
    draw = np.random.default_rng(5)

    def evaluation(nats):
        rows = len(nats)
        return evaluate_losses([40.0] * rows, [10] * rows)[1], evaluate_losses((40 + nats).tolist(), [10] * rows)[1]

    needed = rows_needed(*evaluation(np.array([0.5, -1.5] * 5000)))  # mean -0.5, deviation 1
    assert needed == 34  # (2.0537 + 0.8416)² · (1 / 0.5)² = 33.53
    draws = [evaluation(draw.normal(-0.5, 1.0, size=needed)) for _ in range(200)]
    found = [judge(compare(*sides, resamples=400))["loss"] == "better" for sides in draws]
    assert 0.7 <= np.mean(found) <= 0.9  # 80 % of 200, three standard errors
    base, _ = draws[0]
    assert rows_needed(base, base) is None
    assert rows_needed(base[:1], [{**base[0], "nll": 0.0}]) == 6


def test_identical_answers_differ_by_exactly_nothing():
    predictions, references = split(ENGLISH + CHINESE)
    nll, tokens = [0.1 * i + 0.37 for i in range(9)], list(range(3, 12))
    _, rows = evaluate_generations(predictions, references, [True] * 9, nll=nll, target_tokens=tokens)
    difference = compare(rows, [dict(row) for row in rows], seed=3)
    assert difference == {name: {"mean": 0.0, "ci95": [0.0, 0.0], "p": 1.0} for name in BETTER}
    assert list(difference) == list(BETTER)
    assert "-0.0" not in json.dumps(difference)


def test_comparison_is_the_same_for_the_same_seed_and_survives_json():
    predictions, references = split(ENGLISH)
    _, base_rows = evaluate_generations(predictions, references)
    _, adapter_rows = evaluate_generations(references, references)
    first = compare(base_rows, adapter_rows, seed=1)
    assert first == compare(json.loads(json.dumps(base_rows)), json.loads(json.dumps(adapter_rows)), seed=1)
    assert first != compare(base_rows, adapter_rows, seed=2)
    for name, difference in first.items():
        low, high = difference["ci95"]
        assert low <= difference["mean"] <= high, name


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"predictions": [], "references": []}, r"\{'predictions': 0, 'references': 0\}"),
        ({"predictions": ["a"], "references": ["a", "b"]}, r"\{'predictions': 1, 'references': 2\}"),
        ({"predictions": ["a"], "references": ["a"], "nll": [1.0]}, r"'nll': 1, 'target_tokens': 0\}"),
        ({"predictions": ["a"], "references": ["a"], "stopped": []}, r"'stopped': 0\}"),
    ],
)
def test_uneven_columns_are_refused(columns, message):
    with pytest.raises(UserError, match=message):
        evaluate_generations(**columns)


def test_unequal_rows_are_not_compared():
    _, rows = evaluate_generations(["a", "b"], ["a", "b"])
    with pytest.raises(UserError, match="cannot compare 2 rows with 1"):
        compare(rows, rows[:1])


def test_signature_names_versions_tokenizers_smoothing_and_decoding():
    predictions, references = split(ENGLISH + CHINESE)
    _, rows = evaluate_generations(predictions, references)
    signature = signature_of(rows, language="auto", decoding="greedy|max_new_tokens:64", seed=1)
    assert signature["language"] == "auto|en:5|zh:4"
    assert signature["decoding"] == "greedy|max_new_tokens:64"
    assert signature["verdict"] == "two-sided sign-flip test|swaps:all:512|level:5%|loss first:4%|others:Holm"
    assert "swaps:drawn:10000|seed:1|" in signature_of(rows * 3, "auto", "greedy", seed=1)["verdict"]
    assert signature["interval"] == "paired percentile bootstrap|level:95%|resamples:10000|seed:1|rows:9"
    # sacrebleu's own words for the settings that it was cross-checked with above.
    bleu, chrf = BLEU(effective_order=True), CHRF()
    bleu.corpus_score(["a"], [["a"]]), chrf.corpus_score(["a"], [["a"]])
    assert signature["bleu"].replace("tok:13a+zh", "tok:13a") == str(bleu.get_signature())
    assert signature["chrf"] == str(chrf.get_signature())
    assert "jieba-" not in signature_of(rows[:5], "auto", "greedy")["rougeL"]


def test_metric_module_loads_from_disk_and_gives_the_same_scores():
    predictions, references = split(ENGLISH + CHINESE)
    scores, rows = evaluate_generations(predictions, references, [True] * 9)
    metric = evaluate.load("metrics/qa_generation", keep_in_memory=True)
    assert metric.compute(predictions=predictions, references=references, stopped=[True] * 9) == scores
    result = metric.compute(predictions=predictions, references=references, stopped=[True] * 9, with_rows=True)
    assert result.pop("rows") == rows


def test_chinese_scores_print_nothing_and_do_not_import_torch():
    code = (
        "import sys; from evaluation.metrics import score_row; score_row('梯度同步', '梯度'); "
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_losses_alone_can_be_scored_and_compared():
    base, base_rows = evaluate_losses([4.0, 6.0], [2, 2])
    adapter, adapter_rows = evaluate_losses([2.0, 3.0], [2, 2])
    assert (base["loss"], adapter["loss"], list(base)) == (2.5, 1.25, ["loss", "perplexity"])
    assert compare(base_rows, adapter_rows)["loss"] == {"mean": -1.25, "ci95": [-1.5, -1.0], "p": 0.5}
    assert list(signature_of(base_rows, "auto", "none")) == ["loss", "interval", "verdict"]
