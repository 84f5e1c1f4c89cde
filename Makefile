# Every target sets up .venv by itself and does so again only when what is installed has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-all lint docs bench format clean

setup: $(VENV)/installed

# PIP_CONSTRAINT, unlike --constraint, also pins what builds the package.
INSTALL = PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --editable

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) '.[docs]'
	touch $@

demo: setup
	rm -rf runs/demo
	$(BIN)/rankup run --method rank --threads 1 --out runs/demo/rank > /dev/null
	$(BIN)/rankup run --method finetune --threads 1 --out runs/demo/finetune > /dev/null
	$(BIN)/rankup report runs/demo/rank runs/demo/finetune --out runs/demo/report.html

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup
	$(BIN)/python benchmarks/cpu.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

# A process for each core, but few: each of them loads torch. Their tensors are small, so that a
# second thread would only be in the way.
test: lint
	$(PYTEST)

# Also the tests marked slow: campaigns, and cross products of what `make test` samples.
test-all: lint
	$(PYTEST) -m ""

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
