# make demo   set up, convert the embedded checkpoint, verify it, and compare it with its source
# make test   set up and pass the tests, in WORKERS processes (2 by default)
# make test-all      pass all of them: the exhaustive ones and those of test-engines, too
# make test-engines  those with vLLM's and SGLang's own loaders (tests/engine_loaders), which `make engines-env` installs
# make record        write down what is made of every family (tests/record), which make test-all compares
# make record-speed  and ratios of the benchmarks and core seconds of commands, which nothing compares (minutes)
# make mutants       put defects into copies of the tree, one by one, and see that make test finds each (minutes)
# make lint   ruff and mypy
# make bench  weight errors, and conversion speed against the disk's on made-up GLM shards (SIZE_GB=4 by default);
#             PEERS=1 installs llm-compressor and AutoRound and compares with them (minutes)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ENGINES := build/engines
ENGINES_READY := $(ENGINES)/.ready
MODEL := tests/fixtures/glm-tiny-fp8
OUT := build/demo
SIZE_GB ?= 4
WORKERS ?= 2

.PHONY: setup demo test test-all engines-env test-engines record record-speed mutants lint bench

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[eval]' --group dev
	PYTHONPATH=tests $(BIN)/python -m support.numba_cache
	touch $(READY)

demo: setup
	rm -rf $(OUT)
	$(BIN)/quantkit convert $(MODEL) --int4 --output $(OUT)/int4
	$(BIN)/quantkit verify $(OUT)/int4 --against $(MODEL)
	$(BIN)/quantkit convert $(MODEL) --bf16 --output $(OUT)/bf16
	$(BIN)/quantkit eval $(OUT)/int4 --baseline $(OUT)/bf16 --text $(MODEL)/heldout.txt

# Bytecode is kept, as the tests start many processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ROOMS := $(PYTEST) --numprocesses $(WORKERS) --dist worksteal --ignore tests/engine_loaders

test: setup
	$(ROOMS) -m "not exhaustive" --hypothesis-profile quick

test-all: setup test-engines
	$(ROOMS)

engines-env: $(ENGINES_READY)

# The engines have an interpreter of their own, as they pin what the project has newer. It sees the project's packages
# (torch, transformers) behind its own, by a path that is written last, so that pip meets none of them.
$(ENGINES_READY): tests/engine_loaders/requirements.txt $(READY)
	rm -rf $(ENGINES)
	$(BIN)/python -m venv --without-pip $(ENGINES)
	$(BIN)/python -m pip --python $(ENGINES)/bin/python install --quiet --no-deps --requirement $<
	$(BIN)/python -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' \
	  > $$(echo $(ENGINES)/lib/python3.*/site-packages)/project.pth
	touch $@

test-engines: engines-env
	QUANTKIT_ENGINES=required $(PYTEST) tests/engine_loaders

record: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 WORKERS=$(WORKERS) $(BIN)/python -m record

record-speed: setup
	PYTHONPATH=tests $(BIN)/python -m record.speed

mutants: setup
	$(BIN)/python tests/mutants.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: setup
ifdef PEERS
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group peers
endif
	$(BIN)/python -m quantkit.eval.bench.scale_error $(MODEL)
	$(BIN)/python -m quantkit.eval.bench.conversion_speed --size-gb $(SIZE_GB) $(if $(PEERS),--peers)
