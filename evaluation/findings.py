"""What a report says, word by word, in either language: the same sentences, figures and facts for Markdown and HTML."""

from collections.abc import Callable

from evaluation.metrics import BETTER, FEWEST_ROWS
from evaluation.phrases import LANGUAGES, METRICS, PHRASES, format_value

SAID = {  # verdict → the sentence that names the metrics with it
    "better": "said_better",
    "worse": "said_worse",
    "longer": "said_longer",
    "shorter": "said_shorter",
    "no difference shown": "said_none",
}


def speaker(language: str) -> Callable[..., str]:
    """Returns a function that gives a phrase in this language with its blanks filled in."""
    index = LANGUAGES.index(language)
    return lambda key, **values: PHRASES[key][index].format(**values)


def notices(report: dict, language: str) -> list[str]:
    """Returns what a reader must know before the figures: simulated hardware, other rows, an adapter that does nothing."""
    say = speaker(language)
    shown = {"rows": report["rows"], "held_out": report["data"]["rows_written"]["eval"]}
    return [say(notice, **shown) for notice in (["simulated"] if report["simulated"] else []) + report["warnings"]]


def sentences(report: dict, language: str) -> list[str]:
    """Returns the headline, then which metrics differ and which do not, a sentence each."""
    say = speaker(language)
    comma = {"en": ", ", "zh-CN": "、"}[language]
    needed = report["rows_needed"]
    said = [say(report["conclusion"], rows=report["rows"], fewest=FEWEST_ROWS)]
    said += [say("said_needed", needed=needed)] if needed and needed > max(report["rows"], FEWEST_ROWS) else []
    for verdict, phrase in SAID.items():
        names = [name for name, given in report["verdicts"].items() if given == verdict]
        said += [say(phrase, names=comma.join(names))] if names else []
    return said


def comparison(report: dict, language: str) -> list[dict[str, str]]:
    """Returns base against adapter, a metric each: metric, base, adapter, difference, interval, verdict, as they are shown."""
    say = speaker(language)
    rows = []
    for name, difference in report["difference"].items():
        low, high = (format_value(name, bound, signed=True) for bound in difference["ci95"])
        rows.append(
            {
                "metric": name + {1: " ↑", -1: " ↓", 0: ""}[BETTER[name]],
                "base": format_value(name, report["base"][name]),
                "adapter": format_value(name, report["adapter"][name]),
                "difference": format_value(name, difference["mean"], signed=True),
                "interval": f"{low} … {high}",
                "verdict": say(report["verdicts"][name]),
            }
        )
    return rows


def metric_meanings(report: dict, language: str) -> list[tuple[str, str]]:
    """Returns (name, meaning) of each metric of the report."""
    return [(name, METRICS[name][LANGUAGES.index(language)]) for name in report["difference"]]


def facts(
    report: dict, language: str, text: Callable[[str], str] = str, code: Callable[[str], str] = str
) -> list[tuple[str, str]]:
    """Returns (label, text) of what was trained, on what and where; an unfinished run has fewer of them.

    text, code: what makes a string from the run harmless in the medium, and a name or path that is shown as it is.
    """
    say = speaker(language)
    config, provenance, environment, summary = report["run"].values()
    data = report["data"]
    values = {**config, **data, **data["rows_written"], **summary}
    values = {name: text(value) if isinstance(value, str) else value for name, value in values.items()}
    origin = f"{code(config['dataset_dir'])}, SHA-256 {code(provenance['dataset_sha256'])}"
    model = code(config["model_name_or_path"])
    if provenance["model_sha256"]:
        model += f", SHA-256 {code(provenance['model_sha256'])}"
    facts = {
        "base_model": model,
        "method": say("method_value", modules=code(", ".join(config["target_modules"])), **values),
        "data": origin,
        "rows": say("rows_value", **values),
        "target_tokens": say("target_tokens_value", **data["target_tokens"]),
        "learning_rate": say("learning_rate_value", **values),
    }
    if data["modes"]:
        facts["asked"] = say(
            "asked_value", thinking=data["modes"].get("thinking", 0), plain=data["modes"].get("plain", 0)
        )
    if summary:
        trainable, total = summary["trainable_parameters"], summary["total_parameters"]
        peaks = ", ".join(f"{peak / 2**30:.1f}" for peak in summary["peak_memory_bytes"])
        facts |= {
            "parameters": say("parameters_value", trainable=trainable, total=total, share=trainable / total),
            "steps": say("steps_value", **values),
            "train_loss": say("train_loss_value", **values),
            **_delivered(summary, say),
            "hardware": f"{summary['world_size']} × {text(environment['device_name'])}, {text(str(summary['backend']))}",
            "weights": text(provenance["base_dtype"]),
            "cost": say("cost_value", peak=peaks, **values),
        }
    facts["versions"] = text(", ".join(f"{name} {version}" for name, version in environment["versions"].items()))
    return [(say(label), text) for label, text in facts.items()]


def _delivered(summary: dict, say: Callable[..., str]) -> dict[str, str]:
    """Returns which step's adapter was evaluated, with its held-out loss and that of the other that could have been
    delivered; nothing for runs that do not tell."""
    delivered, best = summary.get("delivered"), summary.get("best")
    if not delivered:
        return {}
    last = {"step": summary["steps"], "eval_loss": summary.get("eval_loss")}
    if delivered["step"] != last["step"]:
        phrase, other = "delivered_best", last
    elif best and best["step"] != last["step"]:
        phrase, other = "delivered_last", best
    else:
        phrase, other = "delivered_only", last
    losses = [part.get("eval_loss") for part in (delivered, other)]
    loss, other_loss = ("–" if value is None else f"{value:.4f}" for value in losses)
    shown = {"step": delivered["step"], "loss": loss, "other_step": other["step"], "other_loss": other_loss}
    return {"delivered": say(phrase, **shown)}
