# Everything a fresh clone needs: Python 3.11 or newer, make and a package registry.
#   make train   sets up .venv and trains the default model       make test    sets up .venv and runs the tests
#   make lint    style and types                                  make clean   removes .venv and what the runs wrote
PYTHON ?= python3
PY := .venv/bin/python
ARGS ?=

# OpenMP's idle threads spin by default; on few cores they take them from the CPU engine's own threads.
export OMP_WAIT_POLICY := passive

.PHONY: train test lint clean

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mok needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch .venv/.done

train: .venv/.done
	$(PY) -m mok train $(ARGS)

test: .venv/.done
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest $(ARGS)

lint: .venv/.done
	$(PY) -m ruff check .
	$(PY) -m mypy

clean:
	rm -rf .venv out build *.egg-info .pytest_cache .ruff_cache .mypy_cache
