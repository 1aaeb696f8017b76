# The commands of this repository; each creates its virtual environment where there is none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
VERSIONS ?= oldest newest

.PHONY: help run test lint type contract docs gpu-desk matrix release-check clean

help: ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

run: $(VENV)/installed ## Install, then run the main job on the embedded model (ARGS="iterations=10 seed=1" passes options)
	$(BIN)/python -m solrl_lightning $(ARGS)

test: $(VENV)/installed-test ## Install with the extra `test`, then run the tests (ARGS="-k nft" passes options)
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed-dev ## Check style, formatting and spelling with ruff and codespell
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/codespell

type: $(VENV)/installed-dev ## Check types with mypy
	rm -rf .mypy_cache/tree && mkdir -p .mypy_cache/tree/solrl_lightning  # the package as it is installed, with callbacks/ in it
	ln -s $(CURDIR)/solrl_lightning/* $(CURDIR)/callbacks .mypy_cache/tree/solrl_lightning/
	$(BIN)/python -m mypy

contract: $(VENV)/installed-dev ## Check our calls of Transformer Engine against its source, oldest and newest
	for version in "==2.9.0" ">=2.9"; do \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --target "$(VENV)/contract$$version" "transformer-engine$$version" pydantic && \
		PYTHONPATH="$(VENV)/contract$$version" $(BIN)/python tests/quantization/check_transformer_engine.py || exit 1; \
	done

docs: $(VENV)/installed-dev ## Build the documentation as a site in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

release-check: $(VENV)/installed-dev ## Build wheel and sdist, install each in a new environment of each of PYTHONS that is installed, run the smoke job
	rm -rf dist && $(BIN)/python -m build --outdir dist .
	@checked=; for python in $(PYTHONS); do \
		$$python -c "" 2>/dev/null || { echo "release-check: skipped $$python: it is not installed"; continue; }; \
		for package in dist/*.whl dist/*.tar.gz; do \
			echo "release-check: $$package with $$python"; \
			rm -rf .venv-release && $$python -m venv .venv-release && .venv-release/bin/pip install -q $$package && \
			folder=$$(mktemp -d) && (cd $$folder && $(CURDIR)/.venv-release/bin/solrl experiment=smoke) && \
			test -s $$folder/outputs/train/*/lora/pytorch_lora_weights.safetensors && rm -rf $$folder .venv-release || exit 1; \
		done; \
		checked=yes; \
	done; test $$checked

gpu-desk: $(VENV)/installed ## Compile blocks of the models for GPUs that are not here, and check the code
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore dev/gpu_desk.py

matrix: ## Run the tests with every version of PYTHONS that is installed, and the VERSIONS of packages (PYTHONS=python3.12 VERSIONS=oldest)
	@status=0; for python in $(PYTHONS); do \
		$$python -c "" 2>/dev/null || { echo "matrix: skipped $$python: it is not installed"; continue; }; \
		for versions in $(VERSIONS); do \
			name=$$(basename $$python)-$$versions; bin=.venv-matrix/$$name/bin; \
			resolution=highest options=; \
			if [ $$versions = oldest ]; then resolution=lowest-direct options="-o filterwarnings="; fi; \
			echo "matrix: $$name"; \
			$$python -m venv .venv-matrix/$$name && $$bin/python -m pip install -q uv && \
			$$bin/uv pip install -q --python $$bin/python --upgrade --resolution $$resolution -e ".[test]" && \
			$$bin/python -m pytest $$options $(ARGS) || { echo "matrix: $$name failed"; status=1; }; \
		done; \
	done; exit $$status

clean: ## Remove the virtual environment and build leftovers; outputs/ stays
	rm -rf $(VENV) .venv-matrix .venv-release build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache

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
