# Every day
#   make demo          set up a virtual environment, build, and train the README's model on two processes
#   make setup         set up the virtual environment and build, and nothing more
#   make test          run the tests; TESTS="tests/backend" runs some, TORCH=2.13.0 runs them on another torch
#   make format        format the code and fix what the linter can fix
#   make lint          check format, lint, types and spelling; changes nothing
#   make docs          check the book, build it into build/docs, and test its pages in a browser
#   make stamp         mark the Chinese pages as up to date; PAGES="guides/tune.md" marks some
#   make check         everything that CI runs: lint, docs, test, cluster
#   make clean         remove the environments and the build
# Now and then
#   make cluster       tests of several hosts, Slurm and MPI; needs root
#   make torches       tests that lean on torch's own parts, on each minor version of torch that we support
#   make integrations  Accelerate, transformers, Lightning and others, on Gloo and on Phalanx in its place
#   make conformance   torch's own tests for backends, all of them
#   make stress        the long forms of the tests of faults and start-up
#   make model         check the protocols with SPIN
#   make slow          long tests, benchmarks, torch's tests, models, random faults, and the core with sanitizers
# Measurements
#   make bench             collectives and start-up, against Gloo, MPI and torchrun
#   make bench-step        a training step under plain python, torchrun and phalanx run
#   make bench-ddp         data parallel training, over a step without communication
#   make bench-trainer     the Trainer's share of a step
#   make bench-checkpoint  saving and snapshots, against memcpy and torch.save
#   make bench-tune        phalanx tune, against an exhaustive search
#   make bench-hosts       collectives between hosts, which are namespaces of this machine; needs root
# Releases
#   make wheels        build and check the wheels and the sdist; ONLY="cp312-x86_64 sdist" builds these alone
#   make release       everything before an upload, see docs/en/contributing/releases.md

# uv installs packages where it is available; pip does with UV=, and where pip was told of other places to install from,
# which uv would not know. TORCH=... uses a virtual environment of its own.
PYTHON ?= python3
TORCH ?= 2.15.0
VENV ?= .venv$(if $(filter-out 2.15.0,$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/installed $(VENV)/built
# The part of requirements-dev.txt that building, the example and phalanx why need; all of it is installed for the other targets.
OF_DEMO := numpy|cloudpickle|scikit-build-core|nanobind|cmake|ninja|scikit-learn|matplotlib|rich|py-spy
SOURCES := $(filter-out csrc/tests/%,$(wildcard csrc/*/*.cpp csrc/*/*.h)) CMakeLists.txt pyproject.toml
TESTS ?= tests
# Each minor version that pyproject.toml allows. What they must all pass is what leans most on torch's own parts.
TORCHES := 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
OF_TORCH := tests/integration tests/replace tests/faults
# Found out where it is first needed, and once.
UV ?= $(eval UV := $(shell $(PYTHON) -m pip config list 2> /dev/null | grep -qE 'index|find-links' || command -v uv))$(UV)
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check)
GPUS := $(wildcard /dev/nvidiactl /dev/kfd /dev/dxg)
CPU_ONLY = $(if $(UV),UV_TORCH_BACKEND=cpu make demo,PIP_EXTRA_INDEX_URL=INDEX make demo; README.md says what INDEX is)
WHEEL_TOOLS := build/wheels/tools

.PHONY: help demo setup format stamp docs wheels release test torch torches integrations test-integrations cluster slow check lint bench bench-ddp bench-step bench-tune bench-trainer bench-checkpoint bench-hosts conformance stress model clean
.DELETE_ON_ERROR:
.NOTPARALLEL:  # pip runs once at a time

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//; p' Makefile

demo: $(VENV)/built
	$(BIN)/phalanx run --nproc-per-node 2 --max-restarts 3 examples/train_digits.py --out runs/digits --fresh
	@echo
	@echo "That was: phalanx run --nproc-per-node 2 --max-restarts 3 \\"
	@echo "              examples/train_digits.py --out runs/digits --fresh"
	@echo "Look at runs/digits/report.html. The command phalanx is in $(VENV), so go on with"
	@echo "    source $(BIN)/activate"
	@echo "    phalanx run --max-restarts 3 examples/train_digits.py --epochs 100 \\"
	@echo "        --out runs/long"
	@echo "and kill -9 one of its ranks from another terminal; or with your own script,"
	@echo "with init_process_group(\"phalanx\") in it. README.md shows more."

wheels: $(WHEEL_TOOLS)/installed
	$(WHEEL_TOOLS)/bin/python tools/wheels.py dist --only $(ONLY)

release: $(READY)
	$(BIN)/python tools/release.py check
	$(MAKE) torches
	rm -rf dist
	$(MAKE) wheels ONLY=
	$(BIN)/python -m pytest -m wheels tests/platforms
	$(BIN)/python tools/release.py tag

# Three files at a time on two cores: while some wait, others compute. pytest exits with 5 if there is nothing to do.
test: $(READY)
	$(BIN)/python -m compileall -q src/phalanx
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not (cluster or slow or integrations or wheels or site)" $(TESTS) || [ $$? = 5 ]

torch:
	$(MAKE) test TESTS="$(OF_TORCH)"

torches:
	for torch in $(TORCHES); do $(MAKE) torch TORCH=$$torch || exit 1; done

integrations:
	$(MAKE) VENV=.venv-integrations MORE=requirements-integrations.txt test-integrations

test-integrations: $(READY)
	$(BIN)/python -m pytest -m integrations tests/libraries

# Each host of these tests has a network of its own, so files run beside each other: their jobs wait more than they compute.
cluster: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m cluster tests

slow: $(READY)
	$(BIN)/python -m pytest -m slow tests

check: lint docs test cluster

setup: $(READY)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

stamp: $(READY)
	$(BIN)/python tools/book.py stamp $(PAGES)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(READY)
	$(BIN)/python tools/book.py check
	$(BIN)/python tools/book.py build
	$(BIN)/python -m pytest -m site tests/docs

bench: $(READY)
	$(BIN)/python -m bench
	$(BIN)/python -m bench.launch

bench-ddp: $(READY)
	$(BIN)/python -m bench.ddp

bench-step: $(READY)
	$(BIN)/python -m bench.step

bench-tune: $(READY)
	$(BIN)/python -m bench.tune

bench-trainer: $(READY)
	$(BIN)/python -m bench.trainer

bench-checkpoint: $(READY)
	$(BIN)/python -m bench.checkpoint

bench-hosts: $(READY)
	$(BIN)/python -m bench.hosts --rate 10gbit --delay-ms 0.1
	$(BIN)/python -m bench.hosts --rate 1gbit --delay-ms 0.1

conformance: $(READY)
	for n in 2 3 4; do $(BIN)/python -m tests.conformance.exam --backend phalanx --world-size $$n --check || exit 1; done
	for n in 2 3 4; do for group in phalanx gloo; do \
	  $(BIN)/python -m tests.conformance.exam --backend $$group --world-size $$n --ddp phalanx --check || exit 1; done; done
	$(BIN)/python -m tests.conformance.exam --backend gloo --world-size 2 --ddp torch --check
	for n in 2 3 4; do PHALANX_REPLACE=gloo $(BIN)/python -m tests.conformance.exam --backend gloo --world-size $$n --check || exit 1; done

stress: $(READY)
	PHALANX_TEST_LONG=1 $(BIN)/python -m pytest tests/stress tests/hosts/test_chaos.py tests/hosts/test_cuts.py tests/checkpoint/test_fuzz.py -p no:cacheprovider

model:
	sh model/check.sh

clean:
	rm -rf build .venv*

# Dependencies first, then the package itself, so that a change of the core rebuilds only the package.
$(VENV)/begun: requirements-dev.txt
	@echo "Step 1 of 2: $(VENV), with torch $(TORCH). Some 3 GB are downloaded, which become 6 GB; several minutes."
	@df -Pk . | awk 'NR == 2 && $$4 < 10485760 {printf "Only %.1f GB are free here. Free some first: both need 9 GB for a while.\n", $$4 / 1048576}'
	$(if $(GPUS),,@echo "This machine shows no GPU. torch for CPUs alone takes 1.5 GB: press Ctrl-C, then"; \
	  echo "    $(CPU_ONLY)")
	$(if $(UV),$(UV) venv --quiet --seed --allow-existing --python $(PYTHON),$(PYTHON) -m venv) $(VENV)
	grep -E '^($(OF_DEMO))==' requirements-dev.txt > $(VENV)/requirements.txt
	$(INSTALL) torch==$(TORCH) -r $(VENV)/requirements.txt
	touch $@

$(VENV)/installed: $(VENV)/begun $(MORE)
	grep -hv '^torch==' requirements-dev.txt $(MORE) > $(VENV)/requirements-dev.txt
	$(INSTALL) torch==$(TORCH) -r $(VENV)/requirements-dev.txt
	touch $@

# The compiler's steps are shown as they come, and the rest of pip's output if it fails.
$(VENV)/built: $(VENV)/begun $(SOURCES)
	@echo "Step 2 of 2: building phalanx, a minute or two."
	@{ $(BIN)/python -m pip install --verbose --disable-pip-version-check --no-build-isolation --no-deps --editable . 2>&1; \
	  echo $$? > $(VENV)/build.status; } | tee $(VENV)/build.log | grep --line-buffered -o '\[[0-9]*/[0-9]*\] [BL].*' | cat
	@test "$$(cat $(VENV)/build.status)" = 0 || { cat $(VENV)/build.log; exit 1; }
	touch $@

$(WHEEL_TOOLS)/installed: requirements-wheels.txt
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-wheels.txt
	touch $@
