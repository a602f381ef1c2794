# Two commands do everything on a fresh machine: `make demo` and `make test`.
# They need Python >= 3.11 and a C++ compiler; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# More than the usual two cores: tests wait more than they compute.
TEST_PROCESSES ?= 3

.DEFAULT_GOAL := help
.PHONY: help demo test thorough producers clients devices charts check docs bench judge clean

help: ## Show what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.run ## Run the main job: Redis, a worker with the bundled model, streams, a bulk run
	$(BIN)/cellama demo

# Else each of some hundred processes that tests start compiles our modules again.
test: export PYTHONDONTWRITEBYTECODE =
# Each file runs in one process, so what it starts for all of its tests starts once. Files with long tests come first.
test: $(VENV)/.dev check ## Check the code and run all tests
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --tb short

thorough: export TEST_EXAMPLES = 10
thorough: export PYTEST_ADDOPTS = --timeout 3000
thorough: test ## As `make test`, with ten times as many examples of the property tests

# Each environment has its own Python. Without it in PATH (python3.11 to python3.14), the tests' Python is used where possible.
producers: $(VENV)/.dev ## Test the base package with the oldest and newest Celery, redis-py, Django and FastAPI
	$(BIN)/python tests/producers/matrix.py $(ENVIRONMENTS)

# JavaScript clients need node and npm in PATH, and are skipped without them.
clients: $(VENV)/.dev ## Test other projects' clients of the gateway in environments of their own, which pip and npm create
	$(BIN)/python tests/clients/matrix.py $(ENVIRONMENTS)

# The first run builds llama.cpp with RPC, which takes some minutes.
devices: $(VENV)/.dev ## Test models on several devices, which are RPC servers of llama.cpp on this machine
	$(BIN)/python tests/devices/environment.py

# Downloads Helm and the schemas of Kubernetes and KEDA in the first run.
charts: $(VENV)/.dev ## Test the Helm chart with Helm and the schemas of Kubernetes and KEDA
	$(BIN)/python tests/charts/environment.py

check: $(VENV)/.dev ## Lint, types, import contracts
	.ci/check

docs: $(VENV)/.dev ## Build the site of docs/ into build/site; a dead link is an error
	$(BIN)/python .ci/site.py

bench: $(VENV)/.dev ## A short form of every benchmark, in under 10 minutes; bench/README.md has the peers
	$(BIN)/cellama bench all --short

# Installs GuideLLM and AIPerf in the first run. ARGUMENTS=--short is a quick run with the bundled model.
judge: $(VENV)/.dev ## Let GuideLLM and AIPerf measure the gateway and llama-server, in about 40 minutes
	$(BIN)/python -m cellama.bench.judges $(ARGUMENTS)

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "cellama needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@command -v c++ >/dev/null || \
		{ echo "llama.cpp is built from source and needs a C++ compiler (Debian: apt-get install build-essential)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing; the first time llama.cpp is built from source, which takes some minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,flower,embedded]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[worker,http,files,flower,metrics,otel,embedded,parquet]' --group dev
	.ci/system-packages
	@touch $@
