# make demo | test | lint | docs | bench | gpu-check. Each sets itself up; PYTHON=... picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
OUT ?= benchmarks/results
PROCESSOR = $(or $(shell sed -n 's/^vendor_id.*\(Intel\|AMD\).*/\1/p' /proc/cpuinfo | head -n 1 | tr A-Z a-z),other)
RERUNS ?= 0
RERUN = $(if $(filter-out 0,$(RERUNS)),--reruns $(RERUNS),-p no:rerunfailures)
PART ?= contact
BIN = $(VENV)/bin
STARTED := $(shell date +%s.%N)

.PHONY: demo test test-processor test-oldest test-newest lock battery chaos soak kills recording picture adversary conformance lint \
	bench startup prefix ptxas cluster long-run forms parity gpu-check gpu-wheels setup clean verify-all docs install-check
.DEFAULT_GOAL := help

# Tests start some thousand processes of ours: compiled modules are kept, whatever the machine prefers.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo       a chat with the packaged model and, where it can be fetched, SmolLM2; where the time goes"
	@echo "make test       the test suite"
	@echo "make test-processor  what computes, with C kernels of another processor: AS_PROCESSOR=NAME, or by turns"
	@echo "make test-oldest, make test-newest  what touches requests, with the ends of the dependencies' ranges"
	@echo "make lock       constraints.txt anew: the versions that set-up installs"
	@echo "make battery    the state machines of \`make test\`, 25 times as long, and rarer tests: an hour and more"
	@echo "make chaos      actors killed, stopped, starved and poisoned while streams go on: half an hour; SEED=N, CHAOS_MINUTES=60"
	@echo "make kills      200 plain openai clients, 60 kills of any actor: every answer whole, the same; SEED=N"
	@echo "make recording  four streams and eight kills as an animated SVG: docs/kills.svg"
	@echo "make picture    the README's bars beside vLLM and llama.cpp, of the last measurement: docs/peers.svg"
	@echo "make cluster    replicas on two Ray nodes of this machine; one is killed under streams: some minutes"
	@echo "make verify-all  each kind of model is asked for contradictions in bf16, --exact on; VERIFY_FLAGS"
	@echo "make adversary  what an outsider tries: keys, network, requests, models, frames, faults, secrets"
	@echo "make conformance  the HTTP API as others try it: their tests' cases, clients and benchmarks"
	@echo "make install-check  on a bare Debian, by uv and pipx, as an image: PARTS=\"files chroot tools types image\"; as root"
	@echo "make lint       ruff and mypy"
	@echo "make docs       README.md, docs/ and a reference from docstrings as a site: site/index.html"
	@echo "make bench      offline throughput beside transformers, and start-up times"
	@echo "make prefix     the prefix cache: hit ratios as the pool shrinks, microseconds"
	@echo "make parity     a tiny checkpoint of every model class: what is proven of each, into docs/models.md"
	@echo "make long-run   100,000 requests through the scheduler: flat memory, balanced books"
	@echo "make soak       HOURS=1: requests of all kinds, adapters, vectors and kills: growth, drift, losses"
	@echo "make gpu-check  PART=contact|kernels|tests: on a CUDA device, nine minutes each; TOY=1: on a CPU"
	@echo "make ptxas      registers, spills and tensor cores of every kernel, without a device"
	@echo "make forms      that no kernel is compiled for a request, by the rules of TRITON=3.6.0, say"
	@echo "make gpu-wheels what a GPU machine without a network may lack, for Python 3.12, into .whl/, and the"
	@echo "                kernels that gpu-check launches, compiled for an H100 by TRITON=3.6.0"

# The stamps are newer than pyproject.toml and constraints.txt once the environment holds what they
# ask for; the second one's extras include the first one's.
$(VENV)/.ready-engine: pyproject.toml constraints.txt tools/setup_venv.sh
	@PYTHON=$(PYTHON) bash tools/setup_venv.sh $(VENV) engine
	@touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt tools/setup_venv.sh
	@PYTHON=$(PYTHON) bash tools/setup_venv.sh $(VENV) engine,test,bench
	@touch $@ $(VENV)/.ready-engine

setup: $(VENV)/.ready-test

demo: $(VENV)/.ready-engine
	@$(BIN)/python -m actorium.tools.demo --started $(STARTED) --ready $$(date +%s.%N)
	@echo "next: $(BIN)/actorium chat smollm2, $(BIN)/actorium serve, $(BIN)/actorium --help"

# Four files at a time, on two cores: many tests wait for processes. In the order of
# tests/conftest.py, since files with few tests, which pytest-xdist would begin last, take longest.
# RERUNS=1 for a machine that others use; else without that plugin, which asks a server about each test.
test: $(VENV)/.ready-test
	$(BIN)/python -m pytest tests --ignore tests/conformance -n 4 --dist loadfile \
		--no-loadscope-reorder -m "not slow" $(RERUN) $(PYTEST_FLAGS)

# What computes, with C kernels of another processor: AS_PROCESSOR=NAME (tools/as_processor.py), or by turns,
# another one with each commit. What trained models answer must hold there, too.
test-processor: $(VENV)/.ready-test
	$(BIN)/python tools/as_processor.py $(or $(AS_PROCESSOR),$(shell git rev-list --count HEAD)) \
		$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not slow" \
		tests/kernels tests/gpu tests/tools/test_picture_model.py tests/tools/test_planted_faults.py \
		tests/adversary/test_media_frames.py tests/engine/test_exact_engine.py \
		tests/engine/test_exact_images.py tests/tools/test_demo_model.py $(PYTEST_FLAGS)

# The libraries that a request meets, at both ends of the ranges that pyproject.toml promises.
test-oldest test-newest: $(VENV)/.ready-test
	$(BIN)/python tools/dependencies.py $(@:test-%=%) $(VENV) $(PYTEST_FLAGS)

lock: $(VENV)/.ready-test
	$(BIN)/python tools/dependencies.py lock $(VENV)

# 25 times the examples of `make test`, for the state machines; and what it leaves out.
battery: $(VENV)/.ready-test
	$(BIN)/python -m pytest --hypothesis-profile=battery --timeout=3600 tests/actors/scheduler/test_scheduler_machine.py \
		tests/actors/scheduler/test_radix_machine.py tests/actors/scheduler/test_scheduler_lives.py \
		tests/actors/scheduler/test_suspects.py tests/actors/scheduler/test_prefill_pacing.py \
		tests/actors/client/test_delivery.py tests/actors/detokenizer tests/actors/models/test_gguf_hostile.py \
		tests/actors/ledger/test_ledger_compaction.py tests/actors/gateway/test_tool_parsers.py
	$(BIN)/python -m pytest --timeout=3600 -m slow tests --ignore tests/conformance

# Real processes under faults. What the engines say of them goes to build/chaos.log. The faults are those of a
# seed that is printed: SEED=N repeats them, ROWS=drawn,kills-1 runs some rows, CHAOS_MINUTES=60 (a night's) is the
# length of the row of drawn faults.
chaos: $(VENV)/.ready-test
	@mkdir -p $(OUT) build
	$(BIN)/python -m actorium.tools.chaos --json $(OUT)/chaos.json $(SEED:%=--seed %) $(ROWS:%=--rows %) \
		$(CHAOS_MINUTES:%=--minutes %) 2> build/chaos.log \
		|| { tail -n 5 build/chaos.log; false; }

# Rows of `make chaos`: one engine, and two replicas.
kills:
	@$(MAKE) --no-print-directory chaos ROWS=clients,clients-replicas

recording: $(VENV)/.ready-test
	$(BIN)/python -m actorium.tools.kill_recording

# RESULTS=FILE: what `benchmarks/run.py peers --json FILE` has written.
picture: $(VENV)/.ready-engine
	$(BIN)/python -m actorium.tools.peers_picture $(RESULTS)

# Two raylets on this machine stand for two; Ray is in an environment of its own, above $(VENV).
cluster: build/ray/.ready
	build/ray/bin/python benchmarks/run.py ray_cluster $(CLUSTER_FLAGS)

build/ray/.ready: pyproject.toml $(VENV)/.ready-engine
	$(BIN)/python tools/dependencies.py extra $(VENV) cluster build/ray
	@touch $@

# VERIFY_FLAGS="--minutes 5 --smollm2-wheel FILE"; 10,000 comparisons or 15 minutes a kind.
verify-all: $(VENV)/.ready-test
	@mkdir -p $(OUT)
	$(BIN)/python benchmarks/run.py verify --json $(OUT)/verify-exact-$(PROCESSOR).json $(VERIFY_FLAGS)

# Each model class by a tiny random checkpoint; the table of docs/models.md is what passed.
parity: $(VENV)/.ready-test
	@mkdir -p build
	$(BIN)/python -m pytest tests/gpu/models/test_models_table.py::test_cell \
		tests/gpu/weights/test_gguf_reader.py::test_greedy_tokens_equal_transformers \
		tests/gpu/models/test_text_parts.py::test_as_the_whole_class \
		tests/gpu/models/test_text_parts.py::test_other_classes_are_refused \
		tests/gpu/models/test_other_classes.py::test_other_class \
		--junitxml build/parity.xml -o junit_family=xunit1 $(PYTEST_FLAGS)
	$(BIN)/python -m actorium.tools.models_table build/parity.xml

# Attacks of every kind in full size, counted by area.
adversary: $(VENV)/.ready-test
	@mkdir -p $(OUT)
	$(BIN)/python -m pytest tests/adversary --timeout=900 --adversary $(OUT)/adversary.json $(PYTEST_FLAGS)

# Cases, real clients, benchmarks and generated requests, on a trained model and on the packaged
# one, with environments of their own; the openai package in both of its versions.
# docs/conformance.md says more.
conformance: AGENTS = tests/conformance/test_openai_agents.py tests/conformance/test_pydantic_ai.py
conformance: QUANTISERS = tests/conformance/test_quantisers.py
conformance: PEFT = tests/conformance/test_peft.py
conformance: $(VENV)/.ready-test
	VENV=$(VENV) bash tests/conformance/setup.sh
	build/clients/bin/python -m pytest tests/conformance $(patsubst %,--ignore %,$(AGENTS) $(QUANTISERS) $(PEFT)) -m conformance $(PYTEST_FLAGS)
	build/agents/bin/python -m pytest $(AGENTS) -m conformance $(PYTEST_FLAGS) || [ $$? = 5 ]  # none chosen
	build/quantisers/bin/python -m pytest $(QUANTISERS) -m conformance $(PYTEST_FLAGS) || [ $$? = 5 ]
	build/peft/bin/python -m pytest $(PEFT) -m conformance $(PYTEST_FLAGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest tests/conformance/test_openai.py -m conformance $(PYTEST_FLAGS)
	$(BIN)/python -m pytest tests/gpu/models/test_transformers_model.py $(PYTEST_FLAGS)
	build/clients/bin/python -m pytest tests/actors/gateway/test_gateway.py tests/actors/gateway/test_gateway_apis.py

# The four commands of docs/install.md on a Debian with nothing but Python, and what lies in tools/deploy.
# TORCH_INDEX=URL: where the image gets torch's CPU build, if not from torch's own index.
install-check: $(VENV)/.ready-test
	@mkdir -p $(OUT)
	$(BIN)/python tools/install_check.py $(or $(PARTS),files chroot tools types image) \
		$(TORCH_INDEX:%=--torch-index %) --json $(OUT)/install.json

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/mypy -p actorium

# What pages link to lies in build/pages as it does here. The variable hides an advertisement of mkdocs-material's
# successor, which is no warning about a page.
PAGES = $(wildcard *.md) benchmarks/README.md $(wildcard benchmarks/results/*.png benchmarks/results/*.svg) docs
docs: build/docs/.ready
	@rm -rf build/pages
	@for page in $(PAGES); do \
		mkdir -p build/pages/$$(dirname $$page) && ln -s $(CURDIR)/$$page build/pages/$$page || exit 1; done
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --config-file tools/docs/mkdocs.yml
	@echo "site/index.html"

build/docs/.ready: pyproject.toml $(VENV)/.ready-engine
	$(BIN)/python tools/dependencies.py extra $(VENV) docs build/docs
	@touch $@

bench: $(VENV)/.ready-test
	@mkdir -p $(OUT)
	$(BIN)/python -m actorium.tools.cli bench offline --shape TINY --peer transformers \
		--json $(OUT)/offline-tiny.json --plot $(OUT)/offline-tiny.png
	$(BIN)/python -m actorium.tools.cli bench offline --shape S06 --peer transformers \
		--json $(OUT)/offline-s06.json --plot $(OUT)/offline-s06.png
	$(BIN)/python -m actorium.tools.cli bench offline --shape HYB --peer transformers \
		--json $(OUT)/offline-hyb.json --plot $(OUT)/offline-hyb.png
	$(BIN)/python benchmarks/run.py startup --json $(OUT)/startup.json

prefix: $(VENV)/.ready-test
	@mkdir -p $(OUT)
	$(BIN)/python benchmarks/run.py prefix --json $(OUT)/prefix.json
	$(BIN)/python benchmarks/run.py prefix tree --json $(OUT)/prefix-tree.json

# What the warm-up meets and what requests do, by Triton's own rules: TRITON=3.6.0, say, as a GPU
# machine has it, instead of the one here.
forms: $(VENV)/.ready-test
	$(OTHER_TRITON)
	PYTHONPATH=build/triton $(BIN)/python -m pytest tests/gpu/worker/test_warmup_forms.py $(PYTEST_FLAGS)

define OTHER_TRITON
@rm -rf build/triton
@$(if $(TRITON),$(BIN)/python -m pip install --quiet --no-deps --target build/triton triton==$(TRITON))
endef

# No device is needed: A100, L4, H100 and B200 are compiled for, or SM=90, by the Triton here or
# TRITON=3.6.0, say, as a GPU machine has it: two versions do not spill the same.
ptxas: NAME = ptxas$(TRITON:%=-%)
ptxas: $(VENV)/.ready-test
	@mkdir -p $(OUT)
	$(OTHER_TRITON)
	PYTHONPATH=build/triton $(BIN)/python benchmarks/ptxas.py --sm $(or $(SM),80 89 90 100) \
		--json $(OUT)/$(NAME).json --markdown $(OUT)/$(NAME).md

# Everything at once, with kills in the first quarter; it fails where something grew, slowed down or got lost.
# Memory is judged from some 50 minutes on, when all that is bounded is full.
soak: $(VENV)/.ready-test
	@mkdir -p $(OUT)
	$(BIN)/python benchmarks/run.py soak_mixed --hours $(or $(HOURS),1) --json $(OUT)/soak-mixed.json $(SOAK_FLAGS)

long-run: $(VENV)/.ready-test
	@mkdir -p $(OUT)
	$(BIN)/python benchmarks/run.py long_run --json $(OUT)/long_run.json

startup: $(VENV)/.ready-engine
	$(BIN)/python benchmarks/run.py startup

# PART=contact|kernels|tests, a call each; TOY=1 walks through it on a CPU; CACHE=the kernels that an
# earlier call has compiled. A GPU machine may have no network: its own interpreter is used where
# that one sees a device, with wheels from .whl/ for what it lacks.
gpu-check:
	@PYTHON=$(PYTHON) VENV=$(VENV) OUT=$(OUT) CACHE=$(CACHE) bash tools/gpu_check.sh $(PART) \
		$(if $(TOY),--toy)

gpu-wheels:
	@PYTHON=$(PYTHON) VENV=$(VENV) TRITON=$(TRITON) bash tools/gpu_wheels.sh .whl

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
