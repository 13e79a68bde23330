"""`python -m specdec` is `specdec`."""

from specdec.cli.app import main

main()
