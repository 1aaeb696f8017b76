# The commands of this repository; each creates its virtual environment where there is none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTHONS ?= python3.10 python3.11 python3.12
TORCHES ?= 2.11 newest

.PHONY: help run test lint type contract matrix clean

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

matrix: ## Run the tests with every version of PYTHONS that is installed and of TORCHES (PYTHONS=python3.12 TORCHES=2.11)
	@status=0; for python in $(PYTHONS); do \
		$$python -c "" 2>/dev/null || { echo "matrix: skipped $$python: it is not installed"; continue; }; \
		for torch in $(TORCHES); do \
			name=$$(basename $$python)-torch-$$torch; bin=.venv-matrix/$$name/bin; \
			if [ $$torch = newest ]; then versions="torch torchvision"; else versions="torch==$$torch.*"; fi; \
			echo "matrix: $$name"; \
			$$python -m venv .venv-matrix/$$name && $$bin/python -m pip install -q --upgrade -e ".[test]" $$versions && \
			$$bin/python -m pytest $(ARGS) || { echo "matrix: $$name failed"; status=1; }; \
		done; \
	done; exit $$status

clean: ## Remove the virtual environment and build leftovers; outputs/ stays
	rm -rf $(VENV) .venv-matrix build *.egg-info .pytest_cache .mypy_cache .ruff_cache

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
