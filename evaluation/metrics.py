"""Scores of generated answers: per row, over all rows, and the difference of two models with its confidence interval.

Each row is reduced once to numbers that add up over rows (hits, n-gram counts, negative log-likelihood), and each
metric is a function of those sums: the figure over all rows and over a bootstrap resample are made by the same lines.
Scales: loss in nats per target token; exact_match, token_f1, rougeL and all rates 0 to 1; bleu and chrf 0 to 100.
"""

import functools
import itertools
import logging
import math
import re
import string
import tempfile
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import numpy as np
import sacrebleu
from sacrebleu.metrics import BLEU
from sacrebleu.metrics.helpers import extract_all_char_ngrams

from sft.errors import UserError

# Every metric in the order of the reports, and which way is better: 1 higher, -1 lower, 0 neither.
BETTER = {
    "loss": -1,
    "perplexity": -1,
    "exact_match": 1,
    "token_f1": 1,
    "rougeL": 1,
    "bleu": 1,
    "chrf": 1,
    "stop_rate": 1,
    "empty_rate": -1,
    "truncated_rate": -1,
    "repetition": -1,
    "mean_length": 0,
}
# Metrics that are the mean over rows of one field of the row.
MEANS = {
    "exact_match": "exact_match",
    "token_f1": "token_f1",
    "rougeL": "rougeL",
    "stop_rate": "stopped",
    "empty_rate": "empty",
    "truncated_rate": "truncated",
    "repetition": "repetition",
    "mean_length": "words",
}
LANGUAGES = ("auto", "en", "zh")
BLEU_TOKENIZERS = {"en": "13a", "zh": "zh"}
CHRF_ORDER, CHRF_BETA = 6, 2  # sacrebleu's defaults: chrF2, Popović 2015
RESAMPLES = 10_000
# How often any difference may be named when there is none, and which part of that the loss, tested first, may use up.
LEVEL, LOSS_LEVEL = 0.05, 0.04
FEWEST_ROWS = 6  # 2 of the 2⁶ sign patterns are the most extreme: p = 0.031; with 5 rows no p is below 0.0625
POWER = 0.8  # probability of seeing a difference on `rows_needed` rows
SAME_TEST = {"perplexity": "loss", "truncated_rate": "stop_rate"}  # another form of the same figure: no test of its own

_CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_WORD = re.compile(r"[^\W_]+")


def evaluate_generations(
    predictions: Sequence[str],
    references: Sequence[str],
    stopped: Sequence[bool] | None = None,
    language: str = "auto",
    nll: Sequence[float] | None = None,
    target_tokens: Sequence[int] | None = None,
) -> tuple[dict[str, float], list[dict]]:
    """Returns the metrics over all rows, and one dict of scores per row, ready for JSON and for `compare`.

    `stopped` tells whether generation ended by itself, not at the token limit; without it stop_rate and truncated_rate
    are left out. `nll` (the sum over a row's target tokens) and `target_tokens` together add loss and perplexity.

    Raises:
        UserError: no rows, columns of unequal length, nll without target_tokens, an unknown language.
    """
    columns = {"predictions": predictions, "references": references}
    columns |= {"stopped": stopped} if stopped is not None else {}
    columns |= {"nll": nll, "target_tokens": target_tokens} if nll is not None or target_tokens is not None else {}
    sizes = {name: 0 if column is None else len(column) for name, column in columns.items()}
    if len(set(sizes.values())) != 1 or not sizes["predictions"]:
        raise UserError(f"cannot score rows from columns of lengths {sizes}: give each column one entry per row")
    rows = [score_row(prediction, reference, language) for prediction, reference in zip(predictions, references)]
    for index, row in enumerate(rows):
        if stopped is not None:
            row |= {"stopped": bool(stopped[index]), "truncated": not stopped[index]}
        if nll is not None:
            row |= {"nll": float(nll[index]), "target_tokens": int(target_tokens[index])}
    return aggregate(rows), rows


def evaluate_losses(nll: Sequence[float], target_tokens: Sequence[int]) -> tuple[dict[str, float], list[dict]]:
    """Returns loss and perplexity over all rows, and one dict per row for `compare`: scores without generation."""
    rows = [{"nll": float(nats), "target_tokens": int(tokens)} for nats, tokens in zip(nll, target_tokens)]
    return aggregate(rows), rows


def score_row(prediction: str, reference: str, language: str = "auto") -> dict:
    """Returns the scores of one answer and its addends to corpus BLEU and chrF. An empty answer scores 0 everywhere."""
    language = language_of(reference, language)
    predicted, expected = split_words(prediction, language), split_words(reference, language)
    chrf_counts = count_chrf(prediction, reference)
    return {
        "language": language,
        "exact_match": float(bool(predicted) and normalise(prediction, language) == normalise(reference, language)),
        "token_f1": token_f1(prediction, reference, language),
        "rougeL": rouge_l(predicted, expected),
        "chrf": float(chrf_from(np.array([chrf_counts], dtype=float))[0]),
        "empty": not prediction.strip(),
        "repetition": repetition(predicted),
        "words": len(predicted),
        "bleu_counts": count_bleu(prediction, reference, language),
        "chrf_counts": chrf_counts,
    }


def aggregate(rows: Sequence[dict]) -> dict[str, float]:
    """Returns each metric over all rows; those whose fields the rows do not carry are left out."""
    sums = {field: column.sum(axis=0, keepdims=True) for field, column in _columns(rows).items()}
    return {name: float(value[0]) for name, value in _metrics(sums, len(rows)).items()}


def compare(
    base_rows: Sequence[dict], adapter_rows: Sequence[dict], seed: int = 42, resamples: int = RESAMPLES
) -> dict[str, dict]:
    """Returns {metric: {"mean": adapter − base, "ci95": [low, high], "p": of no difference}}, base and adapter paired by row.

    `mean` is the difference over the rows as they are. `ci95` is the paired percentile bootstrap (Koehn 2004, "Statistical
    Significance Tests for Machine Translation Evaluation"): both sides are resampled with the same rows, so what makes a
    row hard cancels out. It is too narrow on a few rows, so nothing is concluded from it. `p` is two-sided, of the sign-flip
    test (Fisher 1935; for corpus metrics: approximate randomization, Noreen 1989): were base and adapter the same, swapping
    their results in any row would change nothing, so the difference that was seen is ranked among those of all 2^rows
    swaps, or of `resamples` random ones. That is exact for any number of rows and any distribution.
    """
    if len(base_rows) != len(adapter_rows) or not base_rows:
        raise UserError(
            f"cannot compare {len(base_rows)} rows with {len(adapter_rows)}: give both sides the same rows, not none"
        )
    size = len(base_rows)
    sides = _columns(base_rows), _columns(adapter_rows)
    drawn = _differences(*sides, ((counts, 0 * counts) for counts in _draw(size, resamples, seed)))
    swapped = _differences(*sides, ((1 - swaps, swaps) for swaps in _swaps(size, resamples, seed)))
    return {
        name: {
            "mean": float(values[0]),
            "ci95": np.percentile(values[1:], [2.5, 97.5]).round(9).tolist(),
            # What was seen is itself one of the possibilities: no p is 0 (Phipson and Smyth 2010). 2e-9: rounding.
            "p": float((np.abs(swapped[name]) >= abs(values[0]) - 2e-9).mean()),
        }
        for name, values in drawn.items()
    }


def judge(difference: dict[str, dict]) -> dict[str, str]:
    """Returns what the differences of `compare` show: better, worse, longer, shorter, or no difference shown.

    Among evaluations in which nothing changed at most LEVEL name any difference, whatever the metrics. The loss is
    tested first, at LOSS_LEVEL; the others by Holm's step-down correction for their number (Holm 1979) at what is left,
    and at the whole LEVEL when the loss does differ (the fallback procedure of Wiens 2003).
    """
    tested = [name for name in difference if name != "loss" and name not in SAME_TEST]
    differs = dict.fromkeys(difference, False)
    if "loss" in difference:
        differs["loss"] = difference["loss"]["p"] <= LOSS_LEVEL
    level = LEVEL if differs.get("loss", True) else LEVEL - LOSS_LEVEL
    for tests_left, name in zip(range(len(tested), 0, -1), sorted(tested, key=lambda name: difference[name]["p"])):
        if difference[name]["p"] > level / tests_left + 1e-12:
            break
        differs[name] = True
    verdicts = {}
    for name, values in difference.items():
        up = values["mean"] > 0
        if not differs[SAME_TEST.get(name, name)]:
            verdicts[name] = "no difference shown"
        elif BETTER[name] == 0:
            verdicts[name] = "longer" if up else "shorter"
        else:
            verdicts[name] = "better" if up == (BETTER[name] > 0) else "worse"
    return verdicts


def rows_needed(base_rows: Sequence[dict], adapter_rows: Sequence[dict]) -> int | None:
    """Returns on how many rows a difference of the loss like the one seen here would show in POWER of all evaluations.

    The usual formula for the mean of paired differences of nats, n = ((z₁₋α⁄₂ + z_power) · deviation / mean)². None when no
    difference was seen, or when it is so small that a million rows would not show it.
    """
    nats = np.array([adapter["nll"] - base["nll"] for base, adapter in zip(base_rows, adapter_rows, strict=True)])
    mean = float(nats.mean())
    if len(nats) < 2 or not mean:
        return FEWEST_ROWS if mean else None
    normal = NormalDist()
    z = normal.inv_cdf(1 - LOSS_LEVEL / 2) + normal.inv_cdf(POWER)
    rows = (z * float(nats.std(ddof=1)) / mean) ** 2
    return max(FEWEST_ROWS, math.ceil(rows)) if rows <= 1_000_000 else None


def signature_of(
    rows: Sequence[dict], language: str, decoding: str, seed: int = 42, resamples: int = RESAMPLES
) -> dict[str, str]:
    """Returns the signature: for each metric what another tool would need to get the same figure."""
    loss = {"loss": "nats per target token: sum of nll / sum of target tokens"}
    swaps = f"all:{2 ** len(rows)}" if 2 ** len(rows) <= resamples else f"drawn:{resamples}|seed:{seed}"
    interval = {
        "interval": f"paired percentile bootstrap|level:95%|resamples:{resamples}|seed:{seed}|rows:{len(rows)}",
        "verdict": f"two-sided sign-flip test|swaps:{swaps}|level:{LEVEL:.0%}|loss first:{LOSS_LEVEL:.0%}|others:Holm",
    }
    counts = Counter(row["language"] for row in rows if "language" in row)
    if not counts:
        return loss | interval
    present = [name for name in BLEU_TOKENIZERS if counts[name]]
    jieba = f"jieba-{_jieba_version()}" if counts["zh"] else ""
    return {
        "language": f"{language}|" + "|".join(f"{name}:{counts[name]}" for name in present),
        **loss,
        "exact_match": "norm:NFKC,lower,no punctuation,no articles(en),no spaces(zh)",
        "token_f1": "tok:" + "+".join({"en": "squad", "zh": jieba}[name] for name in present),
        "rougeL": "f1|tok:"
        + "+".join({"en": "words", "zh": jieba}[name] for name in present)
        + "|stem:no|mean of rows",
        "bleu": f"nrefs:1|case:mixed|eff:yes|tok:{'+'.join(BLEU_TOKENIZERS[name] for name in present)}|smooth:exp|"
        f"version:{sacrebleu.__version__}",
        "chrf": f"nrefs:1|case:mixed|eff:yes|nc:{CHRF_ORDER}|nw:0|space:no|version:{sacrebleu.__version__}",
        "repetition": "seq-rep-4",
        "decoding": decoding,
        **interval,
    }


def language_of(text: str, language: str = "auto") -> str:
    """Returns "en" or "zh": zh when at least a fifth of the units (one CJK character, or one other word) is CJK.

    Characters weigh against words, not letters: Chinese about software is full of long English names, and scoring it as
    English costs far more than the reverse. Kana counts as CJK, being written without spaces too.
    """
    if language not in LANGUAGES:
        raise UserError(f"language {language!r} is unknown: choose one of {', '.join(LANGUAGES)}")
    if language != "auto":
        return language
    cjk = len(_CJK.findall(text))
    others = len(_WORD.findall(_CJK.sub(" ", text)))
    return "zh" if cjk and cjk >= 0.2 * (cjk + others) else "en"


def normalise(text: str, language: str) -> str:
    """Returns the text as exact_match sees it: the rules of SQuAD 1.1 (Rajpurkar 2016) for all of Unicode.

    zh loses its spaces too. Nothing but punctuation and articles stays as it is, else all such texts would be equal.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    kept = "".join(c for c in text if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    if language == "en":
        kept = re.sub(r"\b(a|an|the)\b", " ", kept)
    space = "" if language == "zh" else " "
    return space.join(kept.split()) or space.join(text.split())


def split_words(text: str, language: str) -> list[str]:
    """Returns lower-case words: for en runs of letters and digits, as rouge-score but of any alphabet; for zh jieba's.

    A text without any letter or digit gives its characters, so that nothing but blank text has no words.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    pieces = _jieba().lcut(text) if language == "zh" else _WORD.findall(text)
    return [piece for piece in pieces if _WORD.search(piece)] or list("".join(text.split()))


def token_f1(prediction: str, reference: str, language: str) -> float:
    """Returns the F1 of the words in common, with repeats: for en as SQuAD 1.1 counts it, for zh over jieba's words."""
    if language == "en":
        predicted, expected = normalise(prediction, "en").split(), normalise(reference, "en").split()
    else:
        predicted, expected = split_words(prediction, "zh"), split_words(reference, "zh")
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def rouge_l(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Returns ROUGE-L (Lin 2004) as F1: 2 · LCS / (words of both)."""
    common = _longest_common_subsequence(predicted, expected)
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def repetition(words: Sequence[str], order: int = 4) -> float:
    """Returns the share of n-grams that stood before in the text: seq-rep-n of Welleck et al. (arXiv 1908.04319)."""
    ngrams = [tuple(words[start : start + order]) for start in range(len(words) - order + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def count_bleu(prediction: str, reference: str, language: str) -> list[int]:
    """Returns a row's addends to corpus BLEU: lengths of prediction and reference, matches and n-grams of order 1–4.

    Rows of both languages are cut by their own tokenizer and then summed together: one corpus.
    """
    score = _bleu(language).sentence_score(prediction, [reference])
    return [score.sys_len, score.ref_len, *score.counts, *score.totals]


def count_chrf(prediction: str, reference: str) -> list[int]:
    """Returns a row's addends to corpus chrF: n-grams of prediction, of reference and in both, for each order 1–6."""
    counts = []
    predicted, expected = (extract_all_char_ngrams(text, CHRF_ORDER) for text in (prediction, reference))
    for ours, theirs in zip(predicted, expected):
        # Like sacrebleu: an order that the reference is too short for does not count against the prediction.
        counts += [ours.total() if theirs else 0, theirs.total(), (ours & theirs).total()]
    return counts


def bleu_from(sums: np.ndarray) -> np.ndarray:
    """Returns BLEU of summed addends, `(B, 10)` → `(B,)`; sacrebleu's formula with "exp" smoothing and effective order.

    Effective order matters only when no prediction has four words: plain corpus BLEU is then 0 for a perfect answer.
    """
    predicted, expected, correct, total = sums[:, 0], sums[:, 1], sums[:, 2:6], sums[:, 6:10]
    exists = total > 0
    missed = exists & (correct == 0)
    shown = np.where(missed, 0.5 ** np.cumsum(missed, axis=1), correct)
    logs = np.log(np.where(exists, shown, 1) / np.where(exists, total, 1))
    precision = np.exp(logs.sum(axis=1) / np.maximum(exists.sum(axis=1), 1))
    brevity = np.exp(np.minimum(0, 1 - expected / np.maximum(predicted, 1)))
    return np.where(correct.any(axis=1), 100 * brevity * precision, 0.0)


def chrf_from(sums: np.ndarray) -> np.ndarray:
    """Returns chrF of summed addends, `(B, 18)` → `(B,)`; sacrebleu's formula without epsilon smoothing."""
    predicted, expected, common = np.moveaxis(sums.reshape(len(sums), CHRF_ORDER, 3), 2, 0)
    exists = (predicted > 0) & (expected > 0)
    orders = np.maximum(exists.sum(axis=1), 1)
    precision = np.where(exists, common / np.maximum(predicted, 1), 0).sum(axis=1) / orders
    recall = np.where(exists, common / np.maximum(expected, 1), 0).sum(axis=1) / orders
    below = CHRF_BETA**2 * precision + recall
    return np.where(below > 0, 100 * (1 + CHRF_BETA**2) * precision * recall / np.where(below > 0, below, 1), 0.0)


def _columns(rows: Sequence[dict]) -> dict[str, np.ndarray]:
    """Returns what adds up over rows, field by field: `(rows,)` or `(rows, addends)` float64."""
    fields = ("nll", "target_tokens", "bleu_counts", "chrf_counts", *MEANS.values())
    return {field: np.array([row[field] for row in rows], dtype=float) for field in fields if field in rows[0]}


def _metrics(sums: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Returns every metric that the summed fields allow, each `(B,)`, in the order of `BETTER`."""
    values = {name: sums[field] / rows for name, field in MEANS.items() if field in sums}
    if "bleu_counts" in sums:
        values |= {"bleu": bleu_from(sums["bleu_counts"]), "chrf": chrf_from(sums["chrf_counts"])}
    if "nll" in sums:
        loss = sums["nll"] / sums["target_tokens"]
        values |= {"loss": loss, "perplexity": np.exp(loss)}
    return {name: values[name] for name in BETTER if name in values}


def _differences(base: dict[str, np.ndarray], adapter: dict[str, np.ndarray], mixtures) -> dict[str, np.ndarray]:
    """Returns each metric's adapter − base: first of the rows as they are, then of each mixture of them.

    mixtures: yields (own, other), `(B, rows)` each: how often a row's result counts on its own side, and on the other's.
    """
    size = len(next(iter(base.values())))
    found: dict[str, list[np.ndarray]] = {}
    for own, other in itertools.chain([(np.ones((1, size)), np.zeros((1, size)))], mixtures):
        before, after = (
            _metrics({field: own @ mine[field] + other @ theirs[field] for field in mine if field in theirs}, size)
            for mine, theirs in ((base, adapter), (adapter, base))
        )
        for name in [name for name in before if name in after]:
            # Rounded below any digit that means something, so that the order of a sum cannot turn 0 into 1e-17.
            found.setdefault(name, []).append(np.round(after[name] - before[name], 9) + 0.0)
    return {name: np.concatenate(values) for name, values in found.items()}


def _swaps(rows: int, resamples: int, seed: int, chunk: int = 500) -> Iterator[np.ndarray]:
    """Yields which rows swap their sides, `(≤ chunk, rows)` of 0 and 1: each way but "none" when there are at most
    `resamples` ways, else that many random ones."""
    every = 2**rows <= resamples
    generator = np.random.default_rng(seed)
    for start in range(0, 2**rows - 1 if every else resamples, chunk):
        size = min(chunk, (2**rows - 1 if every else resamples) - start)
        if every:
            yield (np.arange(start + 1, start + size + 1)[:, None] >> np.arange(rows) & 1).astype(float)
        else:
            yield generator.integers(2, size=(size, rows)).astype(float)


def _draw(rows: int, resamples: int, seed: int, chunk: int = 500) -> Iterator[np.ndarray]:
    """Yields how often each row is in each resample, `(≤ chunk, rows)` float64, in chunks that fit into memory."""
    generator = np.random.default_rng(seed)
    for start in range(0, resamples, chunk):
        size = min(chunk, resamples - start)
        picked = generator.integers(rows, size=(size, rows)) + rows * np.arange(size)[:, None]
        yield np.bincount(picked.ravel(), minlength=size * rows).reshape(size, rows).astype(float)


def _longest_common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Returns its length, by bit-parallel dynamic programming (Hyyrö 2004, "Bit-Parallel LCS-length Computation")."""
    places: dict[str, int] = {}
    for index, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << index
    full = (1 << len(left)) - 1
    unmatched = full
    for word in right:
        hits = unmatched & places.get(word, 0)
        unmatched = (unmatched + hits | unmatched - hits) & full
    return len(left) - unmatched.bit_count()


@functools.cache
def _bleu(language: str) -> BLEU:
    return BLEU(tokenize=BLEU_TOKENIZERS[language], effective_order=True)


@functools.cache
def _jieba_module():
    """Returns jieba, imported when a row needs it, quietly: it warns about pkg_resources and logs each start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import jieba
    jieba.setLogLevel(logging.WARNING)
    return jieba


def _jieba_version() -> str:
    return _jieba_module().__version__


@functools.cache
def _jieba():
    """Returns a segmenter with jieba's own dictionary, unmoved by words that other code has added.

    It builds its tables anew (0.6 s) in a directory of its own; by default jieba loads what lies at /tmp/jieba.cache.
    """
    segmenter = _jieba_module().Tokenizer()
    with tempfile.TemporaryDirectory() as directory:
        segmenter.tmp_dir = directory
        segmenter.initialize()
    return segmenter
