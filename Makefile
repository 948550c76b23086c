# What a developer runs. CONTRIBUTING.md says more; PYTHON chooses the interpreter, .venv's where there is one.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python)
JOBS ?= 2
# One thread a process: two processes already fill a small machine.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS)
# Whole models, pipelines and commands: minutes together, left to `make test`.
LONG = ablation calibrate calibrated_policies cli compile configs context_parallel diffusers diffusers_compile \
	diffusers_masks diffusers_matrix diffusers_scope diffusers_seams diffusers_surgery evaluate families fuzz_calls \
	fuzz_files generation judge model_options picture_run plain_modules quantized_cache quantized_cache_models report \
	routing static_cache steps steps_lifecycle tensor_parallel training transformers_interface two_references

.PHONY: help check format fast test gpu docs

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 10

check:  ## lint, format, types, and whether generated text is up to date
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) scripts/update_readme.py --check
	$(PYTHON) scripts/update_families.py --check

format:  ## mend what can be mended without thinking
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

fast:  ## the tests of numerics, calls and policies; under 90 s on two cores
	$(PYTEST) -m "not slow and not nvcc and not gpu" $(LONG:%=--ignore=tests/test_%.py) \
		--ignore=tests/kernels/test_lane_simulator.py

test:  ## a .venv of the tested versions, lint, types and all tests but the slow ones
	bash scripts/test.sh

gpu:  ## the tests of the compiled kernels, on a Hopper card
	$(PYTHON) -m pytest -m gpu -n 12

docs:  ## write the tables of the README and the docs again from recorded results
	$(PYTHON) scripts/update_readme.py
	$(PYTHON) scripts/update_families.py
