# One word per workflow; each works alone in a fresh clone and needs only a C compiler, Python's headers and its venv module.
#
#   make demo    train a language model whose state does not fit in the memory it is given
#   make test    prove that the numbers are those of ordinary training (fast suite)

PYTHON ?= python3
CC     ?= cc
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := csrc/build_ffi.py $(wildcard csrc/*/*.[ch])
PYTEST  = $(BIN)/python -m pytest
CHECKED := aio offload tests benchmarks examples setup.py

# Threads that wait for one another sleep instead of spinning: on a busy machine that is several times faster.
demo test test-parity test-others test-all check asan tsan: export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-parity test-others test-all check bench asan tsan clean

demo: $(VENV)/.ready-bench
	$(BIN)/python examples/demo.py

# Two processes, since tests wait for drives half of the time. The first one's output comes when it ends, in one piece; the
# other's at once: `+` exempts it.
test: $(VENV)/.ready-test
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-parity test-others

test-parity:
	$(PYTEST) -m "not slow" tests/parity

test-others:
	+$(PYTEST) -m "not slow" --ignore=tests/parity

test-all: $(VENV)/.ready-test
	$(PYTEST) --timeout=1800

check: $(VENV)/.ready-dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(PYTEST) -q tests/test_architecture.py
	$(CC) $(shell cd csrc && ../$(BIN)/python -c 'import build_ffi; print(*build_ffi.CFLAGS)') \
	  -Icsrc -fsyntax-only $(filter %.c,$(NATIVE))

# Those that need neither root nor an hour; the others are in benchmarks/README.md.
BENCHMARKS ?= step aio update load durability layers
bench: $(VENV)/.ready-bench
	@mkdir -p runs
	$(BIN)/offload-bench io runs
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/bench_$$name.py || exit 1; done

# The sanitizers watch the C code under the tests that drive it hardest; tests that start a sanitized program of their own
# are part of the other suites. `build/<name>` shadows the normal extension: -P keeps the working folder off the path.
# What else pip left in build/ goes, or a later install would take it. LeakSanitizer is off, since the interpreter keeps memory at exit by design.
# setarch: address randomisation of newer kernels leaves no room for the shadow memory of older libtsan.
SANITIZED_TESTS ?= tests/aio tests/simd
SANITIZED = $(BIN)/python -P -m pytest -k "not sanitizer" -m "not slow" --timeout=900 $(SANITIZED_TESTS)
LOADED = $(BIN)/python -P -c 'import sys, _offload_native as n; sys.exit("build/$@" not in n.__file__)'

asan: $(VENV)/.ready-test
	rm -rf build
	OFFLOAD_CFLAGS="-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
	  OFFLOAD_LDFLAGS="-fsanitize=address,undefined" $(BIN)/python -m pip install -q --no-deps --target build/asan .
	rm -rf build/lib* build/temp* build/bdist*
	export PYTHONPATH=build/asan ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)"; \
	  $(LOADED) && $(SANITIZED)

tsan: $(VENV)/.ready-test
	rm -rf build
	OFFLOAD_CFLAGS="-g -fno-omit-frame-pointer -fsanitize=thread" OFFLOAD_LDFLAGS="-fsanitize=thread" \
	  $(BIN)/python -m pip install -q --no-deps --target build/tsan .
	rm -rf build/lib* build/temp* build/bdist*
	export PYTHONPATH=build/tsan TSAN_OPTIONS="halt_on_error=1 report_signal_unsafe=0" \
	  LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)"; \
	  setarch -R $(LOADED) && setarch -R $(SANITIZED)

# The environment: one stamp for each set of extras. A changed C file builds the extension again.
EXTRAS_bench := bench
EXTRAS_test  := test,bench,hf
EXTRAS_dev   := dev,test,bench,hf
$(VENV)/.ready-%: $(BIN)/python pyproject.toml constraints.txt setup.py $(NATIVE)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[$(EXTRAS_$*)]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist runs *.egg-info _offload_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
