"""The command line in processes of its own, forked from a server that has imported torch already."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from tempfile import mkdtemp

from tests.forks import context


class Command:
    """`offbeat WORDS` in the current directory; its output goes to files."""

    def __init__(self, *words: object, **env: str):
        self._files = Path(mkdtemp(prefix="command-", dir=Path.cwd()))
        environment = {**os.environ, **env}
        arguments = (tuple(map(str, words)), environment, str(Path.cwd()), str(self._files))
        self.process = context.Process(target=_main, args=arguments)
        self.process.start()

    @property
    def out(self) -> str:
        return self._text("out")

    @property
    def err(self) -> str:
        return self._text("err")

    def end(self, limit: float = 90) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        end = time.monotonic() + limit
        self.process.join(limit)
        assert time.monotonic() < end, f"no end within {limit} s: {self.err}"
        assert self.process.exitcode is not None
        return self.process.exitcode, self.out, self.err

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    def _text(self, name: str) -> str:
        path = self._files / name
        return path.read_text() if path.exists() else ""


def _main(words: tuple[str, ...], environment: dict[str, str], directory: str, files: str) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{files}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.argv = ["offbeat", *words]
    from offbeat.cli import main

    main()
