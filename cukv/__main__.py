"""The command ``cukv`` (``python -m cukv``): ``replay`` a serving workload, ``info``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import cukv
from cukv import _kernels, replay
from cukv._engine import MismatchError
from cukv._workload import MODELS, ReplayError, whole_number

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141  # the last two: 128 + signal
MOST = 2**31 - 1  # page ids are int32


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as one line, through :func:`main`."""

    def error(self, message: str) -> NoReturn:
        raise ReplayError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status.

    0 is success, 1 a wrong result, 2 something that cannot be done as asked, 130 Ctrl-C.
    """
    _replace_closed_streams()
    try:
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
    except ReplayError as error:
        print(f"cukv: {error}", file=sys.stderr)
        return USAGE
    except MismatchError as error:
        print(f"cukv: wrong result: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:  # as of a full disk: 1 would say that a result was wrong
        _discard_output()
        print(f"cukv: {error}", file=sys.stderr)
        return USAGE
    return 0


def _replace_closed_streams() -> None:
    """Give what is printed a place to go where the caller closed one: Python has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _discard_output() -> None:
    """Write nothing more: the interpreter flushes once at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cukv", description="KV-cache layouts and operations for CuPy.")
    parser.add_argument("--version", action="version", version=f"cukv {cukv.__version__}")
    commands = parser.add_subparsers(required=True, metavar="{replay,info}")
    info = commands.add_parser(
        "info", help="show the GPU, the compiler, the kernels and their cache"
    )
    info.set_defaults(run=_info)
    about = "replay a serving workload on a paged cache, timed and checked"
    job = commands.add_parser("replay", help=about, description=about)
    job.set_defaults(run=_replay)
    add = job.add_argument
    add("--trace", type=Path, metavar="FILE", help="Mooncake JSONL or Azure LLM CSV; else built-in")
    add(
        "--common-prompt",
        type=_between(0),
        metavar="N",
        default=0,
        help="tokens that all built-in requests start with, in 512s (0)",
    )
    add("--requests", type=_between(1), metavar="N", help="replay the first N requests at most")
    add("--steps", type=_between(1), metavar="N", help="stop after N steps")
    add("--model", choices=MODELS, help="llama8b on a GPU, tiny on NumPy, unless given")
    add("--layers", type=_between(1), metavar="N", help="layers with a cache of their own")
    add("--page-size", type=_between(1), metavar="N", default=16, help="tokens of a page (16)")
    add("--pages", type=_between(1), metavar="N", help="pages of each layer's cache at most")
    add("--seed", type=_between(0), metavar="N", default=0, help="of rows, pages and samples (0)")
    add(
        "--device",
        choices=("gpu", "cpu"),
        help="cpu runs the NumPy definitions; else what there is",
    )
    return parser


def _between(least: int, most: int = MOST) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = whole_number(text)
        if value is None:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be in [{least}, {most}], got {text}")
        return value

    return parse


def _replay(arguments: argparse.Namespace) -> None:
    options = vars(arguments)
    del options["run"]
    replay.replay(replay.Options(**options))


def _info(_: argparse.Namespace) -> None:
    lines = {"cukv": cukv.__version__, **_kernels.info()}
    width = max(map(len, lines))
    for name, value in lines.items():
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        print(f"{name.replace('_', ' '):{width}}  {text or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
