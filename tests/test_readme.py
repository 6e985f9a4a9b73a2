"""README.md and the pages under docs/ say the same in both languages, and what they name is there."""

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.name for path in (ROOT / "docs" / "zh-CN").glob("*.md"))
PAIRS = [("README.md", "README.zh-CN.md"), *((f"docs/{name}", f"docs/zh-CN/{name}") for name in PAGES)]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for pair in PAIRS for name in pair}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(
    r"[\w.*<>-]+(?:/[\w.*<>-]+)*(?:/|\.(?:py|ya?ml|md|txt|jsonl?|slurm|ipynb|png|safetensors|npu|cpu))", re.ASCII
)
SCRIPTS = ("train.py", "data_prep.py", "eval.py", "export.py", "doctor.py")
# Made by runs and users.
MADE = (
    "outputs/",
    "models/",
    ".venv/",
    "manifest.json",
    "my_pairs.jsonl",
    "reproduction.",
    "steps/",
    "npu-env",
    "train.log",
    "doctor.md",
)
LAUNCHER_FLAGS = {"--num_processes", "--main_process_ip", "--rdzv_backend", "--max_restarts"}  # accelerate launch's

every_pair = pytest.mark.parametrize("pair", PAIRS, ids=[pair[0] for pair in PAIRS])
every_text = pytest.mark.parametrize("name", TEXTS)
languages = pytest.mark.parametrize("language", [0, 1], ids=["English", "Chinese"])
NUMBER = re.compile(r"\d+(?:[.,]\d+)*", re.ASCII)


def whole(language: int) -> str:
    """README and all pages of one language."""
    return "\n\n".join(TEXTS[pair[language]] for pair in PAIRS)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return FENCE.findall(text)


def code_spans(text: str) -> list[str]:
    """Code within sentences and tables."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)# .*", "", line)


def commands(text: str) -> list[list[str]]:
    """The words of each command: lines of bash blocks, joined where they end in a backslash, and code in sentences."""
    bash = "".join(content for language, content in blocks(text) if language == "bash").replace("\\\n", " ")
    lines = [without_comment(line) for line in bash.splitlines()] + code_spans(text)
    return [words for line in lines if (words := shlex.split(line))]


def flags_of(script: str) -> set[str]:
    """The flags that a script takes: its settings dataclass or its add_argument calls, read without importing it."""
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    library = ast.parse((ROOT / "sft" / "config.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        if ast.unparse(call.func) in ("parse", "config.parse"):
            (settings,) = (
                node
                for node in [*tree.body, *library.body]
                if isinstance(node, ast.ClassDef) and node.name == ast.unparse(call.args[0])
            )
            fields = [node for node in settings.body if isinstance(node, ast.AnnAssign)]
            switches = {f"--no_{field.target.id}" for field in fields if ast.unparse(field.annotation) == "bool"}
            return {"--config", "--help", *switches} | {f"--{field.target.id}" for field in fields}
    return {"--help"} | {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
    }


def links(text: str) -> set[str]:
    """Names of the files that a text links to; a page and its translation are the same."""
    return {Path(link).name.replace(".zh-CN", "") for link in re.findall(r"\]\(([^:)]+)\)", FENCE.sub("", text))}


def test_readme_is_short_and_leads_to_every_page():
    assert len(PAGES) >= 7
    for readme, _ in [PAIRS[0], PAIRS[0][::-1]]:
        assert len(TEXTS[readme]) < 10_000  # characters: read in ten minutes
        named = set(re.findall(r"\]\((docs/[^)]+)\)", TEXTS[readme]))
        assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= named
    assert {f"docs/zh-CN/{name}" for name in PAGES} <= set(re.findall(r"\]\((docs/[^)]+)\)", TEXTS["README.zh-CN.md"]))


@every_pair
def test_both_languages_have_the_same_headings_and_links(pair):
    english, chinese = (FENCE.sub("", TEXTS[name]) for name in pair)
    assert re.findall(r"^(#+) ", english, re.MULTILINE) == re.findall(r"^(#+) ", chinese, re.MULTILINE)
    assert links(english) == links(chinese) and links(english)


@every_pair
def test_both_languages_have_the_same_code_blocks_but_for_comments(pair):
    left_blocks, right_blocks = (blocks(TEXTS[name]) for name in pair)
    assert len(left_blocks) == len(right_blocks)
    for (language, left), (other, right) in zip(left_blocks, right_blocks):
        assert language == other and left.count("\n") == right.count("\n")
        for lines in zip(left.splitlines(), right.splitlines()):
            if language:
                assert without_comment(lines[0]) == without_comment(lines[1])
            else:  # a tree of files: their descriptions are translated
                assert FILE.findall(lines[0]) == FILE.findall(lines[1])


@every_pair
def test_both_languages_name_the_same_code_and_the_same_figures(pair):
    english, chinese = (TEXTS[name] for name in pair)
    assert set(code_spans(english)) == set(code_spans(chinese))
    proses = [FENCE.sub("", text).replace("zh-CN/", "") for text in (english, chinese)]
    assert set(NUMBER.findall(proses[0])) == set(NUMBER.findall(proses[1]))
    tables = [[NUMBER.findall(row) for row in re.findall(r"^\|.*", prose, re.MULTILINE)] for prose in proses]
    assert tables[0] == tables[1]


def test_there_is_something_to_compare():
    text = whole(0)
    assert len(blocks(text)) >= 15 and len(set(code_spans(text))) >= 40
    assert len(re.findall(r"^\|.*", FENCE.sub("", text), re.MULTILINE)) >= 30


@every_text
def test_files_that_are_linked_exist(name):
    found = re.findall(r"\]\(([^:)#]+)\)", TEXTS[name])
    assert found
    for link in found:
        assert ((ROOT / name).parent / link).exists(), link


@languages
def test_files_that_are_named_exist(language):
    words = [word for command in commands(whole(language)) for word in command if FILE.fullmatch(word)]
    named = {word for word in words if "*" not in word and not word.startswith(MADE)}
    assert len(named) >= 25
    for word in named:
        assert (ROOT / word).exists() or (ROOT / "accelerate_configs" / word).is_file(), word


@languages
def test_launch_configs_that_are_named_exist(language):
    named = set(re.findall(r"\b(?:cpu|npu|cuda)_\d\w*", whole(language), re.ASCII))
    assert len(named) >= 9
    assert named <= {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


@languages
def test_the_tree_of_files_is_the_repository(language):
    (tree,) = (content for _, content in blocks(TEXTS[PAIRS[0][language]]) if content.startswith("data_prep.py "))
    words = [(line.split()[0], word) for line in tree.splitlines() for word in FILE.findall(line)]
    for directory, word in words:
        assert word in MADE or (ROOT / word).exists() or (ROOT / directory / word).exists(), word
    assert len(words) >= 16
    assert {path.name for path in ROOT.glob("*.py")} <= {word for _, word in words}
    assert set(SCRIPTS) <= {word for _, word in words}


@languages
def test_make_targets_and_variables_that_are_named_exist(language):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))
    variables = set(re.findall(r"^(?:export )?(\w+) [?:]=|^ifdef (\w+)", makefile, re.MULTILINE))
    variables = {name for pair in variables for name in pair if name}
    named = {word for command in commands(whole(language)) if command[0] == "make" for word in command[1:]}
    assert {word for word in named if "=" not in word} <= targets
    assert {word.split("=")[0] for word in named if "=" in word} <= variables
    assert {"demo", "test", "wheelhouse"} <= named and len(named) >= 8


@languages
def test_flags_in_commands_are_those_of_the_script(language):
    checked = 0
    for command in commands(whole(language)):
        for script in SCRIPTS:
            if script in command:
                words = command[command.index(script) + 1 :]
                flags = {word.split("=")[0] for word in words if word.startswith("--")}
                assert flags <= flags_of(script), command
                checked += len(flags)
    assert checked >= 30


@languages
def test_flags_in_sentences_are_those_of_a_script_or_the_launcher(language):
    known = set().union(*(flags_of(script) for script in SCRIPTS)) | LAUNCHER_FLAGS
    text = whole(language)
    named = {word for command in commands(text) if command[0].startswith("--") for word in command if word[:2] == "--"}
    assert named <= known and len(named) >= 5
