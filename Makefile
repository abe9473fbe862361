# make demo   set up, convert the embedded checkpoint, verify it, and compare it with its source
# make test   set up and pass the tests
# make lint   ruff and mypy
# make bench  conversion speed against the disk's, on made-up GLM shards (SIZE_GB=4 by default)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
MODEL := tests/fixtures/glm-tiny-fp8
OUT := build/demo
SIZE_GB ?= 4

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
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m quantkit.eval.conversion_speed --size-gb $(SIZE_GB)
