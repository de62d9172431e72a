"""The command line: one file per command under commands/, which parses flags, asks the library and renders.

main.py lists the commands and turns every failure into one paragraph and an exit code; flags.py and values.py say what
the flags are and how their text becomes values; problem.py makes the library's objects of them, defaults written down;
render/ draws. Command modules are imported when they are called, so that `fivefold --help` costs no numpy."""
