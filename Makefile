.PHONY: help quickstart warm-start test test-unit test-all fuzz peers benchmark quality style docs docs-serve screenshots wheel clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Installs faster where it is there; `make UV=` goes without.
UV := $(shell command -v uv 2> /dev/null)
# A file stays on one process, as its tests share what takes long to start.
IN_PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# Tests that failed beside others run once more, one at a time: each must pass there, and the log shows both.
AGAIN_ALONE = $(BIN)/python -m pytest --hypothesis-profile full --last-failed --last-failed-no-failures none --maxfail 1
# Where it is set, every process that a test starts would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE
LAUNCH := $(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	--num_cpu_threads_per_process $${OMP_NUM_THREADS:-1}

help:  ## Show what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/installed  ## Make the environment and train a small model on real MCP servers (5 minutes, no GPU)
	$(LAUNCH) recipes/quickstart.py

warm-start: $(VENV)/installed  ## Make the model that the quickstart starts from anew, for other tasks or tools (minutes)
	$(BIN)/python recipes/make_warm_start.py

test: $(VENV)/installed  ## Make the environment and run the tests, without vLLM (6 minutes on two cores)
	$(BIN)/python -m pytest -m "not full and not vllm" $(IN_PARALLEL)

test-unit: $(VENV)/installed  ## Run the tests that need nothing but their own process (2 minutes on one core)
	$(BIN)/python -m pytest tests/unit -m "not full and not vllm"

test-all: $(VENV)/installed  ## Install vLLM, DeepSpeed and bitsandbytes where they can be had for CPUs, and run everything that CI runs (45 minutes on two cores)
	@$(BIN)/python tests/install_vllm.py
	@$(BIN)/python tests/install_extras.py
	$(BIN)/python -m pytest --hypothesis-profile full $(IN_PARALLEL) || $(AGAIN_ALONE)

peers: $(VENV)/installed  ## Install third-party MCP servers under .peers (needs npm) and run the tests against them
	$(BIN)/python tests/peers/install.py
	$(BIN)/python -m pytest -m peers

fuzz: $(VENV)/installed  ## Look for input that breaks something, for about an hour, and tell what was covered (FUZZ_EXAMPLES=100 for less)
	$(BIN)/python -m pytest -m fuzz --hypothesis-profile fuzz --hypothesis-show-statistics --timeout 0 -p no:cacheprovider

benchmark: $(VENV)/installed  ## Measure the tool pool on real server processes, and check what it promises (5 minutes)
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

docs: $(VENV)/installed-docs  ## Build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/installed-docs  ## Show the documentation in a browser, and follow changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

screenshots: $(VENV)/installed  ## Take the pictures of the dashboard anew, from two short trainings (needs Chromium; 10 minutes)
	$(BIN)/python docs/screenshots.py

wheel:  ## Build the wheel into dist/, and check what is in it
	rm -rf dist build/wheel
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check build
	build/wheel/bin/python -m build --outdir dist > build/wheel/log || { cat build/wheel/log; exit 1; }
	build/wheel/bin/python .ci/check_wheel.py dist

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

$(VENV)/installed-docs: $(VENV)/installed
	$(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check) --quiet \
		--constraint constraints.txt --editable ".[docs]"
	@touch $@
