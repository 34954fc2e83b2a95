# Everything a fresh clone needs: Python 3.11 or newer with pip and venv, and nothing else installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

WORKERS ?= 2
# A file's tests stay in one process, since they share servers and models; tests/conftest.py says which files begin.
# Bytecode files are written even where the environment says not to: plugins, tests and servers would compile each time.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: serve chat test test-all check bench clean

serve: $(VENV)/.run
	@$(BIN)/chairlift serve

chat: $(VENV)/.run
	@$(BIN)/chairlift chat

test: $(VENV)/.dev
	@$(PYTEST)

# What fails beside other tests (exit status 1) runs once more alone: servers, clients and their engines share few cores
# here, and a deadline may pass for want of one. What fails twice is a failure.
test-all: $(VENV)/.dev
	@$(PYTEST) -m '' || { [ $$? = 1 ] && echo "failed tests, once more, one at a time:" && \
	  PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m '' --last-failed --last-failed-no-failures none; }

check: $(VENV)/.dev
	@$(BIN)/ruff format --check src tests benchmarks
	@$(BIN)/ruff check src tests benchmarks
	@$(BIN)/mypy

bench: $(VENV)/.dev
	@$(BIN)/chairlift bench offline --shape smollm2-135m --workload cpu64 --compare transformers

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Two marks: what it takes to run, and what it takes to develop. Each is made again when pyproject.toml changes.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Chairlift needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@echo "making an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	@echo "installing Chairlift (a few minutes the first time: PyTorch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing Chairlift and its development tools (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.run
