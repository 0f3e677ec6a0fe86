"""Entry point of the ``radar`` command; the commands themselves are in `commands.py`."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]

_NEEDED = ("typer", "rich", "jinja2")


def main() -> None:
    """Run the ``radar`` command with the arguments of this process.

    Exits with 0, or with 2 after one line on stderr about bad input or a missing package.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"radar: error: the command line needs {', '.join(missing)}; "
            'run: pip install "radar-kernels[cli]"',
            file=sys.stderr,
        )
        raise SystemExit(2)
    from radar_core.commands import app

    app(prog_name="radar")


if __name__ == "__main__":
    main()
