"""report.html: whole in one file, nothing loaded, nothing injected, and what a reader does with it in a real browser."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from evaluation.report import build_report
from evaluation.webpage import interval_bar, render_page
from tests.browser import Browser
from tests.test_report import EVIL, MANIFEST, hostile_report, make_metrics, make_predictions, run, run_dir  # noqa: F401

PAYLOADS = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "'\"><svg onload=document.title='owned'>",
    "<!--<script>",
    "\u2028document.title='owned'\u2029",
    "{{ 7 * 7 }}{% raw %}",
]


class Page(HTMLParser):
    """What a page would load or run: attributes by tag, scripts, and the text of the element that holds the data."""

    def __init__(self, text: str):
        super().__init__()
        self.attributes, self.scripts, self.open = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.open = tag
        if tag == "script":
            self.scripts.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open == "script":
            self.scripts[-1][1] += data


@pytest.fixture
def hostile(run, monkeypatch):  # noqa: F811
    """(page, lines of predictions.jsonl) of a report in which every text is hostile."""
    monkeypatch.setattr("tests.test_report.EVIL", EVIL + PAYLOADS)
    report, predictions = hostile_report(run)
    return render_page(report, predictions, run.metrics), predictions


def test_the_page_loads_nothing_and_runs_one_script_of_its_own(hostile):
    page = Page(hostile[0])
    assert not [found for found in page.attributes if found[1].startswith("on")]
    places = [
        found for found in page.attributes if found[1] in ("src", "href", "action", "data", "xlink:href", "srcset")
    ]
    assert all(value.startswith("#") for _, _, value in places)  # inside the plots
    addresses = set(
        re.findall(
            r"https?://[^\s\"'<>)]*", re.sub(r'<script type="application/json".*?</script>', "", hostile[0], flags=re.S)
        )
    )
    assert addresses <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
        "http://y",
    }  # names, and a row's text
    (data, text), (own, script) = page.scripts
    assert data == {"type": "application/json", "id": "data"} and own == {}
    (policy,) = [
        value for tag, name, value in page.attributes if tag == "meta" and name == "content" and "default-src" in value
    ]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    rows = json.loads(text)
    assert [row["question"] for row in rows] == EVIL + PAYLOADS == [row["question"] for row in hostile[1]]


def test_the_same_evaluation_gives_the_same_page(run):  # noqa: F811
    predictions = make_predictions()
    pages = {render_page(build_report(run, predictions, MANIFEST), predictions, make_metrics()) for _ in range(2)}
    assert len(pages) == 1


def test_bars_show_where_an_interval_lies_to_zero():
    report = {
        "difference": {"loss": {"mean": -1.0, "ci95": [-2.0, 0.5]}, "bleu": {"mean": 0.0, "ci95": [0.0, 0.0]}},
        "verdicts": {"loss": "better", "bleu": "no difference shown"},
    }
    # The longest reach, 2, takes 1/1.1 of half of the bar; 0 lies at 50.
    assert interval_bar(report, "loss") == {"low": 4.55, "high": 61.36, "mean": 27.27, "look": "better"}
    assert interval_bar(report, "bleu") == {"low": 50.0, "high": 50.0, "mean": 50.0, "look": "none"}


def test_hostile_text_is_shown_and_does_nothing_in_a_browser(hostile, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(hostile[0], encoding="utf-8")
    with Browser(tmp_path / "profile") as page:
        page.open(path)
        page.run("document.getElementById('order').value = 'in_order'; order.dispatchEvent(new Event('change'))")
        assert page.run("document.title") == "Did the fine-tuning help? · 微调有效果吗？"
        shown = page.run("[...document.querySelectorAll('#answers .question')].map(node => node.textContent)")
        assert shown == EVIL + PAYLOADS  # character by character
        assert page.run("document.querySelectorAll('img, iframe, #answers svg, #answers script').length") == 0
        assert page.run("document.scripts.length") == 2
        requests = [
            event["params"]["request"]["url"]
            for event in page.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        assert requests == [path.as_uri()]
        assert not [
            event for event in page.events if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]


def test_a_reader_searches_sorts_and_switches_the_language(run, tmp_path):  # noqa: F811
    predictions = make_predictions()
    many = [row | {"id": f"{row['id']}-{copy}"} for copy in range(4) for row in predictions]
    path = tmp_path / "report.html"
    path.write_text(render_page(build_report(run, predictions, MANIFEST), many, make_metrics()), encoding="utf-8")
    ids = "[...document.querySelectorAll('#answers .id')].map(node => node.textContent)"
    visible = "document.querySelector('h1').innerText"

    def gains(metric: str, sign: int) -> list[float]:
        values = {
            "chrf": [row["adapter_scores"]["chrf"] - row["base_scores"]["chrf"] for row in many],
            "loss": [(row["base_nll"] - row["adapter_nll"]) / row["target_tokens"] for row in many],
        }
        ranked = sorted(range(len(many)), key=lambda index: -sign * values[metric][index])
        return [many[index]["id"] for index in ranked[:50]]

    with Browser(tmp_path / "profile") as page:
        page.open(path, language="zh-CN")
        assert page.run(visible) == "微调有效果吗？"
        page.run("document.getElementById('language').click()")
        assert page.run(visible) == "Did the fine-tuning help?"
        assert page.run("document.querySelectorAll('.verdict .headline')[0].innerText").startswith(
            "Yes: the held-out loss fell"
        )
        assert page.run(ids) == gains("chrf", 1) and page.run("more.hidden") is False
        for value, metric, sign in (("lost", "chrf", -1), ("loss_gained", "loss", 1), ("loss_lost", "loss", -1)):
            page.run(f"order.value = '{value}'; order.dispatchEvent(new Event('change'))")
            assert page.run(ids) == gains(metric, sign)
        page.run("more.click()")
        assert len(page.run(ids)) == 76 and page.run("more.hidden") is True
        page.run("search.value = 'RANK 7 '; search.dispatchEvent(new Event('input'))")
        assert sorted(page.run(ids)) == [f"q007-{copy}" for copy in range(4)]
        for width in (390, 1400):
            page.open(path, width=width)
            assert page.run("document.documentElement.scrollWidth") <= width
        columns = "getComputedStyle(document.querySelector('.sides')).gridTemplateColumns.split(' ').length"
        assert page.run(columns) == 3
        page.open(path, width=390)
        assert page.run(columns) == 1


def test_losses_alone_make_a_page_too(run, tmp_path):  # noqa: F811
    predictions = [
        row | {"base": None, "adapter": None, "base_stopped": None, "adapter_stopped": None}
        | {f"{side}_scores": {name: row[f"{side}_scores"][name] for name in ("nll", "target_tokens")} for side in ("base", "adapter")}
        for row in make_predictions()
    ]  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(render_page(build_report(run, predictions, MANIFEST), predictions, []), encoding="utf-8")
    with Browser(tmp_path / "profile") as page:
        page.open(path)
        assert page.run("document.querySelectorAll('#answers article').length") == 19
        assert "the models were not asked to answer" in page.run("document.body.innerText")
        assert not [event for event in page.events if event.get("method") == "Runtime.exceptionThrown"]
