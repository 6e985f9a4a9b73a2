# Every target sets up what it needs, once: .venv/ (libraries) and models/ (the model of the demo).
#   make demo        the whole pipeline on this machine's CPU: 380 pairs → two ranks → base against adapter
#   make test        all tests and the linter        make check      linter alone
#   make test-npu    the NPU tests on a simulated Ascend (or on real cards)
#   make bench       the measurements that README quotes
# PYTHON=python3.11 chooses the interpreter; WHEELHOUSE=DIR installs from a folder of wheels without any package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct
DEMO := outputs/demo
MINIMUM_TESTS := 100
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
ifdef WHEELHOUSE
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELHOUSE))
endif

.PHONY: demo test check bench test-npu setup clean

demo: $(VENV)/runtime $(MODEL)/config.json
	@echo "== 1/3 data: data/ascend_qa_en.jsonl → $(DEMO)/dataset"
	@$(BIN)/python data_prep.py --input data/ascend_qa_en.jsonl --model_name_or_path $(MODEL) \
		--output_dir $(DEMO)/dataset --overwrite
	@echo "== 2/3 training on two CPU ranks → $(DEMO)/run"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/accelerate launch --config_file accelerate_configs/cpu_2.yaml \
		train.py --config configs/demo.yaml
	@echo "== 3/3 base against adapter → $(DEMO)/run/eval"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/accelerate launch --config_file accelerate_configs/cpu_2.yaml \
		eval.py --run_dir $(DEMO)/run
	@echo "Report: $(DEMO)/run/eval/report.md   loss plot: $(DEMO)/run/loss.png   adapter: $(DEMO)/run"

test: check
	@$(BIN)/python -m pytest -n 2 --dist worksteal --at-least $(MINIMUM_TESTS)

check: $(VENV)/development
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

test-npu: $(VENV)/development
	@REQUIRE_NPU_TESTS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m npu

setup: $(VENV)/runtime

$(VENV)/made:
	@$(PYTHON) sft/prerequisites.py 4
	@echo "== making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/runtime: $(VENV)/made requirements.txt
	@echo "== installing requirements.txt (a few minutes the first time)"
	@$(BIN)/pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/development: $(VENV)/runtime requirements-dev.txt
	@echo "== installing requirements-dev.txt"
	@$(BIN)/pip install --quiet -r requirements-dev.txt
	@touch $@

$(MODEL)/config.json: | $(VENV)/runtime
	@$(BIN)/python -m sft.embedded $(MODEL)

clean:
	rm -rf $(VENV) models outputs .cache
