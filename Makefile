# Set-up and use of spes-p2p. `make demo` and `make test` do everything that is needed, once, and are quick afterwards.
#
#   make setup      the virtual environment with the commands
#   make demo       a whole swarm on this machine, until its loss has visibly fallen
#   make test       all tests but the long live ones; the protocol core must be reached to the last branch
#   make test-live  a live swarm under kills, freezes and partitions: 20 minutes, with figures; partitions need root
#   make test-gpu   the trainer on a CUDA device: bf16, grouped_mm, torch.compile, limits on memory; a minute
#   make nightly    5,000 simulated swarms with all faults, resumable (NIGHTLY_FILE)
#   make lint       ruff and mypy
#   make bench      every benchmark of benchmarks/, one after another

PYTHON ?= python3
VENV ?= .venv
DEMO_DIR ?= .demo
DEMO_ARGS ?= --peers 4 --rounds 8 --headless --baseline
NIGHTLY_FILE ?= .nightly.jsonl
# Arguments for pytest, such as `make test ARGS="-k election"`.
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

# A dozen processes share the cores: each of them with one thread is faster than each with all of them.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

.PHONY: demo test test-live test-gpu lint bench nightly setup clean
.DELETE_ON_ERROR:

setup: $(READY)

# Makes the virtual environment, again if a broken attempt left one without pip.
define ensure_venv
@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "spes-p2p needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	$(PYTHON) -m venv --clear $(VENV); }
endef

INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

$(READY): pyproject.toml constraints.txt
	$(ensure_venv)
	@echo "installing into $(VENV), once: torch and the rest take 1.3 GB and some minutes"
	$(INSTALL) -e .
	@touch $@

$(READY_DEV): pyproject.toml constraints.txt
	$(ensure_venv)
	@echo "installing into $(VENV), once: torch and the rest take 1.3 GB and some minutes"
	$(INSTALL) -e '.[dev]'
	@touch $(READY) $@

demo: $(READY)
	@$(BIN)/spes-p2p demo $(DEMO_ARGS) --dir $(DEMO_DIR) --json $(DEMO_DIR)/summary.json

# The core's own tests run first and under coverage, which costs them three seconds and the others nothing. They alone
# must reach all of it: what only a simulated swarm runs through is not yet a rule that was tested.
CORE := spes_p2p/protocol
CORE_TESTS := tests/unit/protocol

# These start whole swarms, each of which wants the machine for itself; the others run side by side.
LIVE_TESTS := tests/integration

test: $(READY_DEV)
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m coverage run --source=$(CORE) -m pytest $(CORE_TESTS)
	$(BIN)/python -m coverage report --fail-under=100 --skip-covered --show-missing
	$(BIN)/python -m pytest --ignore=$(CORE_TESTS) --ignore=$(LIVE_TESTS) -n logical --maxprocesses 4 --dist worksteal
	$(BIN)/python -m pytest $(LIVE_TESTS)
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-live: $(READY_DEV)
	$(BIN)/python -m pytest -m live_long -s --verbose tests/integration $(ARGS)

test-gpu: $(READY_DEV)
	$(BIN)/python -m pytest -m gpu tests/gpu tests/unit/model $(ARGS)

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/*.py

nightly: $(READY)
	$(BIN)/spes-p2p simulate --faults all --seeds 5000 --resume $(NIGHTLY_FILE) --json $(NIGHTLY_FILE:.jsonl=.json)

bench: $(READY_DEV)
	@set -e; for claim in benchmarks/[a-z]*.py; do \
		[ -e "$$claim" ] || continue; echo "== $$claim"; $(BIN)/python "$$claim"; done

clean:
	rm -rf $(DEMO_DIR) build dist spes_p2p.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
