# `make demo` and `make test` do all their set-up on a fresh Debian or Ubuntu machine with Python 3.10+,
# git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What to install when the machine has no torch yet; one that is already installed is used as it is.
TORCH ?= torch==2.13.0
RANKS ?= 2
# Workers of the tests: those that wait run beside those that compute.
WORKERS ?= $(shell expr $$(nproc) + 2)
# Built by the installation.
KERNELS := $(wildcard launcher/kernels/csrc/*.cpp launcher/kernels/csrc/*.h) launcher/kernels/csrc/CMakeLists.txt

.PHONY: help install demo test lint types compat soak docs bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

install: $(VENV)/.installed-dev ## make the environment with all that the other targets need

demo: $(VENV)/.installed-examples ## train a small GPT on real text on 2 ranks with ZeRO stage 2
	$(BIN)/launch --num_gpus $(RANKS) examples/train_gpt.py --deepspeed examples/configs/zero2.json

test: $(VENV)/.installed-dev ## install what the tests need and run them all
	@.ci/system-packages
	TEST_SECONDS=$(VENV)/seconds.json $(BIN)/python -m pytest -n $(WORKERS) --durations=30 --junitxml=$(VENV)/junit.xml $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## style, floors, docs/config.md against the schema
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m launcher.config.reference | diff -u docs/config.md -

types: $(VENV)/.installed-dev ## mypy, strict
	$(BIN)/mypy

compat: ## run a short list of tests on the oldest torch, and on other versions of Python where they are installed
	@.ci/compat

soak: $(VENV)/.installed-dev ## the long forms of the tests that draw at random: kills, hostile input, every fault
	@.ci/system-packages
	$(BIN)/python benchmarks/random_kills.py --count 500
	$(BIN)/python benchmarks/fuzz.py --count 1000000
	PYTHONPATH=tests $(BIN)/python benchmarks/fault_matrix.py

docs: $(VENV)/.installed-dev ## write the pages that are generated from the code
	$(BIN)/python -m launcher.config.reference > docs/config.md

bench: $(VENV)/.installed-dev ## measure everything beside the peers, write docs/benchmarks.md and docs/scale.md
	@.ci/system-packages
	mkdir -p $(VENV)/bench
	$(BIN)/python benchmarks/startup.py > $(VENV)/bench/1_startup.md
	PYTHONPATH=tests $(BIN)/python benchmarks/fanout.py > $(VENV)/bench/2_fanout.md
	PYTHONPATH=tests $(BIN)/python benchmarks/scale_model.py > docs/scale.md
	PYTHONPATH=tests $(BIN)/python benchmarks/fault_matrix.py > $(VENV)/bench/3_faults.md
	$(BIN)/python benchmarks/random_kills.py > $(VENV)/bench/4_kills.md
	$(BIN)/python benchmarks/output.py > $(VENV)/bench/5_output.md
	$(BIN)/python benchmarks/fuzz.py > $(VENV)/bench/6_fuzz.md
	OMP_NUM_THREADS=1 $(BIN)/launch --num_gpus 2 benchmarks/step_time.py --output $(VENV)/bench/7_step_time.md
	OMP_NUM_THREADS=1 $(BIN)/launch --num_gpus 2 benchmarks/offload_time.py --output $(VENV)/bench/7_step_time_offload.md
	PYTHONPATH=tests $(BIN)/python benchmarks/parity_table.py --worst --output $(VENV)/bench/8_parity.md
	PYTHONPATH=tests $(BIN)/python benchmarks/memory_table.py > $(VENV)/bench/9_memory.md
	$(BIN)/python benchmarks/nvme.py > $(VENV)/bench/9_nvme.md
	$(BIN)/python benchmarks/nvme_step.py > $(VENV)/bench/9_nvme_step.md
	$(BIN)/python benchmarks/growth.py > $(VENV)/bench/9_growth.md
	$(BIN)/python benchmarks/cpu_kernels.py > $(VENV)/bench/9_kernels.md
	OMP_NUM_THREADS=1 $(BIN)/launch --num_gpus 2 benchmarks/onebit.py --output $(VENV)/bench/9_onebit.md
	cat benchmarks/header.md $(VENV)/bench/*.md > docs/benchmarks.md

clean: ## remove the environment, every cache, what the installation built and the logs of runs
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache runs
	git clean -q -X -f -d launcher/kernels

# The environment sees the system's packages when a usable torch is among them (a GPU machine), so nothing is downloaded twice.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or newer is needed; choose one with: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' .ci/make-venv
	@touch $@

$(VENV)/.installed-%: $(VENV)/.created pyproject.toml constraints.txt $(KERNELS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[$*]'
	@touch $@ $(if $(filter dev,$*),$(VENV)/.installed-examples)
