# make demo      sets up .venv, builds the kernels that the demo uses, runs it and trains a small GPT
#                for 30 steps; with or without a GPU
# make test      sets up the same, builds everything, runs all tests; those of a GPU skip without one
# make build     builds in place: the libraries of the package and the tests' host module
# make test-gpu  the GPU tests alone
# make test-emulated  the short selection of them on this CPU, with some kernels: tests/emulator
# make sanitize  every built kernel under compute-sanitizer, on a Hopper GPU; see tests/sanitize.py
# make bench     the benchmarks, on a Hopper GPU
# make clean     removes what was built, not .venv and not the cache of compiled units
#
# PYTHON: the Python 3.10 or later that .venv is made from. setup.py lists the build's variables.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
DEMO_VARIANTS := FwdBf16D128*,BwdBf16D128*
EMULATED_VARIANTS := FwdBf16D64*,FwdE4m3D64*,BwdBf16D64*
SANITIZER := compute-sanitizer --kernel-name kernel_substring=N3fa3 --error-exitcode 9

.PHONY: demo test build test-gpu test-emulated sanitize libraries bench clean

demo: export FLASH_ATTN3_VARIANTS ?= $(DEMO_VARIANTS)
demo: libraries
	$(RUN) examples/demo.py
	$(RUN) examples/train_gpt.py --where-possible --head-dim 128 --steps 30

test: build
	$(RUN) -m pytest tests

test-gpu: libraries
	$(RUN) -m pytest tests/gpu

test-emulated: build
	$(RUN) -m tests.emulator.build '$(EMULATED_VARIANTS)'
	$(RUN) -m pytest tests/gpu --device emulated -m smoke

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
	rm -rf build dist third_party/cutlass *.egg-info flash_attn3/*.so tests/*.so
