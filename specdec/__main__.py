"""Console script; `python -m specdec` is `specdec`. Ranks of torchrun beside the first wait for its engine instead."""

import atexit
import gc
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; Ctrl-C exits with 130 at any moment, also while modules are imported."""
    # Exempts all objects from the interpreter's last collection, which takes half a second.
    atexit.register(gc.freeze)
    try:
        from specdec.core.launch import current_launch

        launch = current_launch()
        if launch is not None and launch.rank:
            from specdec.building.rank_process import follow

            follow(launch)
        from specdec.train_eagle.program import main as run
    except ValueError as error:
        print(f"specdec: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
