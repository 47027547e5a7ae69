# make run    set up and stream the bundled model under a quarter of its experts
# make test   set up, check and test: what CI runs

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
STRANGER := tests/third_party/expertstream-fakedevice

.PHONY: run test lint gpu-test clean

run: $(READY)
	$(BIN)/expertstream run --expert-memory 25% --max-tokens 80

test: lint
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests marked `gpu` need the device of the backend that they test. They skip, saying so, where there is none.
gpu-test: $(READY)
	$(BIN)/pytest -m gpu

$(READY): pyproject.toml $(STRANGER)/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is needed: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test,lint]' --editable $(STRANGER)
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find core plugins engine tests bench -name __pycache__ -prune -exec rm -rf {} +
