"""Where the command `cellama` begins: apart from its packages, so that Ctrl-C ends the import of those, too."""

import os
import signal
import sys


def main() -> None:
    """Runs the command line (cellama.api.cli)."""
    if os.getpid() == 1:  # in a container: Linux drops signals for PID 1 that it does not handle
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        from cellama.api.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
