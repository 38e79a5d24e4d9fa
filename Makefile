.PHONY: help quickstart warm-start test test-slow peers benchmark quality style clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Installs faster where it is there; `make UV=` goes without.
UV := $(shell command -v uv 2> /dev/null)
LAUNCH := $(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	--num_cpu_threads_per_process $${OMP_NUM_THREADS:-1}

help:  ## Show what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/installed  ## Make the environment and train a small model on real MCP servers (5 minutes, no GPU)
	$(LAUNCH) recipes/quickstart.py

warm-start: $(VENV)/installed  ## Make the model that the quickstart starts from anew, for other tasks or tools (minutes)
	PYTHONPATH=recipes $(BIN)/python -m quickstart_world.make_warm_start

test: $(VENV)/installed  ## Make the environment and run the tests
	@$(BIN)/python tests/install_vllm.py
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/installed  ## Run the tests that take minutes, too
	@$(BIN)/python tests/install_vllm.py
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

peers: $(VENV)/installed  ## Install third-party MCP servers under .peers (needs npm) and run the tests against them
	$(BIN)/python tests/peers/install.py
	$(BIN)/python -m pytest -m peers

benchmark: $(VENV)/installed  ## Measure the tool pool on real server processes, and check what it promises (2 minutes)
	$(BIN)/python benchmarks/tool_pool.py

quality: $(VENV)/installed  ## Check lint, format, types, spelling and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

style: $(VENV)/installed  ## Mend lint and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"mcp_grpo needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Name another: make PYTHON=python3.12")'
ifdef UV
	$(UV) venv --quiet --seed --allow-existing --python $(PYTHON) $(VENV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable ".[dev]"
else
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
endif
	@touch $@
