"""`python -m fivefold`, and the command fivefold, are the command line."""

from __future__ import annotations

import sys


def main() -> int:
    """The command line's exit code, also where it is interrupted while it is still being imported."""
    try:
        from fivefold.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
