# Two commands matter: `make demo` and `make test`. Both set up what they need and are quick when it is there; so does
# `make proof-cpu`, which shows what overlays do to launchers and tests of others.
#
# Every environment is made from one hashed lock and nothing else. The project joins it as an editable install
# without dependencies: the lock still decides every third-party file, the package is importable from any folder and
# in every child process, the console script exists, and `overlays`, `tests` and `benchmarks` do not become top-level
# names, which putting the checkout on PYTHONPATH would make of them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDARY:
# Editable installs of several environments write the same metadata folder of the checkout.
.NOTPARALLEL:
# What the calling shell has set up must not leak into the environments.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
# Without bytecode on disk every one of the many test processes would compile torch and Megatron anew.
unexport PYTHONDONTWRITEBYTECODE

LOCK ?= locks/current.txt
LANE := $(basename $(notdir $(LOCK)))
BIN := .venv/bin
MINIMUM_COVERAGE := 95
# tests/conftest.py says which tests stay together and which begin. A worker can hold several GiB.
WORKERS ?= --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Lanes that tests run in beside .venv, and older and newer Pythons for the loader alone where the machine has them.
TEST_LANES := .envs/spring-2026 .envs/summer-2026 .envs/newest .envs/mamba3-pinned .envs/edge .envs/proof .envs/engines
LOADER_PYTHONS := 3.10 3.11 3.13
LOADERS := .envs/loader-oldest $(LOADER_PYTHONS:%=.envs/loader-%)

say = @printf '== %s\n'

.PHONY: help
help: ## list the commands
	@printf 'make <command>\n\n'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | \
	    while IFS='|' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done
	@printf '\nLocks: %s\n' "$(patsubst %.in,%.txt,$(filter-out locks/uv.in,$(sort $(wildcard locks/*.in))))"

# --- main jobs -------------------------------------------------------------------------------------------------

.PHONY: demo
demo: .envs/$(LANE)/.ready ## set up one lane and train a tiny model in it; LOCK=locks/newest.txt chooses another lane
	$(say) 'demo in .envs/$(LANE)'
	@.envs/$(LANE)/bin/python examples/train_tiny.py

TORCHRUN = .envs/$(LANE)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2

.PHONY: demo-ranks
demo-ranks: .envs/$(LANE)/.ready ## the demo on two ranks: once alike, which trains, and once with an odd one, which must not
	$(say) 'two ranks that are alike'
	@$(TORCHRUN) examples/train_tiny.py --device cpu
	$(say) 'two ranks, and on the last one an overlay is off'
	@if $(TORCHRUN) examples/odd_rank.py --device cpu; then echo 'it trained all the same'; exit 1; fi

.PHONY: demo-upgrade
demo-upgrade: setup ## take a clone of this checkout through an upgrade, up to the commits that retire what upstream absorbed
	@examples/upgrade.sh summer-2026 newest dsa-branchless-scatter liger-flce-none-backward

.PHONY: proof-cpu
proof-cpu: .envs/proof/.ready archives ## claim by claim, in minutes: a Trainer of transformers and Liger's own tests, stock and with overlays; writes proof/results/cpu.md
	@.envs/proof/bin/python -W ignore proof/run.py --json proof/results/cpu.json --write proof/results/cpu.md \
	    --plot proof/results/cpu.svg

PROOF_PYTHON ?= .envs/proof/bin/python
.PHONY: proof-gpu
proof-gpu: .envs/proof/.ready archives ## the Trainer of `make proof-cpu` on a GPU, with a model of real size; writes proof/results/gpu.md
	@$(PROOF_PYTHON) -W ignore proof/run.py --gpu --json proof/results/gpu.json --write proof/results/gpu.md

.PHONY: differential
differential: .envs/mamba3-pinned/.ready ## configuration by configuration: training steps of Megatron, stock and with all overlays, against float64; GPU=1 takes NCCL and GPUs; writes proof/results/differential-cpu.md or -gpu.md
	@.envs/mamba3-pinned/bin/python -W ignore proof/differential/run.py --full $(if $(GPU),--gpu) \
	    --json proof/results/differential-$(if $(GPU),gpu,cpu).json --write proof/results/differential-$(if $(GPU),gpu,cpu).md

HERE := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
.PHONY: proof
proof: .envs/proof/.ready ## the same of Megatron-LM's own launcher, on a GPU if there is one: MEGATRON_LM=CHECKOUT says where it is; writes proof/results/megatron-gpu.md or -cpu.md
	@$(if $(MEGATRON_LM),,$(error say MEGATRON_LM=CHECKOUT, a checkout of https://github.com/NVIDIA/Megatron-LM such as of the tag core_v0.19.0))
	@$(PROOF_PYTHON) -W ignore proof/run.py --megatron-lm $(MEGATRON_LM) --json proof/results/megatron-$(HERE).json \
	    --write proof/results/megatron-$(HERE).md --plot proof/results/megatron-$(HERE).svg

.PHONY: peers
peers: .envs/proof/.ready archives ## tests of others, as they are, without overlays and with them: Liger's of its loss, and with MEGATRON_LM=CHECKOUT Megatron-LM's
	@$(PROOF_PYTHON) -W ignore proof/run.py --only liger-tests
	@$(if $(MEGATRON_LM),$(PROOF_PYTHON) -W ignore proof/run.py --megatron-lm $(MEGATRON_LM) --only megatron-tests --only megatron-unit-tests,echo "MEGATRON_LM=CHECKOUT runs those of a checkout of Megatron-LM, too")

.PHONY: proof-bridge
proof-bridge: .envs/bridge/.ready ## the same of the pretrain function of megatron-bridge, on a CPU; writes proof/results/bridge-cpu.md
	@.envs/bridge/bin/python -W ignore proof/run.py --bridge --json proof/results/bridge-cpu.json \
	    --write proof/results/bridge-cpu.md

.PHONY: other-patches
other-patches: .envs/foreign/.ready ## apply the patches of other libraries before overlays and after; writes proof/results/other-patches.md, and fails if the audit does not name one that matters
	@.envs/foreign/bin/python -W ignore proof/other_patches.py --json proof/results/other-patches.json --write proof/results/other-patches.md

LAUNCHER_LANES := launchers swift foreign engines
.PHONY: launchers
launchers: .venv/.ready $(LAUNCHER_LANES:%=.envs/%/.ready) ## run the recipes of docs/launchers.md with the releases that it names, on a CPU
	@$(BIN)/pytest --numprocesses 1 --quiet tests/proof/test_launchers.py tests/processes/test_engines.py

.PHONY: rehearse
rehearse: setup wheels ## forget each of the last minor releases of Megatron-Core, and say what is decided on the day and after `witness`; writes proof/results/rehearsals.md
	@$(BIN)/python -W ignore scripts/rehearse.py

.PHONY: unprepared
unprepared: .envs/mamba3-pinned/.ready ## prove 0.19.2 with what was known at 0.18.2, then run the demo and the table of configurations with that; writes proof/results/unprepared-upgrade.md
	@.envs/mamba3-pinned/bin/python -W ignore proof/unprepared_upgrade.py --known-until megatron-core=0.18.2 \
	    --json proof/results/unprepared-upgrade.json --write proof/results/unprepared-upgrade.md

.PHONY: new-user
new-user: .venv/.ready ## ask four questions in a fresh environment as a new user does; writes proof/results/new-user.md
	@$(BIN)/python -W ignore proof/new_user.py --lock locks/summer-2026.txt --json proof/results/new-user.json --write proof/results/new-user.md

.PHONY: held-out
held-out: .envs/mamba3-pinned/.ready wheels ## edit upstream in ways that no probe was written for, and judge the decisions: MEGATRON_LM=CHECKOUT has the branches; writes proof/results/held-out-edits.md
	@.envs/mamba3-pinned/bin/python -W ignore proof/held_out/run.py $(if $(MEGATRON_LM),--megatron-lm $(MEGATRON_LM)) \
	    --json proof/results/held-out-edits.json --write proof/results/held-out-edits.md

.PHONY: lint
lint: .venv/.ready
	$(say) 'ruff check'
	@$(BIN)/ruff check .
	$(say) 'ruff format'
	@$(BIN)/ruff format --check .
	$(say) 'mypy (strict)'
	@$(BIN)/mypy
	$(say) 'import layers'
	@$(BIN)/lint-imports

.PHONY: quick
quick: lint ## while working: lint, type checks, contracts, and the tests of the loader and the settings
	$(say) 'tests that only a GPU runs can be collected'
	@$(BIN)/pytest --quiet --quiet --collect-only tests/gpu >/dev/null || $(BIN)/pytest --quiet --quiet --collect-only tests/gpu
	$(say) 'pytest of the loader, without coverage'
	@$(BIN)/pytest --quiet $(WORKERS) tests/loader

.PHONY: in-step
in-step: .venv/.ready ## the ledger, the generated pages and their links
	$(say) 'ledger in step with the overlays'
	@$(BIN)/python -m megacpp_overlays ledger --check RETIREMENT.md
	$(say) 'generated pages in step with the code, and no link that leads nowhere'
	@$(BIN)/python -m megacpp_overlays reference --check docs
	@scripts/site.sh $(BIN)/properdocs

.PHONY: test
test: setup lint in-step ## set up everything, then lint, type checks, contracts, documentation, and tests: each overlay on the newest release
	$(say) 'pytest, without what is marked `full` and without files that passed and of which nothing has changed'
	@$(BIN)/pytest $(WORKERS) -m 'not full' --kept --durations 20
	@$(BIN)/python scripts/full_run.py show

.PHONY: test-all
test-all: setup lint in-step ## all of `make test`, and every release, lane, size and Python, mutants, planted faults, and branch coverage; writes tests/full-run.json
	$(say) 'pytest with branch coverage, child processes included'
	@$(BIN)/coverage erase
	@KEPT_ANSWERS=no $(BIN)/coverage run -m pytest $(WORKERS) --durations 20 --junitxml .cache/full-run.xml
	$(say) 'coverage'
	@$(BIN)/coverage combine --quiet
	@rm -f .coverage.* # what is left is empty: the data file of a child that was killed
	@$(BIN)/coverage report --fail-under=$(MINIMUM_COVERAGE)
	@$(BIN)/python scripts/full_run.py record tests --junit .cache/full-run.xml
	@$(MAKE) --no-print-directory adversary MUTANTS=3000
	@$(BIN)/python scripts/full_run.py record mutants
	@$(MAKE) --no-print-directory faults
	@$(BIN)/python scripts/full_run.py record faults

.PHONY: test-kernels
test-kernels: .venv/.ready ## the tests of kernels alone, all sizes, in Triton's interpreter and in PyTorch; on a GPU: pytest -m gpu tests/gpu
	@KEPT_ANSWERS=no $(BIN)/pytest $(WORKERS) tests/kernels

.PHONY: edge
edge: setup ## all tests once more in the lane `edge`: the newest torch and Triton, with the newest of every target
	@.envs/edge/bin/python -m pytest $(WORKERS) --durations 20

.PHONY: answers
answers: setup ## derive what scripts of tests print and keep it in tests/answers, so that `make test` derives only what has changed
	@$(BIN)/python scripts/keep_answers.py $(WORKERS) tests/kernels

.PHONY: passes
passes: setup ## run the tests of overlays and kernels that something has changed for, and keep in tests/answers/passed.json which files passed
	@$(BIN)/pytest $(WORKERS) -m 'not full' --kept --keep --quiet tests/kernels tests/overlays

MUTANTS ?= 30000
SEED ?= 1
.PHONY: adversary
adversary: setup ## mutate what probes read, MUTANTS=30000 times, and fail if one is installed on, retired or raises; SEED=1 chooses them
	@PYTHONPATH=tests/support $(BIN)/python -W ignore -m adversary --mutants $(MUTANTS) --seed $(SEED)

.PHONY: faults
faults: setup ## plant the faults of tests/faults.toml, one at a time, and fail if one turns no test of `make test` red
	@$(BIN)/python scripts/plant_faults.py

.PHONY: matrix
matrix: wheels ## probe every release of every target; write packs/matrix.json, packs/matrix.html, the pages of docs/ that quote it, and known findings
	@$(BIN)/python scripts/known_findings.py
	@$(BIN)/python -m megacpp_overlays matrix --archives .cache/wheels --write packs
	@$(BIN)/python -m megacpp_overlays reference --write docs

.PHONY: derived
derived: wheels ## write all that is derived from declarations, probes and packs; PACK=NN runs its reproducer first and keeps the receipt
	@$(BIN)/python scripts/list_overlays.py
	@$(if $(PACK),$(BIN)/python -m megacpp_overlays repro $(PACK) --keep packs)
	@$(BIN)/python -m megacpp_overlays receipts --sync
	@$(BIN)/python -m megacpp_overlays ledger --write RETIREMENT.md
	@$(MAKE) --no-print-directory matrix

.PHONY: docs
docs: .venv/.ready ## build the documentation as a static site in .cache/site/html, all links checked
	@scripts/site.sh $(BIN)/properdocs

.PHONY: bench
bench: .envs/bench/.ready ## measure what importing and counting calls cost; write import_cost.md and call_cost.md of benchmarks/results
	@.envs/bench/bin/python benchmarks/loader/import_cost.py --write
	@.envs/bench/bin/python benchmarks/loader/call_cost.py --write

GPU_PAGE = --json benchmarks/results/$(1).json --write benchmarks/results/$(1).md
.PHONY: bench-gpu
bench-gpu: .venv/.ready .envs/newest/.ready .envs/proof/.ready ## on NVIDIA GPUs: race the linear cross entropy with its peers, alone, across ranks and in whole steps of Megatron and of the Trainer
	@$(BIN)/python scripts/wheels.py fetch locks/peers.txt .cache/peers/wheels
	@$(BIN)/python benchmarks/linear_cross_entropy/unpack.py .cache/peers .cache/peers/wheels
	@.envs/newest/bin/python -W ignore benchmarks/linear_cross_entropy/run.py $(call GPU_PAGE,linear_cross_entropy) \
	    --peers-at .cache/peers --plot benchmarks/results/linear_cross_entropy.svg
	@.envs/newest/bin/python -W ignore benchmarks/linear_cross_entropy_step/run.py $(call GPU_PAGE,linear_cross_entropy_step) \
	    --plot benchmarks/results/linear_cross_entropy_step.svg
	@.envs/newest/bin/python -W ignore benchmarks/linear_cross_entropy_ranks/run.py $(call GPU_PAGE,linear_cross_entropy_ranks) \
	    --plot benchmarks/results/linear_cross_entropy_ranks.svg
	@PYTHONPATH=$(CURDIR)/.cache/peers/liger-0.8.5/site-packages .envs/proof/bin/python -W ignore benchmarks/trainer_step/run.py \
	    $(call GPU_PAGE,trainer_step) --plot benchmarks/results/trainer_step.svg

.PHONY: te
te: .envs/te/.ready ## build Transformer Engine into .envs/te (about 20 minutes), which `make test` then tests against too

# --- setting up ------------------------------------------------------------------------------------------------

.PHONY: setup
setup: .venv/.ready $(TEST_LANES:%=%/.ready) $(LOADERS:%=%/.ready) wheels archives browser ## all environments and wheels that `make test` needs

.PHONY: wheels
wheels: .venv/.ready ## fetch the upstream releases that the offline probe tests read
	@$(BIN)/python scripts/wheels.py fetch locks/wheels.txt .cache/wheels

.PHONY: archives
archives: .venv/.ready ## fetch the source archives whose tests and launchers `make proof-cpu` runs
	@$(BIN)/python scripts/wheels.py fetch --sources locks/proof-source.txt .cache/proof

.PHONY: browser
browser: ## find a Chromium for the tests of packs/matrix.html, or fetch one where npm is; without one they are skipped, unless MEGACPP_REQUIRE_BROWSER is set
	@scripts/browser.sh --fetch >/dev/null

# .synced: the environment holds what its lock says. .ready: the project is in it as well.
.venv/.synced: locks/dev.txt | locks
	@scripts/environment.sh .venv $< && touch $@

.envs/%/.synced: locks/%.txt | locks
	@scripts/environment.sh .envs/$* $< && touch $@

.PHONY: locks
locks: ## fail if a lane and its lock disagree; everything that installs asks this first
	@"$$(scripts/python.sh 3.12 --fetch)" scripts/lock.py check $(patsubst %.in,%.txt,$(sort $(wildcard locks/*.in)))

.venv/.ready .envs/%/.ready: EDITABLE = --quiet --offline --no-deps --no-build-isolation --editable .

.venv/.ready: .venv/.synced pyproject.toml
	$(say) 'megacpp_overlays into .venv'
	@"$$(scripts/uv.sh)" pip install --python $(@D)/bin/python $(EDITABLE) && touch $@

.envs/%/.ready: .envs/%/.synced pyproject.toml
	$(say) 'megacpp_overlays into .envs/$*'
	@"$$(scripts/uv.sh)" pip install --python $(@D)/bin/python $(EDITABLE) && touch $@

# The benchmark measures what users install. The wheel comes from an sdist in a folder of its own: a build in the
# checkout would leave a build/ behind, whose old modules end up in the next wheel.
PACKAGE := pyproject.toml $(shell find megacpp_overlays overlays feature_probes -name '*.py') $(wildcard packs/*.json packs/*/*)

.envs/bench/.ready: .envs/bench/.synced .venv/.ready $(PACKAGE)
	$(say) 'a wheel of megacpp_overlays into .envs/bench'
	@rm -rf .cache/dist && mkdir -p .cache/dist
	@$(BIN)/python -m build --no-isolation --outdir .cache/dist . >.cache/dist/log 2>&1 || { cat .cache/dist/log; exit 1; }
	@"$$(scripts/uv.sh)" pip install --quiet --offline --no-deps --reinstall --python $(@D)/bin/python .cache/dist/*.whl
	@touch $@

# The PyTorch part of Transformer Engine is published as source alone, so it is built before the project joins.
.envs/te/.synced: locks/te.txt locks/te-source.txt | locks
	@scripts/environment.sh .envs/te $<
	@scripts/sources.sh .envs/te locks/te-source.txt && touch $@

# mamba-ssm, too, is published as source alone; without its CUDA kernels it is built in a minute.
.envs/spring-2026/.synced: locks/spring-2026.txt locks/spring-2026-source.txt | locks
	@scripts/environment.sh .envs/spring-2026 $<
	@scripts/sources.sh .envs/spring-2026 locks/spring-2026-source.txt && touch $@

.envs/mamba3-pinned/.synced .envs/edge/.synced: .envs/%/.synced: locks/%.txt locks/mamba3-source.txt | locks
	@scripts/environment.sh .envs/$* $<
	@scripts/sources.sh .envs/$* locks/mamba3-source.txt && touch $@

# So is the parser of omegaconf's grammar, which is Python alone.
.envs/bridge/.synced .envs/foreign/.synced: .envs/%/.synced: locks/%.txt locks/bridge-source.txt | locks
	@scripts/environment.sh .envs/$* $<
	@scripts/sources.sh .envs/$* locks/bridge-source.txt && touch $@

# The loader alone, with the bare checkout on its path. A Python that is missing here is skipped, and so are its tests.
.envs/loader-oldest/.ready: locks/loader-oldest.txt
	@scripts/environment.sh $(@D) $< && touch $@

$(LOADER_PYTHONS:%=.envs/loader-%/.ready): .envs/loader-%/.ready: locks/loader.txt
	@if scripts/python.sh $* >/dev/null; then scripts/environment.sh $(@D) $< $*; \
	else mkdir -p $(@D); printf '== no Python %s here: its tests are skipped\n' '$*'; fi
	@touch $@

# --- locks: never changed by the commands above ----------------------------------------------------------------

# In this order: `dev`, `bench`, `engines`, `proof`, `launchers` and `bridge` keep to what `current` pins, `foreign` and `swift` to what
# `newest` does.
LANES := loader current newest summer-2026 spring-2026 mamba3-pinned edge te dev bench engines proof launchers bridge foreign swift loader-oldest uv

.PHONY: lock
lock: ## recompile the locks, keeping versions where they still fit; UPGRADE=1 takes the newest, LANES=name one of them
	@"$$(scripts/python.sh 3.12 --fetch)" scripts/lock.py write $(if $(UPGRADE),--upgrade) $(LANES)

.PHONY: clean
clean: ## remove environments and build outputs; downloaded wheels stay
	rm -rf .venv .envs build dist *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache \
	    .import_linter_cache .hypothesis
