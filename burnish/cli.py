"""`burnish <command> key=value …`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from burnish.config.commands import COMMANDS
from burnish.name_clashes import prefer_own_packages, require_graphics_library, require_own_packages

_THREAD_DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
"""Idle threads slow down small networks; set before numeric libraries are imported.

Training results are independent of it: see `policies.threads`.
"""


def set_thread_defaults() -> None:
    """Limit the threads of numeric libraries, unless set in the environment."""
    for name, value in _THREAD_DEFAULTS.items():
        os.environ.setdefault(name, value)


def escape_odd_names(stream: Any) -> None:
    """Let a stream escape what its encoding lacks, such as file names that are no text, not end a command."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 success, 2 user error, 130 interrupted, 1 internal error."""
    set_thread_defaults()
    escape_odd_names(sys.stdout)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["-sc"], ["--shell-completion"]):
        sys.exit(_complete(given))
    if not given or given[0] in ("-h", "--help", "help"):
        sys.stdout.write(front_page())
        sys.exit(0)
    if given[0] in ("-V", "--version"):
        from burnish import __version__

        sys.stdout.write(f"burnish {__version__}\n")
        sys.exit(0)
    name, rest = split_command(given)
    if name not in COMMANDS and any(known.startswith(f"{name} ") for known in COMMANDS):
        name = " ".join(given[:2])  # the second word is wrong or missing
    sys.exit(_dispatch(name, rest))


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split arguments into the command name, of one or two words, and its arguments."""
    both = " ".join(words[:2])
    return (both, list(words[2:])) if len(words) > 1 and both in COMMANDS else (words[0], list(words[1:]))


def front_page() -> str:
    """Return the text of `burnish --help`."""
    width = max(map(len, COMMANDS))
    lines = ["usage: burnish <command> [key=value ...]", "", "commands:"]
    lines += [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS.values()]
    lines += ["", "examples:"]
    lines += [f"  {command.example}" for command in COMMANDS.values()]
    lines += [
        "",
        "burnish <command> --help shows its options and the whole configuration. Commands with key=value",
        "have Hydra's powers: --cfg job, --multirun, --info, launchers, sweepers (see --hydra-help).",
        'Shell completion: eval "$(burnish -sc install=bash)". Traceback of an error: BURNISH_TRACEBACK=1.',
    ]
    return "\n".join(lines) + "\n"


def _dispatch(name: str, arguments: list[str]) -> int:
    command = COMMANDS.get(name)
    if command is None:
        from burnish.config.errors import closest, listed

        choices = f"choose one of: {', '.join(COMMANDS)}"
        problem = listed(f"unknown command '{name}'", closest(name, COMMANDS), choices)
        sys.stderr.write(f"burnish: error: {problem}\n")
        return 2
    try:
        prefer_own_packages()
        require_own_packages()
        require_graphics_library()
    except ImportError as error:
        sys.stderr.write(f"burnish: error: {error}\n")
        return 2
    if arguments in (["--help"], ["-h"]):
        from burnish.config.help import kept_help

        if (page := kept_help(name)) is not None:
            sys.stdout.write(page)
            return 0
    from burnish.app import print_error, run_app, wants_traceback
    from burnish.config.errors import USER_ERRORS
    from policies.registry import load_plugins

    try:
        if name != "doctor":  # reports them itself
            load_plugins()
        if command.schema is None:
            code: int = command.load().main(arguments)
            return code
        run_app(name, arguments)
    except BrokenPipeError:  # the reader, e.g. `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports a process that SIGPIPE ended
    except (*USER_ERRORS, OSError) as error:
        if wants_traceback():
            raise
        return print_error(error)
    except KeyboardInterrupt:
        sys.stderr.write("burnish: interrupted\n")
        return 130
    return 0


def _complete(arguments: list[str]) -> int:
    """Answer a shell's completion query: command names first, then Hydra's own completion of the command."""
    query = any(argument.startswith("query=") for argument in arguments)
    words = os.environ.get("COMP_LINE", "").split()
    is_typing_command = len(words) < 2 or (len(words) == 2 and not os.environ["COMP_LINE"].endswith(" "))
    if query and is_typing_command:
        sys.stdout.write(" ".join(COMMANDS) + "\n")
        return 0
    name = split_command(words[1:])[0] if query else "train"
    command = COMMANDS.get(name)
    if command is None or command.schema is None:
        return 0
    if query:
        program, line = words[0], os.environ["COMP_LINE"]
        os.environ["COMP_LINE"] = program + line.split(name, 1)[1]
    return _dispatch(name, arguments)
