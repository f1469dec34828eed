"""The console script: hears signals from its first moment to its last."""

from __future__ import annotations

import sys

try:
    from optkit.processes import signals
except ImportError as error:
    if error.name != "fcntl":
        raise
    sys.exit(f"error: {error}")


def start() -> None:
    """Run the command line and end with its exit status."""
    signals.listen()
    from optkit_cli.main import main

    status = main()
    signals.work_is_done()
    sys.exit(status)


if __name__ == "__main__":
    start()
