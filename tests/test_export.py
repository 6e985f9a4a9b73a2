"""export.py: the merged model is base + adapter, whole or not at all, and goes to the hub that the user names."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import export
from sft import artifacts, config, modeling
from sft.errors import RunFailed, UserError
from sft.tokenizer import load_tokenizer
from tests.conftest import must, run_script

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def make_adapter(path: Path, model_dir: Path, spread: float = 0.05) -> Path:
    """A run directory with an adapter whose B is not zero, as training would leave it."""
    model = modeling.add_lora(modeling.load_base(str(model_dir), torch.float32), 8, 16, 0.0, TARGETS, seed=1)
    draw = torch.Generator().manual_seed(2)
    for name, parameter in modeling.trainable_parameters(model).items():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * spread)
    path.mkdir()
    modeling.write_adapter(path, modeling.adapter_tensors(model, model), model)
    provenance = {
        "model_name_or_path": str(model_dir),
        "model_sha256": artifacts.model_sha256(str(model_dir)),
        "dataset_sha256": "0" * 64,
    }
    artifacts.write_json(path / "provenance.json", provenance)
    return path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, tiny_model_dir) -> Path:
    return make_adapter(tmp_path_factory.mktemp("export") / "run", tiny_model_dir)


def call_export(monkeypatch, *argv) -> None:
    monkeypatch.setattr("sys.argv", ["export.py", *map(str, argv)])
    export.main()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 41)[None]).logits[0]


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as an upload needs: makes repositories, takes every file inside one commit."""

    repositories: list = []  # noqa: RUF012
    files: dict = {}  # noqa: RUF012
    tokens: set = set()  # noqa: RUF012
    refuse = False

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.tokens.add(self.headers["Authorization"])
        if self.refuse:
            self.answer(403, {"error": "no quota left"})
        elif self.path == "/api/repos/create":
            self.repositories.append(json.loads(body))
            self.answer(200, {"url": f"http://{self.headers['Host']}/me/merged", "name": "me/merged"})
        elif self.path == "/api/models/me/merged/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            answers = [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]
            self.answer(200, {"files": answers})
        elif self.path == "/api/models/me/merged/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(
                200,
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"http://{self.headers['Host']}/me/merged/commit/1",
                },
            )
        else:
            self.answer(200, {"ok": True})

    def do_GET(self):
        self.answer(200, {"id": "me/merged", "siblings": [], "sha": "0" * 40})

    def answer(self, status: int, value: dict) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("OneHub", (Hub,), {"repositories": [], "files": {}, "tokens": set()})
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_merged_model_equals_base_plus_adapter_in_three_dtypes(run_dir, tiny_model_dir, tmp_path, monkeypatch, capsys):
    base = modeling.load_base(str(tiny_model_dir), torch.float32)
    plain = logits(base)
    adapted = logits(modeling.load_adapter(base, str(run_dir)))
    # Rounding of stored weights to 24, 11 and 8 bits of mantissa, against logits of up to 14.
    for dtype, tolerance in (("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 2e-1)):
        directory = tmp_path / dtype
        call_export(monkeypatch, "--run_dir", run_dir, "--output_dir", directory, "--dtype", dtype)
        assert {str(t.dtype) for t in load_file(directory / "model.safetensors").values()} == {f"torch.{dtype}"}
        settings = json.loads((directory / "config.json").read_text())
        assert settings.get("dtype", settings.get("torch_dtype")) == dtype  # the second: transformers 4
        merged = logits(modeling.load_base(str(directory), torch.float32))
        torch.testing.assert_close(merged, adapted, atol=tolerance, rtol=0)
        assert (merged - plain).abs().max() > 1  # the adapter is in it
        tokenizer = load_tokenizer(str(directory))
        assert tokenizer.chat_template == load_tokenizer(str(tiny_model_dir)).chat_template
        generation = json.loads((directory / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [tokenizer.eos_token_id]
        origin = json.loads((directory / "export.json").read_text())
        assert origin["adapter_sha256"] == artifacts.sha256_file(run_dir / "adapter_model.safetensors")
        assert (
            origin["verified"]["largest_error"]
            < origin["verified"]["tolerance"]
            < 0.1
            < origin["verified"]["largest_change"]
        )
        card = (directory / "README.md").read_text()
        assert f"base_model: {tiny_model_dir}" in card and origin["adapter_sha256"] in card
    assert "Merged 8 weights" in capsys.readouterr().out


def test_weights_are_cut_into_files_of_bounded_size(run_dir, tmp_path, monkeypatch):
    call_export(monkeypatch, "--run_dir", run_dir, "--output_dir", tmp_path / "whole")
    call_export(monkeypatch, "--run_dir", run_dir, "--output_dir", tmp_path / "cut", "--max_shard_size_bytes", 160_000)
    parts = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert max(part.stat().st_size for part in parts) < 164_000  # and a header
    together = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert together.keys() == whole.keys() and all(torch.equal(together[name], whole[name]) for name in whole)
    assert (
        len(json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())["weight_map"])
        == len(whole)
        == 26
    )


def test_nothing_is_left_when_the_merged_model_is_wrong(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "scaling", lambda lora: 1.9)  # it is 2
    with pytest.raises(RunFailed, match=r"differ from base \+ adapter by .* more than 1e-04: nothing was written"):
        call_export(monkeypatch, "--run_dir", run_dir, "--output_dir", tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_changes_nothing_is_not_called_merged(tiny_model_dir, tmp_path, monkeypatch):
    run = make_adapter(tmp_path / "run", tiny_model_dir, spread=0.0)
    with pytest.raises(RunFailed, match=r"as near to the bare base as to base \+ adapter"):
        call_export(monkeypatch, "--run_dir", run, "--output_dir", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_mistakes_are_explained_before_anything_is_written(run_dir, tiny_model_dir, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    weights = load_file(tiny_model_dir / "model.safetensors")
    (other / "config.json").write_text((tiny_model_dir / "config.json").read_text() + "\n")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    cases = [
        (("--output_dir", tmp_path / "there"), "exists; choose another directory or give --overwrite"),
        (("--output_dir", tmp_path / "new", "--model_name_or_path", other), "is not the model that .* was trained on"),
        (("--output_dir", tmp_path / "new", "--run_dir", tmp_path / "there"), "holds no adapter_model.safetensors"),
        (("--output_dir", tmp_path / "new", "--push_to_hub", "me/merged"), "HF_HUB_OFFLINE is set"),
        (("--output_dir", tmp_path / "new", "--push_to_hub", "merged"), "expected a repository name: owner/name"),
    ]
    for argv, message in cases:
        argv = argv if "--run_dir" in argv else ("--run_dir", run_dir, *argv)
        with pytest.raises(UserError, match=message):
            call_export(monkeypatch, *argv)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "there"]
    with pytest.raises(UserError, match="expected one of auto, float32"):
        config.parse(export.ExportConfig, ["--run_dir", "r", "--output_dir", "o", "--dtype", "int8"])


def test_upload_goes_to_the_hub_that_hf_endpoint_names(run_dir, tmp_path, hub):
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    argv = ["export.py", "--run_dir", run_dir, "--output_dir", tmp_path / "merged", "--push_to_hub", "me/merged"]
    result = must(run_script(*argv, env=environment))
    server = hub.RequestHandlerClass
    assert server.tokens == {"Bearer hf_secret"}
    assert [(r["name"], r["organization"]) for r in server.repositories] == [("merged", "me")]
    assert server.repositories[0].get("private") or server.repositories[0]["visibility"] == "private"
    written = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    assert {name: server.files.get(name) for name in written} == written and "model.safetensors" in written
    assert f"Uploaded to {endpoint}/me/merged/commit/1" in result.stdout


def test_a_refused_upload_says_where_and_keeps_the_merged_model(tmp_path, hub, monkeypatch):
    from huggingface_hub import constants

    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    hub.RequestHandlerClass.refuse = True
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)  # both are read from the environment at import
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(
        RunFailed, match=f"me/merged could not be uploaded to {endpoint}: .*model is complete in"
    ) as caught:
        export.upload(tmp_path, "me/merged", private=True)
    assert "hf_secret" not in str(caught.value)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_overwrite_replaces_merged_models_only(monkeypatch, tmp_path, run_dir, tiny_model_dir):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    for target, words in (
        (foreign, "holds no merged model"),
        (foreign / "thesis.tex", "holds no merged model"),
        (run_dir, "holds no merged model"),
        (run_dir.parent, "holds no merged model"),
    ):
        with pytest.raises(UserError, match=words):
            call_export(monkeypatch, "--run_dir", run_dir, "--output_dir", target, "--overwrite")
    (run_dir / "export.json").write_text("{}")
    with pytest.raises(UserError, match="is or holds"):
        call_export(monkeypatch, "--run_dir", run_dir, "--output_dir", run_dir, "--overwrite")
    (run_dir / "export.json").unlink()
    assert (foreign / "thesis.tex").read_text() == "years of work" and (run_dir / "adapter_model.safetensors").is_file()
