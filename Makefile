# make demo      sets up .venv, builds the kernels that the demo uses, runs it and trains a small GPT
#                for 30 steps; with or without a GPU
# make test      what CI runs: sets up the same, builds everything, runs the tests; those of a GPU
#                where there is one
# make test-fast the edit loop: builds one tile, skips tests that build or start processes
# make test-all  make test, and: other versions, long property runs, kernels on the emulator, clients
# make test-clients    diffusers, xFormers, megatron-core, accelerate, peft, timm, Lightning, kernels
#                and sentence-transformers themselves, in .venv-clients; interface files of vLLM and
#                SGLang, from their wheels
# make test-versions   clients and ops with the oldest and the newest torch and transformers, in
#                environments that are removed again
# make lint      ruff, clang-format
# make build     builds in place: the libraries of the package and the tests' host module
# make test-gpu  the GPU tests alone, in several processes: tests/record.py
# make test-emulated  a selection of them on this CPU, with some kernels: tools/ptx_emulator
# make sanitize  every built kernel under compute-sanitizer, on a Hopper GPU; see tests/sanitize.py
# make bench     the benchmarks, on a Hopper GPU
# make clean     removes what was built, not .venv, .venv-clients and the cache of compiled units
#
# PYTHON: the Python 3.10 or later that .venv is made from. setup.py lists the build's variables.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
CLIENTS := .venv-clients
DEMO_VARIANTS := FwdBf16D128*,BwdBf16D128*
FAST_VARIANTS := FwdBf16D128Causal,BwdBf16D128Causal
EMULATED_VARIANTS := FwdE4m3D64Full,FwdE4m3D256Causal,FwdBf16D64Causal*,FwdBf16D64Cache,FwdBf16D64CacheLong,FwdBf16D64CacheKv8,BwdBf16D64Causal*,FwdBf16D64Lists*,BwdBf16D64Lists*,FwdBf16D256ListsSoftcap,FwdBf16D256Causal*,BwdBf16D256Causal,FwdBf16D64x512Latent*
# By file: a module's fixtures and caches are made once.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile
SANITIZER := compute-sanitizer --kernel-name kernel_substring=N3fa3 --error-exitcode 9

.PHONY: demo test test-fast test-all lint build test-gpu test-emulated test-clients test-versions \
        sanitize libraries bench clean

demo: export FLASH_ATTN3_VARIANTS ?= $(DEMO_VARIANTS)
demo: libraries
	$(RUN) examples/demo.py
	$(RUN) examples/train_gpt.py --where-possible --head-dim 128 --steps 30

test: build
	$(RUN) -m pytest tests/cpu $(PARALLEL) -m 'not long'
	$(RUN) -m tests.record --where-possible

test-fast: export FLASH_ATTN3_VARIANTS ?= $(FAST_VARIANTS)
test-fast: build
	$(RUN) -m pytest tests/cpu $(PARALLEL) -rf -m 'not slow and not long' --hypothesis-profile fast

test-all: test test-emulated test-clients test-versions
	$(RUN) -m pytest tests/cpu -m long
	$(RUN) -m pytest tests/cpu $(PARALLEL) -m 'not slow and not long' --hypothesis-profile long
	$(RUN) -m tests.fuzz --cases 2000 --seed 1 --device cpu --jobs 2

test-gpu: libraries
	$(RUN) -m tests.record

test-emulated: build
	$(RUN) -m tools.ptx_emulator.build '$(EMULATED_VARIANTS)'
	$(RUN) -m pytest @tools/ptx_emulator/selection.txt

test-clients: build $(CLIENTS)/ready
	$(CLIENTS)/bin/python -m pytest $(addprefix tests/cpu/test_integrations_,clients.py encoders.py \
	  kernels.py lightning.py training.py)
	$(CLIENTS)/bin/python -m pytest --device cpu $(addprefix tests/gpu/test_integrations_,clients.py \
	  training.py vllm.py sglang.py)

test-versions: build $(CLIENTS)/ready
	$(CLIENTS)/bin/python -m tests.client_versions 'torch==2.10.*' 'transformers==5.17.*'
	$(CLIENTS)/bin/python -m tests.client_versions torch transformers

# It sees the packages of .venv, but for what it has itself.
$(CLIENTS)/ready: tests/support/clients.txt $(VENV)/ready
	$(RUN) -m venv $(CLIENTS)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(CLIENTS)/bin/python -m pip install --no-deps --requirement tests/support/clients.txt
	touch $@

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	git ls-files '*.h' '*.cpp' '*.cu' | xargs $(VENV)/bin/clang-format --dry-run --Werror

sanitize: export PYTORCH_NO_CUDA_MEMORY_CACHING := 1
sanitize: libraries
	$(SANITIZER) --tool memcheck $(RUN) -m tests.sanitize --filled
	$(SANITIZER) --tool initcheck $(RUN) -m tests.sanitize

bench: libraries
	$(RUN) -m benchmarks.bench_forward
	$(RUN) -m benchmarks.bench_backward

build: libraries
	$(RUN) build_tools/build_host.py

libraries: $(VENV)/ready
	$(RUN) setup.py --quiet build_ext --inplace
	$(RUN) -m pip install --quiet --no-build-isolation --no-deps --editable .

$(VENV)/ready: constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("flash_attn3: needs Python 3.10 or later; hint: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo "flash_attn3: installing PyTorch and the rest of constraints.txt into $(VENV): some 3 GB"
	$(RUN) -m pip install --disable-pip-version-check --requirement constraints.txt
	touch $@

clean:
	rm -rf build dist third_party/cutlass *.egg-info flash_attn3/*.so tests/host/*.so tools/ptx_emulator/*.so
