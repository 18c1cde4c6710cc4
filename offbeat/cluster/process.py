"""One worker process of this host, in an elastic context of its own, so that it can be ended and started
again without touching the others."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, start_processes

Sink = Callable[[int, str, str], None]
"""Takes (rank, "out" or "err", text) of a worker's output, as it comes."""


class WorkerLogs(LogsSpecs):
    """Both streams of one worker to `<directory>/rank<r>.out` and `.err`; from the second attempt on,
    `rank<r>.<attempt>.out`: a restart must not erase what the first one said."""

    def __init__(self, directory: Path, rank: int, attempt: int):
        super().__init__(log_dir=str(directory))
        stem = f"rank{rank}" if attempt == 0 else f"rank{rank}.{attempt}"
        self.out, self.err = directory / f"{stem}.out", directory / f"{stem}.err"
        self.error_file = directory / f"{stem}.error.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.error_file.unlink(missing_ok=True)
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = str(self.error_file)
        return LogsDest(
            stdouts={0: str(self.out)}, stderrs={0: str(self.err)}, error_files={0: str(self.error_file)}
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


class Tail:
    """Reads what was appended to a file since the last time. `whole` holds an unfinished line back."""

    def __init__(self, path: Path, whole: bool):
        self._path, self._whole, self._position, self._held = path, whole, 0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, final: bool = False) -> str:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                raw = file.read()
        except OSError:
            raw = b""
        self._position += len(raw)
        text = self._held + self._decoder.decode(raw, final)
        self._held = ""
        if self._whole and not final:
            cut = max(text.rfind("\n"), text.rfind("\r")) + 1
            text, self._held = text[:cut], text[cut:]
        elif self._whole and text and not text.endswith("\n"):
            text += "\n"
        return text


@dataclass(frozen=True)
class Exit:
    """How a worker ended: `code` is its exit code, or minus the signal that ended it."""

    rank: int
    code: int

    @property
    def text(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"signal {-self.code}, {signal.Signals(-self.code).name}"
        return f"signal {-self.code}"


class WorkerProcess:
    """Starts at once: this Python with `words`. `poll` forwards its new output and tells how it ended,
    `signal` reaches the worker and the processes it has started (its data loaders)."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str], logs: WorkerLogs, sink: Sink | None):
        self.rank, self.logs, self._sink = int(env["RANK"]), logs, sink
        self.exit: Exit | None = None
        self.shown = sink is not None
        self._tails = {"out": Tail(logs.out, whole=True), "err": Tail(logs.err, whole=True)}
        self._context: PContext = start_processes(
            name="worker",
            entrypoint=sys.executable,
            # Unbuffered, as torchrun does: prints would otherwise reach the file only at the end.
            args={0: ("-u", *words)},
            envs={0: env},
            logs_specs=logs,
        )
        self.pid: int = self._context.pids()[0]

    def poll(self) -> Exit | None:
        if self.exit is None:
            result = self._context.wait(0)
            if result is not None:
                failure = result.failures.get(0)
                self.exit = Exit(self.rank, failure.exitcode if failure else 0)
                if failure:
                    self.signal(signal.SIGKILL)  # what it has started would stay behind
            self._forward(final=result is not None)
        return self.exit

    def signal(self, number: signal.Signals) -> None:
        # The context makes the worker the leader of a group of its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self, timeout: float) -> None:
        """Kills what is left and collects it."""
        if self.exit is None:
            self.signal(signal.SIGKILL)
            self._context.close(signal.SIGKILL, timeout=max(1, int(timeout)))
            self.poll()

    def last_words(self, lines: int = 20) -> list[str]:
        """The end of its standard error."""
        try:
            with self.logs.err.open("rb") as file:
                file.seek(max(0, self.logs.err.stat().st_size - 64_000))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return text.rstrip().split("\n")[-lines:] if text.strip() else []

    def missed_another(self) -> bool:
        """Whether it failed because another worker had gone."""
        return any("PeerLost: a worker went away" in line for line in self.last_words(3))

    def spoke_at(self) -> float:
        """When it last wrote to its standard error. The first worker to fail wrote, or died, before those
        that failed because it was gone."""
        try:
            return self.logs.err.stat().st_mtime
        except OSError:
            return 0.0

    def _forward(self, final: bool) -> None:
        if self._sink is not None:
            for stream, tail in self._tails.items():
                if text := tail.read(final):
                    self._sink(self.rank, stream, text)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (and not by a debugger). False where that isn't known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
