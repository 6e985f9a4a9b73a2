# Every target sets up what it needs, once: .venv/ (libraries) and models/ (the model of the demo).
#   make demo        the whole pipeline on this machine's CPU: 380 pairs → two ranks → base against adapter
#   make test        all tests and the linter        make check      linter alone
#   make test-npu    the NPU tests on a simulated Ascend (or on real cards)
#   make bench       the measurements that README quotes
#   make mutation    163 faults put into the code one by one: do the tests notice? (hours; MUTATION="--only sft/loss.py" picks some)
#   make fuzz        bad files and flags for all programs, drawn for four minutes
#   make test-slow   the proofs that take longer     make test-serving  answers of a real vLLM server against eval.py's
#   make test-cann8  the tests with the libraries of CANN 8.0 (torch 2.1, on CPU), against those of requirements.txt
#   make test-torch26  the same with torch 2.6      TESTS="tests/test_stacks.py …" picks some
#   make families   docs/models.md anew: each family of models from rows to a merged model
#   make wheelhouse  every wheel for REQUIREMENTS, PYTHON_VERSION and ARCH into wheelhouse/, for machines without a network
#   make reproduce   the reference run on CARDS=1,2 with evidence in outputs/reproduce/reproduction.md; MODEL_NAME=DIR or hub name
# PYTHON=python3.11 chooses the interpreter; WHEELHOUSE=DIR installs from a folder of wheels without any package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct
DEMO := outputs/demo
MODEL_NAME ?= Qwen/Qwen2.5-7B-Instruct
CARDS ?= 1,2
REPRODUCE ?=
# An environment that can train already (CANN's torch_npu, a CUDA build of torch) is used as it is; else .venv is made.
TRAINS := $(shell $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "peft", "accelerate"))))' 2>/dev/null && echo yes)
MINIMUM_TESTS := 1350
TESTS ?=
MUTATION ?=
# The oldest Python that the pins allow is preferred where torch 2.1 is tested: it is what CANN 8.0 images have.
PYTHON_CANN8 ?= $(shell for p in python3.10 $(HOME)/.pyenv/versions/3.10.*/bin/python python3.11 $(PYTHON); do \
	$$p -c '' 2>/dev/null && echo $$p && break; done)
PYTHON_TORCH26 ?= $(PYTHON)
VENV_CANN8 ?= .venv-cann8
VENV_TORCH26 ?= .venv-torch26
REQUIREMENTS ?= requirements.txt requirements-dev.txt requirements-bench.txt
PYTHON_VERSION ?= 3.11
ARCH ?= $(shell uname -m)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
ifdef WHEELHOUSE
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELHOUSE))
endif

.PHONY: demo test check bench mutation fuzz reproduce test-npu test-slow test-serving test-cann8 test-torch26 families wheelhouse verify-wheelhouse setup clean

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
	@echo "Report: $(DEMO)/run/eval/report.html (report.md)   loss plot: $(DEMO)/run/loss.png   adapter: $(DEMO)/run"

test: check
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --at-least $(MINIMUM_TESTS)

check: $(VENV)/development
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

test-npu: $(VENV)/development
	@REQUIRE_NPU_TESTS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m npu

test-cann8: $(VENV)/runtime $(VENV_CANN8)/development
	@REQUIRE_STACKS=1 OTHER_STACK=$(abspath $(BIN)/python) $(VENV_CANN8)/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

test-torch26: $(VENV)/runtime $(VENV_TORCH26)/development
	@REQUIRE_STACKS=1 OTHER_STACK=$(abspath $(BIN)/python) $(VENV_TORCH26)/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

$(VENV_CANN8)/development: requirements-torch21.txt requirements-dev.txt
	$(call install_stack,$(PYTHON_CANN8),$(VENV_CANN8))

$(VENV_TORCH26)/development: requirements-torch26.txt requirements-dev.txt
	$(call install_stack,$(PYTHON_TORCH26),$(VENV_TORCH26))

define install_stack # python, environment; x86 wheels of torch bring CUDA libraries, which CPU runs only load
	@echo "== installing $< into $2 (5 GB on x86_64)"
	@test -x $2/bin/python || $1 -m venv $2
	@$2/bin/pip install --quiet $(foreach file,$^,-r $(file))
	@touch $@
endef

wheelhouse:
	@$(PYTHON) tools/wheelhouse.py collect wheelhouse $(PYTHON_VERSION) $(ARCH) $(REQUIREMENTS)

ifneq ($(origin HF_HUB_OFFLINE),environment)
reproduce: export HF_HUB_OFFLINE = 0 # the model may be a hub name
endif
reproduce: $(if $(TRAINS),,$(VENV)/runtime)
	@$(if $(TRAINS),$(PYTHON),$(BIN)/python) -m tools.reproduce \
		--model_name_or_path $(MODEL_NAME) --cards $(CARDS) $(REPRODUCE)

bench: $(VENV)/development $(MODEL)/config.json
	@$(BIN)/python benchmarks/step_time.py
	@$(BIN)/python benchmarks/step_time.py --rows embedded --output outputs/benchmarks/step_time_embedded.json
	@$(BIN)/python benchmarks/startup.py
	@$(BIN)/python benchmarks/scaling.py
	@OMP_NUM_THREADS=1 $(BIN)/accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/eval_speed.py
	@$(BIN)/python benchmarks/data_prep.py
	@$(BIN)/python benchmarks/layout.py

test-serving: $(VENV)/development $(MODEL)/config.json
	@test -x .venv-serving/bin/python || $(PYTHON) -m venv .venv-serving
	@.venv-serving/bin/pip install --quiet -r requirements-serving.txt
	@.venv-serving/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	@REQUIRE_SERVING_TESTS=1 $(BIN)/python -m pytest tests/test_serving.py

mutation: $(VENV)/development $(MODEL)/config.json
	@$(BIN)/python -m tools.mutate $(MUTATION)

fuzz: $(VENV)/development
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz --minutes 4 --seed $${SEED:-0}

test-slow: $(VENV)/development
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m slow --ignore tests/test_serving.py

families: $(VENV)/development
	@mkdir -p outputs && rm -f outputs/families.jsonl
	@FAMILIES_OUTCOMES=$(abspath outputs/families.jsonl) $(BIN)/python -m pytest -m slow tests/test_families.py
	@$(BIN)/python -m tools.models_page outputs/families.jsonl

setup: $(VENV)/runtime

verify-wheelhouse:
	@$(PYTHON) tools/wheelhouse.py verify $(WHEELHOUSE)

$(VENV)/made: | $(if $(WHEELHOUSE),verify-wheelhouse)
	@$(PYTHON) tools/prerequisites.py 4
	@echo "== making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/runtime: $(VENV)/made requirements.txt
	@echo "== installing requirements.txt (a few minutes the first time)"
	@$(BIN)/pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/development: $(VENV)/runtime requirements-dev.txt requirements-bench.txt
	@echo "== installing requirements-dev.txt requirements-bench.txt"
	@$(BIN)/pip install --quiet -r requirements-dev.txt -r requirements-bench.txt
	@touch $@

$(MODEL)/config.json: | $(VENV)/runtime
	@$(BIN)/python -m tools.embedded_model $(MODEL)

clean:
	rm -rf $(VENV) models outputs .cache
