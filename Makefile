# Every target sets up .venv by itself and does so again only when what is installed has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo serve-demo test test-all campaign lint docs bench format lock clean

setup: $(VENV)/installed

# PIP_CONSTRAINT, unlike --constraint, also pins what builds the package.
INSTALL = PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --editable

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) '.[test]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) '.[docs]'
	touch $@

demo: setup
	rm -rf runs/demo
	$(BIN)/rankup run --method rank --threads 1 --out runs/demo/rank > /dev/null
	$(BIN)/rankup run --method finetune --threads 1 --out runs/demo/finetune > /dev/null
	$(BIN)/rankup report runs/demo/rank runs/demo/finetune --out runs/demo/report.html

# Five small tasks, and the page to ask them on http://127.0.0.1:8000.
serve-demo: setup
	$(INSTALL) '.[serve]'
	test -d nets/digits || $(BIN)/python examples/serve_demo.py nets/digits
	$(BIN)/rankup serve nets/digits

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup
	$(BIN)/python benchmarks/cpu.py

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Files in their usual order: else those of few tests come last, some of which take the longest.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 \
	--dist loadfile --no-loadscope-reorder

# A process for each core, but few: each of them loads torch. Their tensors are small, so that a
# second thread would only be in the way.
test: lint
	$(PYTEST)

# Also the tests marked slow: campaigns, and cross products of what `make test` samples.
test-all: lint
	$(PYTEST) -m ""

# Ten minutes of damaged files, kills, full disks and races: see docs/disk.md.
campaign: setup
	cd benchmarks && OMP_NUM_THREADS=1 ../$(BIN)/python -m campaign --minutes 10

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# After a change of pins. torch is left out, because its CPU build has other files than its default
# one, but not what it needs itself. The other package that is left out is for browsers only.
TORCH_NEEDS = filelock fsspec jinja2 networkx setuptools sympy typing-extensions

lock: $(VENV)/installed-test
	$(INSTALL) . uv
	printf '%s\n' torch httpx2-jsfetch > $(VENV)/not-locked.txt
	printf '%s\n' hatchling $(TORCH_NEEDS) | $(BIN)/uv pip compile pyproject.toml - --quiet \
		--no-config --universal --python-version 3.11 --extra dev \
		--constraints constraints.txt --excludes $(VENV)/not-locked.txt \
		--generate-hashes --no-annotate --custom-compile-command 'make lock' \
		--output-file requirements.lock

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
