"""Console script; `python -m specdec` is `specdec`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; Ctrl-C exits with 130 at any moment, also while modules are imported."""
    try:
        from specdec.train_eagle.program import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
