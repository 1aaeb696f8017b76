# The commands of this repository; each creates its virtual environment where there is none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help run test lint type contract clean

help: ## List these targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

run: $(VENV)/installed ## Install, then run the main job on the embedded model (ARGS="iterations=10 seed=1" passes options)
	$(BIN)/python -m solrl_lightning $(ARGS)

test: $(VENV)/installed-test ## Install with the extra `test`, then run the tests (ARGS="-k nft" passes options)
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed-dev ## Check style and formatting of imports with ruff
	$(BIN)/python -m ruff check .

type: $(VENV)/installed-dev ## Check types with mypy
	$(BIN)/python -m mypy

contract: $(VENV)/installed-dev ## Check our calls of Transformer Engine against its source, oldest and newest
	for version in "==2.9.0" ">=2.9"; do \
		$(BIN)/python -m pip install --quiet --upgrade --target "$(VENV)/contract$$version" "transformer-engine$$version" pydantic && \
		PYTHONPATH="$(VENV)/contract$$version" $(BIN)/python tests/quantization/check_transformer_engine.py || exit 1; \
	done

clean: ## Remove the virtual environment and build leftovers; outputs/ stays
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@
