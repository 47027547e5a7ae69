"""A process that has imported what a run of the conformance suite needs, and forks a child for each run.

So each run has a fresh process, and none pays for starting one. The server reads a request a line, runs it to its end,
and answers with a line: the child's exit code, negative where a signal ended it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import hypothesis.stateful  # noqa: F401  # children need not import it
import pytest

import expertstream.conformance.plugin  # noqa: F401  # children need not import it


def serve() -> None:
    assert threading.active_count() == 1, "a fork has the thread that forked alone, and whatever locks others held"
    for request in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(**json.loads(request))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(
    arguments: list[str], folder: str, environ: dict[str, str], path: list[str], output: str, limit_s: int
) -> None:
    """What `python -m pytest ARGUMENTS` does in `folder`, with `path` searched first. Raises SystemExit.

    `output` takes what it prints. A run that takes longer than `limit_s` is ended by SIGALRM.
    """
    signal.alarm(limit_s)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(output, os.O_WRONLY))):
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [folder, *path]
    sys.exit(pytest.main(arguments))


if __name__ == "__main__":
    serve()
