# `make demo` and `make test` set up everything they need in a virtual environment of their own.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RANKS ?= 4
DEMO := build/demo

# What `make quick` runs: the mathematics, files, goldens and imports; no compiler, no pages, one run under MPI.
QUICK := $(addprefix tests/test_,affine.py cases.py compat.py conv.py decay.py finite.py gate.py imports.py layout.py \
	options.py partition.py reference.py scan.py step.py hdf5_results.py compare.py) \
	"tests/test_golden.py::test_engines_pass_them_all" "tests/test_golden_check.py::test_over_ranks"

.PHONY: demo test quick clean

demo: $(VENV)/installed
	mkdir -p $(DEMO)
	$(BIN)/kda-engine input --from-text LICENSE --tokens 4096 --force $(DEMO)/input.h5
	PATH="$(CURDIR)/$(BIN):$$PATH" mpirun -n $(RANKS) $(BIN)/kda-engine run $(DEMO)/input.h5 $(DEMO)/output.h5 --backward --engine numpy --force
	$(BIN)/kda-engine run $(DEMO)/input.h5 $(DEMO)/reference.h5 --backward --engine reference --force
	$(BIN)/kda-engine compare $(DEMO)/output.h5 $(DEMO)/reference.h5

test: $(VENV)/test-installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q

quick: $(VENV)/quick-installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q $(QUICK)

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[mpich]'
	touch $@

$(VENV)/quick-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[mpich,dev]'
	touch $@

# The tests also compile every CUDA kernel, which needs the compiler's wheels but no GPU.
$(VENV)/test-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[mpich,dev,plot,cuda13]'
	touch $@

clean:
	rm -rf build $(VENV)
