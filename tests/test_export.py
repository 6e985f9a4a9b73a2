"""export.py: the merged model is base + adapter, whole or not at all, and goes to the hub that the user names."""

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import export
from sft import artifacts, config, modeling, serving
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
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ):  # transformers 4 has to read them
            assert (directory / name).read_bytes() == (tiny_model_dir / name).read_bytes(), name
        origin = json.loads((directory / "export.json").read_text())
        assert origin["adapter_sha256"] == artifacts.sha256_file(run_dir / "adapter_model.safetensors")
        assert (
            origin["verified"]["largest_error"]
            < origin["verified"]["tolerance"]
            < 0.1
            < origin["verified"]["largest_change"]
        )
        card = (directory / "README.md").read_text()
        assert f"| base | `{tiny_model_dir}` |" in card and origin["adapter_sha256"] in card
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
        export.hub.upload(tmp_path, "me/merged", private=True)
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


def copy_model(source: Path, target: Path, **settings) -> Path:
    """The model in another directory, with other settings in its config.json."""
    shutil.copytree(source, target)
    artifacts.write_json(target / "config.json", {**artifacts.read_json(source / "config.json"), **settings})
    return target


def test_weights_that_the_index_does_not_name_are_left_alone(tiny_model_dir, tmp_path, monkeypatch):
    """Mistral's repositories hold all weights a second time, in consolidated.safetensors under other names."""
    base = copy_model(tiny_model_dir, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    first = dict(list(tensors.items())[:5])
    parts = {"model-00001-of-00002.safetensors": first,
             "model-00002-of-00002.safetensors": {name: tensors[name] for name in tensors if name not in first}}  # fmt: skip
    weight_map = {name: part for part, inside in parts.items() for name in inside}
    for part, inside in parts.items():
        save_file(inside, base / part, metadata={"format": "pt"})
    (base / "model.safetensors").rename(base / "consolidated.safetensors")
    artifacts.write_json(base / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    run = make_adapter(tmp_path / "run", base)
    call_export(monkeypatch, "--run_dir", run, "--output_dir", tmp_path / "merged")
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == tensors.keys()
    assert not (tmp_path / "merged" / "model.safetensors.index.json").exists()


def test_generation_and_servers_stop_where_the_template_ends_an_answer(tiny_model_dir, tmp_path, monkeypatch, capsys):
    base = copy_model(tiny_model_dir, tmp_path / "base")
    tokenizer = load_tokenizer(str(base))
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    artifacts.write_json(base / "generation_config.json", {"eos_token_id": end_of_text, "temperature": 0.7})
    run = make_adapter(tmp_path / "run", base)
    call_export(monkeypatch, "--run_dir", run, "--output_dir", tmp_path / "merged")
    generation = artifacts.read_json(tmp_path / "merged" / "generation_config.json")
    assert generation == {"eos_token_id": [end_of_text, end_of_turn], "temperature": 0.7}
    modelfile = (tmp_path / "merged" / "Modelfile").read_text()
    assert [line for line in modelfile.splitlines() if not line.startswith("#")] == [
        "FROM ./model.gguf",
        'TEMPLATE """{{ range $i, $message := .Messages }}{{ with $message }}'
        r'{{ if eq .Role "system" }}{{ "<|im_start|>system\n" }}{{ .Content }}{{ "<|im_end|>\n<|im_start|>user\n" }}{{ end }}'
        r'{{ if eq .Role "user" }}{{ if eq $i 0 }}{{ "<|im_start|>user\n" }}{{ end }}{{ .Content }}'
        r'{{ "<|im_end|>\n<|im_start|>assistant\n" }}{{ end }}'
        r'{{ if eq .Role "assistant" }}{{ .Content }}{{ "<|im_end|>\n<|im_start|>user\n" }}{{ end }}{{ end }}{{ end }}"""',
        'PARAMETER stop "<|endoftext|>"',
        'PARAMETER stop "<|im_end|>"',
    ]
    launch = f'"stop_token_ids": [{end_of_text}, {end_of_turn}]'
    said, card = capsys.readouterr().out, (tmp_path / "merged" / "README.md").read_text()
    assert launch in said and launch in card
    assert f"vllm serve {tmp_path / 'merged'} --served-model-name NAME" in said and "vllm serve DIRECTORY" in card


def test_go_templates_are_written_only_where_they_are_exact(tiny_model_dir):
    tokenizer = load_tokenizer(str(tiny_model_dir))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + loop.length|string + m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="depend on what follows"):
        serving.go_template(tokenizer)
    modelfile = serving.modelfile(tokenizer, [0])
    assert "# No TEMPLATE: this chat template" in modelfile and "\nTEMPLATE" not in modelfile


def test_each_weight_keeps_the_dtype_that_the_base_has(tiny_model_dir, tmp_path, monkeypatch):
    base = copy_model(tiny_model_dir, tmp_path / "base", dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    run = make_adapter(tmp_path / "run", base)
    call_export(monkeypatch, "--run_dir", run, "--output_dir", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name for name, tensor in merged.items() if tensor.dtype == torch.float32} == {"model.norm.weight"}
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32, torch.bfloat16}
    assert artifacts.read_json(tmp_path / "merged" / "config.json")["dtype"] == "bfloat16"


def test_a_killed_export_leaves_nothing_after_the_next_one(run_dir, tmp_path, monkeypatch):
    left = tmp_path / ".merged.tmp-abcd1234"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    call_export(monkeypatch, "--run_dir", run_dir, "--output_dir", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_damaged_base_models_are_one_sentence(run_dir, tiny_model_dir, tmp_path, monkeypatch):
    whole = (tiny_model_dir / "model.safetensors").read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    cases = [  # what is wrong, the file's content, settings, words
        ("empty", b"", {}, "could not be loaded|is damaged"),
        ("truncated", whole[:-100], {}, "could not be loaded|is damaged"),
        ("pointer", pointer, {}, "pointer of git-lfs"),
        ("sizes", whole, {"hidden_size": 32}, "could not be loaded"),
        ("heads", whole, {"num_attention_heads": 5}, "could not be loaded"),
        ("rope", whole, {"rope_parameters": {"rope_type": "spiral"}}, "could not be loaded"),
        ("activation", whole, {"hidden_act": "swish2000"}, "could not be loaded"),
        ("gptq", whole, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised .gptq."),
    ]  # fmt: skip
    monkeypatch.setattr(export.artifacts, "model_sha256", lambda name: None)
    for name, content, settings, words in cases:
        base = copy_model(tiny_model_dir, tmp_path / name, **settings)
        (base / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=words) as caught:
            modeling.load_base(str(base), torch.float32)
        assert "\n" not in str(caught.value), name
        with pytest.raises(UserError, match=words):
            call_export(
                monkeypatch, "--run_dir", run_dir, "--output_dir", tmp_path / "out", "--model_name_or_path", base
            )
        assert not list(tmp_path.glob("*out*"))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(run_dir, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    start = f"import sys, runpy; {limit}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    result = run_script("-c", start, "export.py", "--run_dir", run_dir, "--output_dir", tmp_path / "merged")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"could not write {tmp_path / 'merged'}" in result.stderr and list(tmp_path.iterdir()) == []
