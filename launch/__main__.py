"""The `swarm` command. Holds the numeric libraries to one thread before they load: many processes share the cores."""

import os
import sys


def main() -> None:
    """Entry point of the console script."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")  # buffers it would keep in every process
    from launch.cli import app

    app(prog_name="swarm")
    sys.exit(0)


if __name__ == "__main__":
    main()
