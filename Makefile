# make demo: see it work.  make test: prove it works.  Everything else is a part of these two.
SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN := .venv/bin
READY := .venv/.ready

# Nothing here may reach a model hub, and two test workers with all threads each would fight for the cores.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# transformers' GGUF reader draws a bar that no setting of its own turns off.
export TQDM_DISABLE := 1

WORKERS ?= 2

.PHONY: help setup models demo test bazel bazel7 lock lint optimised pytest bench format pins clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 16

setup: $(READY) ## .venv with everything; does nothing when nothing changed

# Remade when what goes into the environment changes, and only then.
$(READY): deps/requirements.in deps/dev.in deps/requirements_dev.txt pyproject.toml rtp_llm/version.py tools/setup.sh
	@tools/setup.sh
	@touch $@

models: setup ## the two small checkpoints of the demo and the tests, in .cache/models
	@$(BIN)/python tools/fetch_models.py

demo: models ## inspect, plan, load and run SmolLM2 and MiniLM
	@tools/demo.sh

test: lint optimised bazel ## lint and every test, through Bazel, in the lane of every platform

bazel: ## every test as a Bazel target, each once; installs Debian's Bazel where there is none
	@tools/bazel_tests.sh

lint: setup ## ruff, mypy, import directions, Bazel files; all of them, whatever the first one finds
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy || status=1; \
	MYPYPATH=. $(BIN)/mypy --explicit-package-bases arch_config deps bazel tools/count_tests.py || status=1; \
	PYTHONPATH=. $(BIN)/lint-imports --no-cache --no-logo || status=1; \
	tools/buildifier.sh --check || status=1; \
	exit $$status

bazel7: ## MODULE.bazel on Debian's Bazel 7.7, in a folder of its own; its wheels against Bazel 4's
	@tools/get_bazel.sh
	@bazel/compat/bazel7/run.sh

lock: ## locks and all else that follows from the platform table; make lock PLATFORM=cuda13 for one lock
	@tools/get_bazel.sh
	@tools/bazel run --noshow_progress //deps:update -- $(addprefix --platform ,$(PLATFORM)) $(ARGS)

pytest: models ## the CPU suite without Bazel, the quick loop; make pytest ARGS="-k name tests/plan" for less
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

optimised: models ## what a load is made of, without the assertions of rtp_llm (python -O); those of tests count
	@PYTHONOPTIMIZE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(OPTIMISED)
optimised: OPTIMISED ?= tests/checkpoint tests/plan tests/layers tests/loader tests/transport/test_scratch.py tests/transport/test_blocks.py

bench: models ## the CPU benchmarks, small sizes; ARGS= for the sizes of the tables in benchmark/
	@set -e; for script in benchmark/*.py; do [ -e "$$script" ] || continue; echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done
bench: ARGS ?= --quick

format: setup ## ruff's repairs and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

pins: ## exact versions anew, after a change in deps/*.in; needs uv
	@tools/pin_dev.sh

clean: ## everything that can be made again, except .venv and the models
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-checkpoints
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
