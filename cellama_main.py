"""The entry point of the `cellama` command.

This module is outside the packages, so Ctrl-C exits without a traceback even while the packages are being imported.
"""

import os
import signal
import sys


def main() -> None:
    """Run the command line (`cellama.api.cli`)."""
    if os.getpid() == 1:  # in a container: Linux ignores signals that PID 1 does not handle
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        from cellama.api.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
