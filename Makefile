# `make demo` and `make test` do all their set-up on a fresh Debian or Ubuntu machine with Python 3.10+,
# git and make.
PYTHON ?= python3
VENV ?= .venv
# The peers of `make bench` are installed beside a torch of their own.
BENCH_VENV ?= .bench-venv
BIN := $(VENV)/bin
# What to install when the machine has no torch yet; one that is already installed is used as it is.
TORCH ?= torch==2.13.0
RANKS ?= 2
# Workers of the tests: those that wait run beside those that compute.
WORKERS ?= $(shell expr $$(nproc) + 3)
BESIDE := services curves models lightning transformers4
# What the tests need.
TESTED := $(VENV)/.installed-dev $(VENV)/.peers $(VENV)/.services $(VENV)/.curves $(VENV)/.models $(VENV)/.lightning
# What the site is made of; links to sources lead to the files themselves.
PAGES := README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs examples hostfiles launcher
# Built by the installation.
KERNELS := $(wildcard launcher/kernels/csrc/*.cpp launcher/kernels/csrc/*.h) launcher/kernels/csrc/CMakeLists.txt

.PHONY: help install demo test numerics lint types compat soak soak-short soak-programs docs man site bench bench-page gpu clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(VENV)/.installed-dev ## make the environment with all that the other targets need

demo: $(VENV)/.installed-examples ## train a small GPT on real text on 2 ranks with ZeRO stage 2
	$(BIN)/launch --num_gpus $(RANKS) examples/train_gpt.py --deepspeed examples/configs/zero2.json $(DEMO_ARGS)

test: $(TESTED) ## install what the tests need and run them, all but the long ones
	@.ci/system-packages
	PYTHONDONTWRITEBYTECODE= TEST_SECONDS=$(VENV)/seconds.json $(BIN)/python -m pytest -n $(WORKERS) --durations=30 --junitxml=$(VENV)/junit.xml $(PYTEST_ARGS)

numerics: $(VENV)/.installed-dev $(VENV)/.peers ## what compares numbers, with each instruction set of this CPU and one thread or two
	$(BIN)/python -m pytest -q -n 2 -m 'soak and not long' tests/optim/test_instruction_sets.py

lint: $(VENV)/.installed-dev ## style, floors, generated pages against the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m launcher.config.reference | diff -u docs/config.md -
	$(BIN)/python -m launcher.cli.reference | diff -u docs/options.md -
	$(BIN)/python -m launcher.probes.reference | diff -u docs/api.md -
	$(BIN)/python -m launcher.journal.records | diff -u docs/journal.md -

types: $(VENV)/.installed-dev ## mypy, strict
	$(BIN)/mypy

compat: $(VENV)/.installed-dev $(VENV)/.transformers4 ## run a short list of tests on the oldest torch and transformers, and on other versions of Python where they are installed
	@VENV=$(VENV) .ci/compat

soak: $(TESTED) ## what takes hours: random kills, hostile input, every fault on every transport, stalls of minutes
	@.ci/system-packages
	SEQUENCES=5000 $(BIN)/python -m pytest -m 'soak or long'
	$(BIN)/python tests/soak/random_kills.py --count 500
	$(BIN)/python tests/soak/checkpoint_kills.py --count 1000
	$(BIN)/python tests/soak/fuzz.py --count 1000000
	$(BIN)/python tests/soak/checkpoint_fuzz.py --count 100000
	$(BIN)/python tests/soak/fault_matrix.py
	$(BIN)/python tests/soak/stalls.py

soak-short: $(TESTED) ## the long tests, and the programs of the soak for a minute; CI runs both
	@.ci/system-packages
	$(BIN)/python -m pytest -q -n $(WORKERS) -m 'long and not soak'
	@$(MAKE) --no-print-directory soak-programs

soak-programs: $(VENV)/.installed-dev ## random kills, hostile input and stalls, for a minute
	$(BIN)/python tests/soak/random_kills.py --count 6
	$(BIN)/python tests/soak/checkpoint_kills.py --count 4
	$(BIN)/python tests/soak/fuzz.py --count 2000
	$(BIN)/python tests/soak/checkpoint_fuzz.py --count 300
	PYTHONPATH=tests $(BIN)/python tests/soak/stalls.py --pause 6 --disk 6 --lease 3 --hosts 8

docs: $(VENV)/.installed-dev ## write the pages that are generated from the code
	$(BIN)/python -m launcher.config.reference > docs/config.md
	$(BIN)/python -m launcher.cli.reference > docs/options.md
	$(BIN)/python -m launcher.probes.reference > docs/api.md
	$(BIN)/python -m launcher.journal.records > docs/journal.md

man: $(VENV)/.installed-dev ## write man pages into build/man: `man -l build/man/launch.1`
	$(BIN)/python -m launcher.cli.reference build/man

site: $(VENV)/.installed-docs ## build the documentation as a site into build/site; a link that leads nowhere fails
	@rm -rf build/pages && mkdir -p build/pages && ln -s $(addprefix $(CURDIR)/,$(PAGES)) build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@! grep -rlE '<(script|link|img)[^>]+(src|href)="?https?://' --include='*.html' build/site || { echo "loaded from elsewhere" >&2; exit 1; }
	@for word in hostfile lease zero_optimization; do \
	  grep -q "$$word" build/site/search/search_index.json || { echo "the search does not find $$word" >&2; exit 1; }; done

bench: $(BENCH_VENV)/.installed-peers ## measure beside the peers: everything, or SECTION="startup fanout"; write the pages
	$(BENCH_VENV)/bin/python benchmarks/bench.py $(SECTION)

bench-page: $(VENV)/.installed-dev ## put docs/benchmarks.md together from the sections measured last
	$(BIN)/python benchmarks/bench.py --page

gpu: $(VENV)/.installed-gpu ## prove the GPU path on this machine's NVIDIA GPU: PART=1 correctness, 2 speed, 3 what does not fit; DEVICE=cpu: a dry run
	@PYTHONPATH=benchmarks:$$PYTHONPATH $(BIN)/python -m gpu $(if $(PART),--part $(PART)) $(if $(DEVICE),--device $(DEVICE)) \
	  $(if $(OUT),--out '$(OUT)') $(if $(ONLY),--only '$(ONLY)')

clean: ## remove the environments, every cache, what the installation built and the logs of runs
	rm -rf $(VENV) $(BENCH_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache runs
	git clean -q -X -f -d launcher/kernels

# The environment sees the system's packages when a usable torch is among them (a GPU machine), so nothing is downloaded twice.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or newer is needed; choose one with: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' .ci/make-venv
	@touch $@

$(VENV)/.installed-%: $(VENV)/.created pyproject.toml constraints.txt $(KERNELS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[$*]'
	@touch $@ $(if $(filter dev,$*),$(VENV)/.installed-examples $(VENV)/.installed-docs)

# Without a network, too, where what the package needs is installed.
$(VENV)/.installed-gpu: $(VENV)/.created pyproject.toml constraints.txt $(KERNELS)
	@VENV=$(VENV) .ci/install-beside
	@touch $@

# What tests run beside the package, in a folder that only their own processes see. Its setup needs the torch that is there.
$(VENV)/.peers: $(VENV)/.installed-dev .ci/test-peers.txt
	@rm -rf $(VENV)/peers
	@install() { $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(VENV)/peers --upgrade "$$@"; }; \
	install setuptools wheel && export DS_BUILD_OPS=0 PYTHONPATH=$(VENV)/peers \
	  && install --no-deps --no-build-isolation -r .ci/test-peers.txt && touch $@ \
	  || { echo "the tests that need DeepSpeed are skipped: it cannot be installed"; rm -rf $(VENV)/peers; }

# What else the tests need, each in a folder beside the environment: a server of S3 and its client, systems for curves,
# models, and the older line of transformers. Without what these depend on: they bring many packages, or pin others than
# the environment has.
$(BESIDE:%=$(VENV)/.%): $(VENV)/.%: $(VENV)/.installed-dev .ci/test-%.txt
	@rm -rf $(VENV)/$*
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/$* \
	  -r .ci/test-$*.txt && touch $@ \
	  || { echo "the tests that need .ci/test-$*.txt are skipped: it cannot be installed"; rm -rf $(VENV)/$*; }

# DeepSpeed's setup needs the torch that is there. Its operators are built here, so that no measurement waits for them;
# where that fails the rows that need them say so.
$(BENCH_VENV)/.installed-peers: benchmarks/peers.txt pyproject.toml constraints.txt $(KERNELS)
	@.ci/system-packages --peers
	$(MAKE) VENV=$(BENCH_VENV) $(BENCH_VENV)/.installed-dev
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check setuptools wheel
	DS_BUILD_OPS=0 $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  -c $(BENCH_VENV)/constraints.txt -r benchmarks/peers.txt
	rm -rf $(BENCH_VENV)/torch_extensions
	-PYTHONPATH=benchmarks PATH=$(abspath $(BENCH_VENV))/bin:$$PATH $(BENCH_VENV)/bin/python -c 'import common; \
	  from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder; \
	  CPUAdamBuilder().load(verbose=False); ShareMemCommBuilder().load(verbose=False)'
	@touch $@
