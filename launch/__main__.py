"""The `swarm` command. Holds the numeric libraries to one thread before they load: many processes share the cores."""

import contextlib
import os
import sys


def main() -> None:
    """Entry point of the console script."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")  # buffers it would keep in every process
    from launch.cli import app

    status = 0
    try:
        app(prog_name="swarm")
    except SystemExit as end:
        status = int(end.code or 0)
    # Nothing is left to be done. Taking torch down in order takes half a second and touches 150 MB of its libraries.
    with contextlib.suppress(OSError):  # what cannot be written is reported by the end in order
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
