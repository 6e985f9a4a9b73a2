"""README.md and README.zh-CN.md say the same, and what they name is there."""

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(
    r"[\w.*<>-]+(?:/[\w.*<>-]+)*(?:/|\.(?:py|ya?ml|md|txt|jsonl?|slurm|ipynb|png|safetensors|npu|cpu))", re.ASCII
)
SCRIPTS = ("train.py", "data_prep.py", "eval.py", "export.py", "doctor.py")
# Made by runs and users.
MADE = ("outputs/", "models/", ".venv/", "manifest.json", "my_pairs.jsonl", "train.log", "doctor.md")
LAUNCHER_FLAGS = {"--num_processes", "--main_process_ip", "--rdzv_backend", "--max_restarts"}  # accelerate launch's

english = TEXTS["README.md"]
both = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)


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


def test_both_languages_have_the_same_headings_levels_and_links():
    levels, links = {}, {}
    for name, text in TEXTS.items():
        prose = FENCE.sub("", text)
        levels[name] = re.findall(r"^(#+) ", prose, re.MULTILINE)
        links[name] = set(re.findall(r"\]\((.+?)\)", prose)) - set(TEXTS)
    assert levels["README.md"] == levels["README.zh-CN.md"] and len(levels["README.md"]) >= 14
    assert links["README.md"] == links["README.zh-CN.md"] and len(links["README.md"]) >= 3
    assert "](README.zh-CN.md)" in english and "](README.md)" in TEXTS["README.zh-CN.md"]


def test_both_languages_have_the_same_code_blocks_but_for_comments():
    pair = [blocks(text) for text in TEXTS.values()]
    assert len(pair[0]) == len(pair[1]) >= 15
    for (language, left), (other, right) in zip(*pair):
        assert language == other and left.count("\n") == right.count("\n")
        for lines in zip(left.splitlines(), right.splitlines()):
            if language:
                assert without_comment(lines[0]) == without_comment(lines[1])
            else:  # a tree of files: their descriptions are translated
                assert FILE.findall(lines[0]) == FILE.findall(lines[1])


def test_both_languages_name_the_same_code_and_the_same_figures():
    assert set(code_spans(english)) == set(code_spans(TEXTS["README.zh-CN.md"]))
    number = re.compile(r"\d+(?:[.,]\d+)*", re.ASCII)
    proses = [FENCE.sub("", text) for text in TEXTS.values()]
    assert set(number.findall(proses[0])) == set(number.findall(proses[1]))
    tables = [[number.findall(row) for row in re.findall(r"^\|.*", prose, re.MULTILINE)] for prose in proses]
    assert tables[0] == tables[1] and len(tables[0]) >= 16


@both
def test_files_that_the_readme_names_exist(text):
    words = [word for command in commands(text) for word in command if FILE.fullmatch(word)]
    words += re.findall(r"\]\(([^:)]+)\)", text)
    named = {word for word in words if "*" not in word and not word.startswith(MADE)}
    assert len(named) >= 25
    for word in named:
        assert (ROOT / word).exists() or (ROOT / "accelerate_configs" / word).is_file(), word


@both
def test_launch_configs_that_the_readme_names_exist(text):
    named = set(re.findall(r"\b(?:cpu|npu|cuda)_\d\w*", text, re.ASCII))
    assert len(named) >= 9
    assert named <= {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


@both
def test_the_tree_of_files_is_the_repository(text):
    (tree,) = (content for _, content in blocks(text) if content.startswith("data_prep.py "))
    words = [(line.split()[0], word) for line in tree.splitlines() for word in FILE.findall(line)]
    for directory, word in words:
        assert word in MADE or (ROOT / word).exists() or (ROOT / directory / word).exists(), word
    assert len(words) >= 16
    assert {path.name for path in ROOT.glob("*.py")} <= {word for _, word in words}
    assert set(SCRIPTS) <= {word for _, word in words}


@both
def test_make_targets_and_variables_that_the_readme_names_exist(text):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))
    variables = set(re.findall(r"^(?:export )?(\w+) [?:]=|^ifdef (\w+)", makefile, re.MULTILINE))
    variables = {name for pair in variables for name in pair if name}
    named = {word for command in commands(text) if command[0] == "make" for word in command[1:]}
    assert {word for word in named if "=" not in word} <= targets
    assert {word.split("=")[0] for word in named if "=" in word} <= variables
    assert {"demo", "test", "wheelhouse"} <= named and len(named) >= 8


@both
def test_flags_in_commands_are_those_of_the_script(text):
    checked = 0
    for command in commands(text):
        for script in SCRIPTS:
            if script in command:
                words = command[command.index(script) + 1 :]
                flags = {word.split("=")[0] for word in words if word.startswith("--")}
                assert flags <= flags_of(script), command
                checked += len(flags)
    assert checked >= 30


@both
def test_flags_in_sentences_are_those_of_a_script_or_the_launcher(text):
    known = set().union(*(flags_of(script) for script in SCRIPTS)) | LAUNCHER_FLAGS
    named = {word for command in commands(text) if command[0].startswith("--") for word in command if word[:2] == "--"}
    assert named <= known and len(named) >= 5
