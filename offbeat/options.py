"""What several commands have in common: words that belong partly to a script, options, their checks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from offbeat.plan import parse, to_text

if TYPE_CHECKING:
    from offbeat.cluster.spec import LaunchSpec

_SCALES = {"": 1, "k": 10**3, "m": 10**6}


class ScriptCommand(TyperCommand):
    """A command whose words belong partly to a script: offbeat's options are taken from before and after
    SCRIPT, every other word after SCRIPT is the script's, in order, and so is all that follows `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            ours, theirs = split_words(args, self._arity())
        except ValueError as error:
            refuse(str(error))
        return super().parse_args(ctx, [*ours, "--", *theirs] if theirs else ours)

    def _arity(self) -> dict[str, bool]:
        """offbeat's own options, and whether each takes a value."""
        known = {"-h": False, "--help": False}
        for param in self.params:
            if param.param_type_name == "option":
                takes = not getattr(param, "is_flag", False)
                known.update(dict.fromkeys([*param.opts, *param.secondary_opts], takes))
        return known


def split_words(words: list[str], known: dict[str, bool]) -> tuple[list[str], list[str]]:
    """offbeat's words, and SCRIPT with its own. `known` holds offbeat's options and whether each takes a
    value (`--name value`, `--name=value`, `-n 4` or `-n4`).

    Raises ValueError for an unknown option before SCRIPT, where it cannot be the script's."""
    import difflib

    ours: list[str] = []
    theirs: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        name = word.split("=", 1)[0] if word.startswith("--") else word
        if word == "--":
            theirs += words[index:]
            break
        if name in known:
            ours.append(word)
            if known[name] and name == word and index < len(words):
                ours.append(words[index])
                index += 1
        elif re.fullmatch(r"-[A-Za-z][0-9]+", word) and known.get(word[:2]):
            ours += [word[:2], word[2:]]
        elif word.startswith("-") and len(word) > 1 and not theirs:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else "options of the script come after it"
            raise ValueError(f"offbeat knows no option {name}; {hint}")
        else:
            theirs.append(word)
    return ours, theirs


def refuse(message: str) -> NoReturn:
    """A person's mistake: said in short, with exit code 2."""
    typer.echo(f"offbeat: error: {message}", err=True)
    raise typer.Exit(2)


def units(text: str, option: str = "--total", what: str = "units") -> int:
    """A number of units (or of something else) such as 64000, 64_000, 64k or 1.5M. Raises ValueError."""
    found = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([kKmM]?)", text.strip())
    value = float(re.sub("[_,]", "", found[1])) * _SCALES[found[2].lower()] if found else 0.0
    if value < 1 or value != int(value):
        raise ValueError(f"{option} {text}: a whole number of {what} from 1, such as 64000, 64_000 or 64k")
    return int(value)


def plan_text(text: str) -> str:
    """The canonical text of a plan. Raises PlanError."""
    return to_text(parse(text))


Workers = Annotated[int, typer.Option("-n", "--workers", "--nproc-per-node", help="Processes on this host.")]
Total = Annotated[
    str | None, typer.Option("--total", help="Length of the job in units: 64000, 64_000 or 64k.")
]
Wire = Annotated[str | None, typer.Option("--wire", help="Number format on the wire: bf16 or fp32.")]
OnDiverge = Annotated[
    str | None,
    typer.Option(
        "--on-diverge",
        help="When training diverges: raise (the default), rollback (to the last checkpoint, then BSP) or "
        "ignore.",
    ),
]
StragglersOption = Annotated[
    str | None,
    typer.Option(
        "--stragglers",
        help="What to do about slow workers: off (the default), observe, greedy or elastic, with settings as "
        'in "elastic(min_slowdown=1.3)".',
    ),
]
Virtual = Annotated[
    int | None,
    typer.Option("--virtual", help="So many virtual workers, in one process and in virtual time."),
]
ClusterFile = Annotated[
    str | None,
    typer.Option("--cluster", help="The virtual cluster: a TOML file or a preset (see `offbeat cluster`)."),
]
ProfileFile = Annotated[
    str | None,
    typer.Option(
        "--profile", help="What `offbeat profile` has written: the journal tells how the run differs from it."
    ),
]
TimingOnly = Annotated[
    bool, typer.Option("--timing-only", help="Virtual time without gradients, for clusters of any size.")
]
TensorBoard = Annotated[
    bool,
    typer.Option("--tensorboard", help="Write the run's figures for TensorBoard, too (into its directory)."),
]
AllOutput = Annotated[
    bool, typer.Option("--all-output", help="Show every rank's output, with its rank before each line.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing of offbeat's own but errors.")]
Nnodes = Annotated[int, typer.Option("--nnodes", help="Number of hosts.")]
NodeRank = Annotated[int, typer.Option("--node-rank", help="This host's number, from 0.")]
Endpoint = Annotated[
    str | None, typer.Option("--rdzv-endpoint", help="HOST:PORT: node 0's address and a free port there.")
]
Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)]
Rest = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ARGS]...",
        help="The script's own arguments; after -- none of them is offbeat's.",
        show_default=False,
    ),
]


def check_cluster(spec: LaunchSpec) -> None:
    """Raises ClusterError for a virtual cluster that cannot be, or not so."""
    cluster, virtual = spec.cluster, spec.virtual
    if virtual is not None and virtual > 0:
        from offbeat.virtual.description import ClusterError, find

        found = find("here" if cluster is None else cluster).sized(virtual)
        if found.joins and spec.timing_only:
            raise ClusterError(
                f"{found.source}: joins: --timing-only knows no newcomers; leave one of them out"
            )
        if found.joins and spec.minimum is None:
            raise ClusterError(f"{found.source}: joins: members change only with --min; add it")


def split_plans(text: str) -> list[str]:
    """The canonical texts of the plans in `"A; B; C"`. Raises ValueError: none, one that cannot be meant,
    or one given twice, which could not be told apart in the table."""
    texts: list[str] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        plan = plan_text(part)
        if plan in texts:
            raise ValueError(f"--plans has {plan!r} twice; every plan runs once")
        texts.append(plan)
    if not texts:
        raise ValueError(f'--plans {text!r} holds no plan; write some, such as "bsp; local"')
    return texts


def policy_text(text: str) -> str:
    """The canonical text of a policy for stragglers. Raises ValueError."""
    from offbeat.policies.switches import Stragglers

    return str(Stragglers.parse(text))


def split_policies(text: str) -> list[str | None]:
    """The policies in `"off; greedy"`; the script's own for none. Raises ValueError, as `split_plans`."""
    found = [policy_text(part) for part in filter(None, map(str.strip, text.split(";")))]
    for policy in found:
        if found.count(policy) > 1:
            raise ValueError(f"--stragglers has {policy!r} twice; every policy runs once")
    return list(found) or [None]


def slug(plan: str) -> str:
    """A plan's text as a part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", plan.lower()).strip("-.")[:60]
