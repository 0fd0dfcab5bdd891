# make demo    install into .venv and train a small language model on the CPU
# make test    the tests
# make check   format, lint, types, direction of imports
# make bench   the benchmarks; writes .benchmarks/
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check bench format

demo: $(INSTALLED)
	$(BIN)/gla demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/pytest benchmarks --benchmark-autosave

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
