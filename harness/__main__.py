"""`python -m harness` is `relaybench`."""

from harness.cli import main

main()
