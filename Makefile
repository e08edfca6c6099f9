# One entry for people and CI. `make` lists nothing it does not do.
.PHONY: test check format wheel

test: check ## everything that must pass: style, types, import rules, tests
	python -m pytest -q -n 2

check: ## style, types and import rules
	ruff format --check .
	ruff check .
	mypy
	lint-imports

format: ## rewrite in the project's style
	ruff format .
	ruff check --fix .

wheel: ## build the wheel into dist/
	python -m build --wheel
