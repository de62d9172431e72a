"""The entry point: the list of commands, and what becomes of anything that goes wrong in one.

Exit codes: 0 done; 1 a valid question whose answer is no; 2 bad input, or an output that cannot be written; 70 a bug of
fivefold's; 130 interrupted; 141 the reader of a pipe went away.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from fivefold import __version__
from fivefold.cli import failures
from fivefold.cli.output import lenient_streams
from fivefold.errors import FivefoldError

# Name, module and function, one line for the list. A new command is one file and one row here.
COMMANDS = (
    ("plan", "plan:plan", "Search all layouts, and say why the best one is best."),
    ("estimate", "estimate:estimate", "Price one layout: memory, step time, traffic, broken rules."),
    ("compare", "compare:compare", "Where two layouts differ, by owner of seconds and bytes."),
    ("check", "check:check", "Read a Megatron launch script: does it start, fit, and how fast is it?"),
    ("export", "export:export", "Write a plan as launch files for torchrun, Slurm or Kubernetes."),
    ("sweep", "sweep:sweep", "Measure the best layouts: write the job array, collect and rank."),
    ("explain", "explain:app", "Axes, rules, limits and assumptions in words."),
    ("models", "models:models", "The models of the catalogue."),
    ("gpus", "gpus:gpus", "The GPUs and systems of the catalogue."),
    ("train", "train:train", "Train a plan with PyTorch (one process per GPU, by torchrun)."),
    ("verify", "verify:verify", "Prove that a layout trains like one process."),
    ("emulate", "emulate:emulate", "Run one rank of a job of any size: its memory, FLOPs, collectives."),
    ("validate", "validate:validate", "Predictions beside published measurements."),
    ("calibrate", "calibrate:calibrate", "Fit a few factors to your own runs, for closer predictions."),
)

# How writing to standard output fails; errors about a file of the user's carry its name.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

_EPILOGUE = """\
fivefold plan llama-3-8b --gpus 8

fivefold estimate llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512

Every command takes --json and --help. Exit codes: 0 done, 1 the answer is no
(nothing fits, a rule is broken), 2 bad input, 70 a bug in fivefold, 130 interrupted."""


def build_app(called: str | None = None) -> App:
    """The application; command modules are imported when they are called. called: the command whose own help, longer
    than its line in the list, may be asked for."""
    app = App(
        name="fivefold",
        help="Plan the parallel training of large Transformers: which layout, how fast, how much memory, and why.",
        help_epilogue=_EPILOGUE,
        help_format="plaintext",
        version=f"fivefold {__version__}",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, place, line in COMMANDS:
        own = {} if name == "explain" else {"help_epilogue": ""}
        app.command(f"fivefold.cli.commands.{place}", name=name, help=None if name == called else line, **own)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (by default the process's own) and return its exit code. Never raises an Exception."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = words[: words.index("--")] if "--" in words else words
    if sys.stdout is None:
        failures.say("error: Standard output is closed, so there is nowhere to write the answer to.")
        return failures.BAD_INPUT
    lenient_streams()
    try:
        return _run(words, as_json="--json" in options)
    except KeyboardInterrupt:
        failures.say("interrupted")
        return failures.INTERRUPTED
    except (BrokenPipeError, SystemExit):  # rich makes a SystemExit of a closed pipe, and nothing else here exits
        _forget_stdout()
        return failures.BROKEN_PIPE
    except OSError as error:  # of writing the answer; _run reports the others
        _forget_stdout()
        failures.say(f"error: The answer could not be written to standard output: {error.strerror or error}.")
        return failures.BAD_INPUT


def _run(words: list[str], *, as_json: bool) -> int:
    try:
        code = build_app(words[0] if words else None)(words, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else failures.DONE
    except CycloptsError as error:
        failures.report(failures.from_parser(error), as_json=as_json, argv=words)
        return failures.BAD_INPUT
    except FivefoldError as error:
        failures.report(error, as_json=as_json, argv=words)
        return failures.exit_code(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS:
            raise
        failures.report(failures.internal(error), as_json=as_json, argv=words)
        return failures.INTERNAL_ERROR


def _forget_stdout() -> None:
    """Keeps the interpreter from flushing into the closed pipe when it exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # standard output is not a file, as in tests
        return
