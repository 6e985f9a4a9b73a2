"""notebooks/evaluate.ipynb on a real small run."""

import json
import os
import shutil

import nbformat
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOK = ROOT / "notebooks" / "evaluate.ipynb"


def test_the_notebook_is_committed_without_outputs_and_with_short_cells():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) >= 10
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert all(len(cell.source.splitlines()) <= 12 for cell in code)


def test_the_notebook_scores_shows_asks_and_compares(tmp_path, tiny_run_dir):
    run_dir = tmp_path / "run"
    shutil.copytree(tiny_run_dir, run_dir)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    environment = {**os.environ, "RUN_DIR": str(run_dir), "PROCESSES": "2"}
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    client.execute(env=environment)
    texts = [json.dumps(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in text for text in texts) == 2
    assert any("token_f1" in text and "ci95" in text for text in texts)
    assert (run_dir / "eval" / "report.md").is_file()
    assert len((run_dir / "eval" / "predictions.jsonl").read_text().splitlines()) == 19
