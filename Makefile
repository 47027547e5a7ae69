# make run        set up and stream the bundled model under a quarter of its experts
# make test       set up, check and test: what CI runs
# make gpu-test   the tests that need an NVIDIA GPU, with the CuPy that is there or GPU_EXTRA (cuda12, cuda13)

PYTHON ?= python3
VENV ?= .venv
GPU_EXTRA ?= cuda13
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready
STRANGER := tests/third_party/expertstream-fakedevice

.PHONY: run test lint gpu-test clean

run: $(READY)
	$(BIN)/expertstream run --expert-memory 25% --max-tokens 80 -p "The LORD is my shepherd;"

test: lint
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Where there is a GPU that no test can use, that is a failure.
gpu-test: $(READY)
	@if ! command -v nvidia-smi >/dev/null; then \
	  echo "no GPU test ran: there is no nvidia-smi on this machine"; exit 0; \
	fi; \
	set -ex; \
	$(BIN)/python -c 'import cupy' 2>/dev/null || $(INSTALL) --editable '.[$(GPU_EXTRA)]'; \
	$(BIN)/python tests/gpu.py; \
	$(BIN)/pytest -m gpu

$(READY): pyproject.toml $(STRANGER)/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is needed: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[test,lint]' --editable $(STRANGER)
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find core plugins engine tests bench -name __pycache__ -prune -exec rm -rf {} +
