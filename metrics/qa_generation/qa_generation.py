"""Generated against reference answers, in English and Chinese: a metric for `evaluate` that needs no network."""

# One import per line: evaluate's check for missing packages reads this file line by line.
import datasets
import evaluate

from evaluation.metrics import evaluate_generations

_DESCRIPTION = """\
Scores generated answers: exact_match, token_f1, rougeL (0 to 1), bleu, chrf (0 to 100), and the health of generation.
Each row is cut into words by the rules of its own language, English or Chinese. An empty answer counts as wrong.
"""

_INPUTS = """\
Args:
    predictions: one generated answer per row.
    references: one reference answer per row.
    stopped: optional, per row: did generation end by itself (true) or at the token limit (false)?
    nll, target_tokens: optional, per row: the reference's summed negative log-likelihood and its number of tokens.
    language: "auto" (per row, by the script of the reference), "en" or "zh".
    with_rows: true adds "rows", the scores of each row, as `evaluation.metrics.compare` takes them.
Returns:
    a dict of floats: exact_match, token_f1, rougeL, bleu, chrf, empty_rate, repetition, mean_length; with `stopped`
    also stop_rate and truncated_rate; with `nll` also loss and perplexity.
Examples:
    >>> qa_generation = evaluate.load("metrics/qa_generation")
    >>> qa_generation.compute(predictions=["梯度同步用 HCCL。"], references=["梯度同步用 HCCL。"])["bleu"]
    100.0
"""


class QaGeneration(evaluate.Metric):
    """The wrapper that `evaluate` wants; the metrics themselves are in `evaluation.metrics`."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(
        self, predictions, references, stopped=None, nll=None, target_tokens=None, language="auto", with_rows=False
    ):
        scores, rows = evaluate_generations(predictions, references, stopped, language, nll, target_tokens)
        return scores | {"rows": rows} if with_rows else scores
