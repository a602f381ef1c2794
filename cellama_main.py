"""Where the command `cellama` begins: apart from its packages, so that Ctrl-C ends the import of those, too."""

import sys


def main() -> None:
    """Runs the command line (cellama.api.cli)."""
    try:
        from cellama.api.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
