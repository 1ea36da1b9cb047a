# `make help` says what each verb does.
PYTHON ?= python3
# Other versions than those of constraints.txt: make test VERSIONS="torch==2.15.0 numpy==1.26.4". They and another
# PYTHON (python3.13) get a virtual environment of their own beside .venv.
VERSIONS ?=
VARIANT := $(subst ==,-,$(patsubst %,-%,$(VERSIONS) $(filter-out python3,$(notdir $(PYTHON)))))
EMPTY :=
VENV ?= .venv$(subst $(EMPTY) $(EMPTY),,$(VARIANT))
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt
PYTEST := $(BIN)/python -m pytest
SLURM_PACKAGES := slurm-wlm slurmdbd munge mariadb-server iproute2 openssh-server openssh-client fish tcsh zsh \
	bubblewrap sshfs
SLURM_PROGRAMS := slurmctld slurmd slurmdbd munged mariadbd ip sshd ssh fish tcsh zsh bwrap sshfs
# Two thirds of what tests/on_slurm takes; the last third is whatever is not named here. The nodes of the first third
# mount the folders of the tests by a client with the caches of NFS, for which root is needed.
SHARED := $(if $(filter 0,$(shell id -u)),--shared nfs)
SLURM_1 := $(patsubst %,tests/on_slurm/test_%.py,fence node_fail training)
SLURM_2 := $(patsubst %,tests/on_slurm/test_%.py,chaos controller elements faults frameworks stop)
# Below two minutes on one core, together.
FAST := $(addprefix tests/,architecture settings slurm runs pages environments host)
BENCHMARKS := "startup.py --runs 5" "start.py --rounds 1" "restart.py --rounds 1" \
	"checkpoint_stall.py --sizes 100 --rounds 2" "step.py --sizes small --rounds 10 --seconds 0.2"

.DEFAULT_GOAL := help
.PHONY: help train test check lint format bench chaos matrix pictures docs dist clean release-tag install slurm browser \
	programs gpu pytest unit distributed slurm-tests-1 slurm-tests-2 slurm-tests-3 end-to-end-tests fast-tests other-tests

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# If a package is named twice, the first version counts.
	printf '%s\n' $(VERSIONS) | cat - constraints.txt | awk -F '==' '!named[$$1]++' > $(VENV)/constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[report]'
	@touch $@

$(BIN)/.installed-docs: $(BIN)/.installed
	$(PIP) --editable '.[docs]'
	@touch $@

$(BIN)/.installed-test: $(BIN)/.installed
	$(PIP) --editable '.[test]'
	@touch $@

install: $(BIN)/.installed

train: install  ## set up a virtual environment and train a small GPT on this machine; ARGS are settings
	$(BIN)/slurmddp train $(ARGS)

slurm:
	@PACKAGES="$(SLURM_PACKAGES)" PROGRAMS="$(SLURM_PROGRAMS)" sh .ci/install-programs

browser:
	@PACKAGES=chromium PROGRAMS=chromium sh .ci/install-programs

# SLURM and the browser in one call of apt: of two calls, one would wait for the other's lock.
programs:
	@PACKAGES="$(SLURM_PACKAGES) chromium" PROGRAMS="$(SLURM_PROGRAMS) chromium" sh .ci/install-programs

test:  ## install what the tests need and run all of them, on a real SLURM too
	@# pip and apt wait for downloads and disks, so they run beside each other.
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(BIN)/.installed-test programs
	@# Hundreds of processes import these, and PYTHONDONTWRITEBYTECODE may keep them from storing what they compile.
	@$(BIN)/python -m compileall -q slurmddp tests/support
	@# Waits of SLURM and of ranks leave the processors idle, so all parts run beside each other; output comes as
	@# each ends.
	$(MAKE) --no-print-directory --jobs=6 --keep-going --output-sync=target slurm-tests-1 slurm-tests-2 \
		slurm-tests-3 end-to-end-tests other-tests $(if $(VERSIONS),,lint)

check: $(BIN)/.installed-test  ## the linters and the fast tests: no root, no SLURM, no browser; before each commit
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target lint fast-tests

lint: $(BIN)/.installed-test  ## ruff, mypy (strict) and a table of the style of each room
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python tests/architecture/style.py

format: $(BIN)/.installed-test  ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pytest: $(BIN)/.installed-test
	$(PYTEST) $(ARGS)

matrix: $(BIN)/.installed-test slurm  ## run a part of the tests on the oldest and newest torch, Hydra, Python, SLURM
	@$(PYTHON) .ci/matrix $(ARGS)

unit: $(BIN)/.installed-test browser
	$(PYTEST) tests -m "not distributed and not slurm and not gpu"

distributed: $(BIN)/.installed-test
	$(PYTEST) tests -m distributed

slurm-tests-1: $(BIN)/.installed-test slurm
	$(PYTEST) $(SLURM_1) -m "not slow" $(SHARED) --durations=15

slurm-tests-2: $(BIN)/.installed-test slurm
	$(PYTEST) $(SLURM_2) -m "not slow" --durations=15

slurm-tests-3: $(BIN)/.installed-test slurm
	$(PYTEST) tests/on_slurm $(addprefix --ignore=,$(SLURM_1) $(SLURM_2)) -m "not slow" --durations=15

end-to-end-tests: $(BIN)/.installed-test browser
	$(PYTEST) tests/end_to_end -m "not slow and not gpu" --durations=15

fast-tests: $(BIN)/.installed-test
	$(PYTEST) $(FAST) -m "not distributed and not slurm and not gpu and not slow and not browser"

other-tests: $(BIN)/.installed-test browser
	$(PYTEST) tests --ignore=tests/on_slurm --ignore=tests/end_to_end -m "not slow and not gpu" --durations=15

gpu: $(BIN)/.installed-test
	$(PYTEST) tests/gpu

bench: $(BIN)/.installed-test slurm  ## measure what is promised of speed, in short; figures are printed only
	@missed=; for benchmark in $(BENCHMARKS); do \
		echo "== benchmarks/$$benchmark"; \
		$(BIN)/python benchmarks/$$benchmark || missed="$$missed $$benchmark,"; \
	done; [ -z "$$missed" ] || { echo "not held, or failed:$$missed see above" >&2; exit 1; }

chaos: $(BIN)/.installed-test slurm  ## disturb trainings on a SLURM of this machine; ARGS='--faults 100', or --help
	PYTHONPATH=tests $(BIN)/python -m chaos $(ARGS)

pictures: $(BIN)/.installed-test browser slurm  ## draw the pictures of README and docs from real runs; ARGS names some
	PYTHONPATH=tests $(BIN)/python docs/images/make.py $(ARGS)

docs: $(BIN)/.installed-docs  ## build the site of the docs into build/site; ARGS=serve shows it while you write
	@# The theme's warning about MkDocs 2, which pyproject.toml excludes.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --strict)

dist: release-tag $(BIN)/.installed-test  ## build the wheel and the sdist into dist/; TAG=v1.2.3 must be the version
	rm -rf build dist
	$(BIN)/python -m build

release-tag:
	@version=v$$($(PYTHON) -c 'import slurmddp; print(slurmddp.__version__)'); [ "$(or $(TAG),$$version)" = "$$version" ] || \
		{ echo "The tag $(TAG) is not $$version, the version in slurmddp/__init__.py." >&2; exit 1; }

clean:  ## remove what the other verbs made, except runs/
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
