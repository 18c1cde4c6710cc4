"""What a journal proves of a run: was every unit used by exactly one committed update?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.journal import Record
from offbeat.ledger import used

FEW = 20
"""Units that are named in a line; of more the number."""


@dataclass
class Audit:
    """What was found of one job.

    plan, workers: as the job began. units, total: mini-batches committed, and how many were planned.
    batch_size, samples: of a unit, and of the data set (None where no data set is dealt by `sync.batches`).
    entries: entries of the ledger, all compared. wrong: what disagrees, in a line each.
    deaths: recoveries from workers' deaths. again: units that were dealt again then. partly: of those, units
        whose update some of the shards had applied before: their worker died between two hosts' shards.
    missing: updates that a dead host's shards had, and no survivor (a part of the parameters lacks them).
    undone: [units, to_units] of each return to a checkpoint. pending: given back and not done yet.
    ended: whether the job has.
    """

    plan: str = ""
    workers: int = 0
    total: int | None = None
    batch_size: int | None = None
    samples: int | None = None
    units: int = 0
    entries: int = 0
    pending: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    partly: list[int] = field(default_factory=list)
    undone: list[tuple[int, int]] = field(default_factory=list)
    missing: int = 0
    deaths: int = 0
    ended: bool = False

    @property
    def clean(self) -> bool:
        """Whether the journal proves it, up to where it ends."""
        return bool(self.entries) and not self.wrong

    def lines(self) -> list[str]:
        """For a person."""
        found = [f"{self.plan} on {self.workers} workers: {_many(self.units, 'unit')} committed{self._of()}"]
        if not self.entries:
            reason = (
                "nothing was dealt by sync.batches(dataset, batch_size=...), which keeps the ledger"
                if self.samples is None
                else "it ends before the ledger's first entry"
            )
            return [*found, f"no proof: {reason}"]
        if self.deaths:
            found.append(f"recoveries: {self.deaths}; {_named(self.again, 'dealt again')}")
        for before, after in self.undone:
            found.append(
                f"back to a checkpoint: units {after:,} to {before - 1:,} were undone and done again"
            )
        if self.partly:
            twice = _named(self.partly, "applied twice by some shards")
            found.append(f"{twice}: their worker died between two hosts' shards")
        if self.missing:
            updates = _many(self.missing, "update")
            found.append(
                f"a part of the parameters lacks {updates} at most, which died with its host's shards"
            )
        found += self.wrong
        if self.clean:
            rest = "" if self.ended else " up to there (the journal has no end)"
            found.append(f"clean: each unit was used by exactly one committed update{rest}{self._epochs()}")
        return found

    def _of(self) -> str:
        if self.total is None:
            return ""
        over = self.units - self.total
        return f" of {self.total:,}" + (f" ({over} over: the last step is everybody's)" if over > 0 else "")

    def _epochs(self) -> str:
        if self.samples is None or self.batch_size is None:
            return ""
        per_epoch = -(-self.samples // self.batch_size)
        whole, rest = divmod(self.units, per_epoch)
        text = f"; of {self.samples:,} samples, {_many(whole, 'whole epoch')}"
        return text + (f" and {_many(rest, 'unit')} of {per_epoch:,} of the next" if rest else "")


def audit(records: Iterable[Record]) -> list[Audit]:
    """Of each job in the journal (a script may make several Synchronizers), what it proves."""
    jobs: list[list[Record]] = [[]]
    began = False
    for row in records:
        if row["type"] == "run":
            if began:
                jobs.append([])
            began = True
        jobs[-1].append(row)  # its members may have changed before its first record
    return [_audit(rows) for rows in jobs if rows]


def _audit(rows: Sequence[Record]) -> Audit:
    found = Audit()
    for row in rows:
        match row["type"]:
            case "run":
                found.plan, found.workers, found.total = row["plan"], row["workers"], row["total"]
            case "data":
                found.batch_size, found.samples = row["batch_size"], row.get("samples")
            case "recovery":
                found.deaths += 1
                found.again += row["again"]
                found.partly += row.get("partly", [])
                found.missing += row.get("missing", 0)
            case "rollback":
                found.undone.append((row["units"], row["to_units"]))
            case "ledger":
                _compare(found, row)
            case "end":
                found.ended = True
                _compare_end(found, row)
    return found


def _compare(found: Audit, row: dict[str, Any]) -> None:
    before = found.units
    found.units, found.pending = row["units"], row["pending"]
    found.entries += 1
    if int(row["used"], 16) != used(found.units, found.pending):
        found.wrong.append(
            f"WRONG at {row['t']:.3f} s: {_many(found.units, 'unit')} committed, but the batches that the "
            f"workers used are others (the entry before it: {before:,})"
        )


def _compare_end(found: Audit, row: dict[str, Any]) -> None:
    if not found.entries:
        found.units = row["units"]
    elif row["units"] != found.units:
        found.wrong.append(
            f"WRONG: the job ended with {row['units']:,} units, the ledger with {found.units:,}"
        )
    elif found.pending:
        found.wrong.append(f"WRONG: {_named(found.pending, 'never done')}")


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _named(units: Sequence[int], what: str) -> str:
    which = f" ({', '.join(map(str, units))})" if 0 < len(units) <= FEW else ""
    return f"{_many(len(units), 'unit')} {what}{which}"
