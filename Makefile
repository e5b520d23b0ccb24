# make demo           create the environment, and train a network on four ranks
# make test           create the environment, and run the default tests: of tests/unit and tests/cluster, no grids and
#                     none marked slow
# make test-ten       run all tests ten times, with one core busy
# make test-system    test a real JupyterLab in a headless browser, nbconvert, papermill, a terminal, lessons, frameworks,
#                     all grids and slow tests; ARGS=--sample for a sample, as in CI
# make test-long      run more tests of the same kinds, which CI leaves out
# make test-platform  run the default tests with the packages that Colab pins; PLATFORM=kaggle for Kaggle's, lowest for
#                     the lowest versions that setup.cfg allows, between for versions between these and the newest
# make test-hosts     test several hosts as namespaces of this machine: ssh, faults, firewalls, Slurm; as root on Linux
# make test-python    run the default tests on Python 3.13 or 3.14 in a Debian chroot; VERSION=3.13; as root on Linux
#                     TARGET=test-platform PLATFORM=colab: with Colab's packages.
#                     The chroots stay in CHROOTS, by default /var/tmp/ddip-chroots.
# make soak           run 500 cells with random faults; CELLS=60 SEED=1 for a shorter, repeatable run
# make fuzz           run 150 random steps against a model; STEPS=10000 SEED=7 for a longer, repeatable run
# make fuzz-training  cause faults in training loops, and compare the ranks; FAULTS=100 SEED=2
# make fuzz-saves     kill sessions and ranks while they save, and load each save; KILLS=50 SEED=2
# make fuzz-objects   send random object graphs through pickling; GRAPHS=100 SEED=2
# make check          run ruff, the format check, mypy, the import rules and tests/source
# make format         fix what ruff can fix
# make bench          run the benchmarks, and write benchmarks/RESULTS.md
# make docs           build the documentation in build/docs; a warning is an error
# make notebooks      run the notebooks, and store them with their output; NAMES="01_quickstart" for some
# make pictures       take the README's pictures in JupyterLab, and record its animation
# make dist           build and check the sdist and the wheel, and test the wheel in isolation from this checkout
# make wheelhouse     collect the wheels for an offline machine with its own torch; PYTHON_VERSION=3.12
#                     TORCH=torch==2.11.0; with NCCL=2.30.7 also that NCCL, which puts two ranks on one GPU
# make clean          remove environments and build results
#
# To use another Python, torch or environment:
#   make test PYTHON=python3.12 TORCH=torch==2.13.0 VENV=/tmp/ddip-env

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
BIN := $(VENV)/bin
SUDO := $(shell command -v sudo)
PEERS := $(VENV)-peers/bin/python
READY := $(VENV)/.ready-$(subst /,_,$(PYTHON)-$(TORCH))

SYSTEM := $(READY)-system
DOCS := $(READY)-docs

.PHONY: demo test test-ten test-system test-long test-platform test-hosts test-python docs pictures notebooks check format bench soak fuzz fuzz-training fuzz-saves fuzz-objects wheelhouse dist clean

demo: $(READY)
	$(BIN)/python notebooks/run.py notebooks/01_quickstart.ipynb

# RECORD=newest writes the result to docs/compatibility.md.
test: $(READY)
	$(BIN)/python -m pytest $(if $(RECORD),--junitxml=build/tests.xml) $(ARGS); code=$$?; \
	test -z "$(RECORD)" || $(BIN)/python tests/platforms/record_run.py $(RECORD) build/tests.xml; exit $$code

# Keeps one core busy until this shell ends.
BUSY := import os; shell = os.getppid(); any(os.getppid() != shell for _ in iter(int, 1))
test-ten: $(READY)
	@$(BIN)/python -c '$(BUSY)' & load=$$!; trap "kill $$load" EXIT; trap "exit 1" INT TERM; \
	for run in 1 2 3 4 5 6 7 8 9 10; do echo "run $$run of 10"; $(BIN)/python -m pytest $(ARGS) || exit 1; done

test-system: $(SYSTEM)
	$(BIN)/python -m pytest tests/system --junitxml=build/system.xml $(ARGS)
	test -n "$(ARGS)" || $(BIN)/python tests/platforms/record_run.py front-ends build/system.xml
	$(BIN)/python -m pytest tests/system/test_stops.py -m alone
	$(BIN)/python -m pytest tests/frameworks $(ARGS)
	$(BIN)/python -m pytest tests/unit tests/cluster -m "grid or slow and not long" $(ARGS)

SPAWNED := $(foreach name,recovery whole_ranks group_places folder limits listeners,tests/cluster/test_$(name).py)
test-long: $(SYSTEM)
	$(BIN)/python -m pytest tests/unit tests/cluster tests/frameworks tests/system -m long $(ARGS)
	$(MAKE) test-hosts ARGS="-m long $(ARGS)"
	$(BIN)/python -m pytest --spawn -n2 $(SPAWNED) $(ARGS)

# Installs Debian packages without starting their services.
HOSTS := $(BIN)/python -m tests.hosts.network
INSTALL := SYSTEMD_OFFLINE=1 DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends
test-hosts: $(READY)
	missing="$$($(HOSTS) missing)"; test -z "$$missing" || { apt-get -qq update && $(INSTALL) $$missing; } > /dev/null
	$(BIN)/python -m tests.hosts.three_at_once $(ARGS)

VERSION ?= 3.14
test-python:
	CHROOTS="$(CHROOTS)" TORCH="$(TORCH)" TARGET="$(TARGET)" PLATFORM="$(PLATFORM)" RECORD="$(RECORD)" \
	tests/platforms/chroot.sh $(VERSION) $(ARGS)

pictures: $(SYSTEM)
	$(BIN)/python -m tests.system.pictures notebooks/pictures
	$(BIN)/python -m tests.system.animation notebooks/pictures

docs: $(DOCS)
	$(BIN)/python -m sphinx -b html -W --keep-going -q -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

notebooks: $(READY)
	$(BIN)/python -m tests.system.stored $(NAMES)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/*.py
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/source

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

CELLS ?= 500
soak: $(READY)
	$(BIN)/python tests/soak.py $(CELLS) $(SEED)

STEPS ?= 150
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --steps $(STEPS) $(if $(SEED),--seed $(SEED)) $(ARGS)

FAULTS ?= 2000
fuzz-training: $(READY)
	$(BIN)/python -m tests.training_fuzz --faults $(FAULTS) --seed $(or $(SEED),1) $(ARGS)

KILLS ?= 200
fuzz-saves: $(READY)
	$(BIN)/python -m tests.kill_saves --kills $(KILLS) --seed $(or $(SEED),1) $(ARGS)

GRAPHS ?= 5000
fuzz-objects: $(READY)
	$(BIN)/python -m tests.object_graphs --graphs $(GRAPHS) --seed $(or $(SEED),1) $(ARGS)

# For the GPU tests (tests/gpu.sh), and for clusters without a network.
PYTHON_VERSION ?= 3.12
wheelhouse:
	$(PYTHON) -m venv --clear build/wheelhouse-env
	build/wheelhouse-env/bin/python -m pip install --quiet --upgrade pip setuptools wheel packaging
	build/wheelhouse-env/bin/python tests/wheelhouse.py --python $(PYTHON_VERSION) --torch "$(TORCH)" --to wheelhouse \
	  $(if $(NCCL),--nccl $(NCCL))

dist: $(READY)
	$(BIN)/python tests/dist.py --to dist

bench: $(READY) $(PEERS)
	PEERS=$(PEERS) $(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/cell.py
	$(BIN)/python benchmarks/differences.py
	$(BIN)/python benchmarks/objects.py
	$(BIN)/python benchmarks/saves.py
	$(BIN)/python benchmarks/kept.py
	$(HOSTS) run -- $(BIN)/python benchmarks/hosts.py
	$(BIN)/python benchmarks/many_starts.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/background.py
	$(BIN)/python benchmarks/output.py
	$(BIN)/python benchmarks/fastai.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/scale.py
	$(HOSTS) run -- $(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/watch.py
	$(BIN)/python benchmarks/results.py
	$(BIN)/python benchmarks/figures.py

# A separate environment with the tools that the benchmarks compare with, and the same torch.
$(PEERS):
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-peers/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)-peers/bin/python -m pip install --quiet jupyter-distributed==0.1.1 nbdistributed==0.1.0 ipykernel numpy psutil

# The environment is updated when the requirements change, and created again for another Python or torch.
$(READY): setup.cfg setup.py pyproject.toml
	test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install -qq "$(TORCH)" --editable ".[test,check,fastai]"
	touch $@

# An environment with the pins of a file in tests/platforms and this Python, of which pip may upgrade only ipyparallel 8.
PLATFORM ?= colab
PINNED := $(VENV)-$(PLATFORM)
test-platform: $(PINNED)/.ready
	$(PINNED)/bin/python -m pytest tests/cluster/test_notebooks.py -k kaggle -m "grid or not grid"
	rm -f build/platform.xml  # else a run that is killed would write the former row
	$(PINNED)/bin/python -m pytest --junitxml=build/platform.xml $(ARGS); code=$$?; \
	test -n "$(ARGS)" || $(PINNED)/bin/python tests/platforms/record_run.py $(PLATFORM) build/platform.xml; exit $$code

$(PINNED)/.ready: tests/platforms/$(PLATFORM).txt setup.cfg setup.py pyproject.toml
	$(PYTHON) -m venv --clear $(PINNED)
	$(PINNED)/bin/python -m pip install --quiet --upgrade pip
	$(PINNED)/bin/python -m pip install --quiet --requirement tests/platforms/$(PLATFORM).txt
	$(PINNED)/bin/python tests/platforms/dry_run.py .
	grep -v 'ipyparallel==8' tests/platforms/$(PLATFORM).txt > $(PINNED)/pins.txt
	$(PINNED)/bin/python -m pip install --quiet --constraint $(PINNED)/pins.txt --editable ".[test]"
	touch $@

# Additional requirements of the system tests: Python packages, and Debian's Chromium. If DeepSpeed cannot be built, its
# tests are skipped; its op for CPU groups is compiled here, because the first cell would otherwise compile it.
COMPILE := from deepspeed.accelerator import get_accelerator as get; get().create_op_builder("ShareMemCommBuilder").load()
$(SYSTEM): $(READY)
	$(BIN)/python -m pip install -qq "$(TORCH)" --editable ".[test,check,fastai,hf,lightning,system,docs]"
	-DS_BUILD_OPS=0 $(BIN)/python -m pip install -qq --no-build-isolation deepspeed && $(BIN)/python -c '$(COMPILE)'
	test -x /usr/bin/chromium || { $(SUDO) apt-get -qq update && $(SUDO) apt-get -qq install --yes chromium; } > /dev/null
	touch $@

# Requirements of the documentation, none of which is needed to use ddip.
$(DOCS): $(READY)
	$(BIN)/python -m pip install -qq "$(TORCH)" --editable ".[test,check,fastai,docs]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-peers build docs/tutorials dist wheelhouse *.egg-info .pytest_cache .mypy_cache .ruff_cache
