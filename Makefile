# make demo   set up, convert the embedded checkpoint, verify it, and compare it with its source
# make test   set up and pass the tests, in WORKERS processes (2 by default)
# make lint   ruff and mypy
# make bench  weight errors, and conversion speed against the disk's on made-up GLM shards (SIZE_GB=4 by default);
#             PEERS=1 installs llm-compressor and AutoRound and compares with them (minutes)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
MODEL := tests/fixtures/glm-tiny-fp8
OUT := build/demo
SIZE_GB ?= 4
WORKERS ?= 2

.PHONY: setup demo test lint bench

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[eval]' --group dev
	touch $(READY)

demo: setup
	rm -rf $(OUT)
	$(BIN)/quantkit convert $(MODEL) --int4 --output $(OUT)/int4
	$(BIN)/quantkit verify $(OUT)/int4 --against $(MODEL)
	$(BIN)/quantkit convert $(MODEL) --bf16 --output $(OUT)/bf16
	$(BIN)/quantkit eval $(OUT)/int4 --baseline $(OUT)/bf16 --text $(MODEL)/heldout.txt

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: setup
ifdef PEERS
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group peers
endif
	$(BIN)/python -m quantkit.eval.scale_error $(MODEL)
	$(BIN)/python -m quantkit.eval.conversion_speed --size-gb $(SIZE_GB) $(if $(PEERS),--peers)
