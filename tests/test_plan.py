"""The text of a plan: every plan round-trips, every wrong one says what is wrong and where."""

from __future__ import annotations

import decimal
import gc
import math
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offbeat.plan import MAX_PHASES, MAX_TEXT, PlanError, check, parse, phases, to_text, words
from offbeat.protocols import ASP, BSP, MERGES, RATES, SSP, DaSGD, LocalSGD, Program, Protocol, Switch
from offbeat.worker import Worker

CANONICAL = {
    "bsp": BSP(),
    "local": LocalSGD(),
    "local(period=8)": LocalSGD(8),
    "dasgd": DaSGD(),
    "dasgd(period=4,delay=2)": DaSGD(4, 2),
    "dasgd(delay=0,keep=0)": DaSGD(delay=0, keep=0),
    "dasgd(keep=1e-05,merge=delta)": DaSGD(keep=1e-5, merge="delta"),
    "ssp": SSP(),
    "ssp(bound=0)": SSP(0),
    "ssp(bound=inf)": SSP(math.inf),
    "ssp(bound=1,lr=staleness)": SSP(1, "staleness"),
    "asp": ASP(),
    "asp(lr=staleness)": ASP("staleness"),
    "bsp:6.25% asp": Switch(BSP(), ASP(), 0.0625),
    "asp:100u bsp:50% ssp(lr=staleness)": Switch(ASP(), Switch(BSP(), SSP(lr="staleness"), 0.5), 100),
    "bsp:6.25% dasgd(period=4,delay=2)": Switch(BSP(), DaSGD(4, 2), 0.0625),
    "bsp:4000u local": Switch(BSP(), LocalSGD(), 4000),
    "bsp:0% local": Switch(BSP(), LocalSGD(), 0.0),
    "bsp:0u local": Switch(BSP(), LocalSGD(), 0),
    "bsp:100% local": Switch(BSP(), LocalSGD(), 1.0),
    "bsp:10% local:400u dasgd": Switch(BSP(), Switch(LocalSGD(), DaSGD(), 400), 0.1),
    "bsp:5e-322% local": Switch(BSP(), LocalSGD(), 5e-324),
}


@pytest.mark.parametrize(("text", "protocol"), CANONICAL.items(), ids=list(CANONICAL))
def test_canonical_text(text: str, protocol: Protocol) -> None:
    assert parse(text) == protocol
    assert to_text(protocol) == str(protocol) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("  bsp:06.250%\t\n dasgd( 4 , delay = 2 )  ", "bsp:6.25% dasgd(period=4,delay=2)"),
        ("local()", "local"),
        ("local(8)", "local(period=8)"),
        ("local(+4)", "local"),
        ("dasgd(4, 3, .5, delta)", "dasgd(period=4,delay=3,keep=0.5,merge=delta)"),
        ("dasgd(keep=2.5e-1)", "dasgd"),
        ("dasgd(keep=-0.0)", "dasgd(keep=0)"),
        ("dasgd(merge=mix,keep=0)", "dasgd(keep=0)"),
        ("ssp(inf)", "ssp(bound=inf)"),
        ("ssp(3)", "ssp"),
        ("ssp(1, staleness)", "ssp(bound=1,lr=staleness)"),
        ("asp(lr=plain)", "asp"),
        ("asp(staleness)", "asp(lr=staleness)"),
        ("bsp:-0% local", "bsp:0% local"),
        ("bsp:1e1% local", "bsp:10% local"),
        ("bsp:.5% local", "bsp:0.5% local"),
        ("bsp:007u local", "bsp:7u local"),
    ],
)
def test_other_spellings_mean_the_same(text: str, canonical: str) -> None:
    assert to_text(parse(text)) == canonical


def test_types_of_an_end() -> None:
    share, units = parse("bsp:100% local"), parse("bsp:1u local")
    assert isinstance(share, Switch)
    assert isinstance(units, Switch)
    assert type(share.at) is float
    assert type(units.at) is int


def test_a_callers_decimal_context_changes_nothing() -> None:
    with decimal.localcontext() as context:
        context.prec = 2
        assert to_text(Switch(BSP(), LocalSGD(), 0.123456789)) == "bsp:12.3456789% local"


WRONG = [
    (
        "bps:6.25% dasgd",
        "bps",
        "there is no protocol 'bps'; valid are bsp, local",
        "did you mean 'bsp'",
    ),
    ("BSP", "BSP", "valid are bsp, local", "did you mean 'bsp'"),
    ("bsp:5% dasdg(4,2)", "dasdg", "no protocol 'dasdg'", "did you mean 'dasgd'"),
    ("switch", "switch", "there is no protocol 'switch'"),
    ("local(perod=4)", "perod", "local has no setting 'perod'; valid: period", "did you mean 'period'"),
    ("dasgd(4, 2, dely=1)", "dely", "valid: period, delay, keep and merge", "did you mean 'delay'"),
    ("bsp(period=2)", "period", "bsp has no setting 'period'; it has no settings"),
    ("bsp(2)", "2", "2 is one setting too many for bsp; it has no settings"),
    ("local(4, 5)", "5", "5 is one setting too many for local; valid: period"),
    ("local(period=4, period=5)", "period=5", "local is given period twice"),
    ("local(4, period=5)", "period=5", "local is given period twice"),
    ("dasgd(delay=1, 4)", "4", "4 needs its setting's name"),
    ("local(period=0)", "local(period=0)", "local needs a whole period of at least 1; got period=0"),
    ("local(period=2.5)", "local(period=2.5)", "whole period", "got period=2.5"),
    ("local(inf)", "local(inf)", "whole period", "got period=inf"),
    ("local(four)", "local(four)", "whole period", "got period='four'"),
    ("dasgd(delay=-1)", "dasgd(delay=-1)", "whole delay of at least 0; got delay=-1"),
    ("dasgd(delay=2)", "dasgd(delay=2)", "0 <= delay < period", "got delay=2, period=2"),
    ("dasgd(keep=2)", "dasgd(keep=2)", "0 <= keep < 1", "got keep=2"),
    ("dasgd(keep=nan)", "dasgd(keep=nan)", "0 <= keep < 1", "got keep=nan"),
    ("dasgd(merge=foo)", "dasgd(merge=foo)", "merge=mix and merge=delta; got merge=foo"),
    ("ssp(bound=-1)", "ssp(bound=-1)", "ssp needs a whole bound of at least 0, or inf; got bound=-1"),
    ("ssp(2.5)", "ssp(2.5)", "whole bound of at least 0, or inf", "got bound=2.5"),
    ("ssp(-inf)", "ssp(-inf)", "whole bound", "got bound=-inf"),
    ("ssp(nan)", "ssp(nan)", "whole bound", "got bound='nan'"),
    ("ssp(staleness=3)", "staleness", "ssp has no setting 'staleness'; valid: bound and lr"),
    ("ssp(lr=fast)", "ssp(lr=fast)", "ssp knows lr=plain and lr=staleness; got lr=fast"),
    ("asp(bound=3)", "bound", "asp has no setting 'bound'; valid: lr"),
    ("asp(3)", "asp(3)", "asp knows lr=plain and lr=staleness; got lr=3"),
    ("bsp:5% aps", "aps", "there is no protocol 'aps'", "did you mean 'asp'"),
    ("dasgd(keep=25%)", "25%", "'25%' is neither a number nor a word"),
    ("bsp:120% dasgd", ":120%", "120% lies outside the job", "0% to 100%"),
    ("bsp:-5% dasgd", ":-5%", "-5% lies outside the job"),
    ("bsp:-5u dasgd", ":-5u", "-5u lies outside the job"),
    ("bsp:4000 dasgd", ":4000", "4000 is no end", "did you mean :4000u or :4000%?"),
    ("bsp:4.5u dasgd", ":4.5u", "4.5u is no end", "whole units"),
    ("bsp: dasgd", ":", "nothing is no end"),
    ("bsp:6% local:5% dasgd", ":5%", "5% does not come after 6%", "not lengths"),
    ("bsp:5% local:5% dasgd", ":5%", "5% does not come after 5%"),
    ("bsp:9u local:5u dasgd", ":5u", "5u does not come after 9u"),
    ("bsp dasgd", "bsp", "bsp is not the last protocol, so it needs an end, such as bsp:10%"),
    ("bsp:5% local(8) dasgd", "local(8)", "local(8) is not the last protocol"),
    ("bsp:10%", ":10%", "the last protocol runs to the end of the job", "write bsp"),
    ("bsp:10% dasgd:100%", ":100%", "the last protocol runs to the end of the job", "write dasgd"),
    ("local (4)", "(", "settings follow their protocol without a blank"),
    ("local(4)dasgd", "d", "a blank belongs before 'd'"),
    ("local(4", "(", "the parenthesis of local is not closed"),
    ("local(", "(", "the parenthesis of local is not closed"),
    ("local(period=", "(", "the parenthesis of local is not closed"),
    ("local(4,)", ")", "a setting of local is missing before ')'"),
    ("local(,4)", ",", "a setting of local is missing before ','"),
    ("local(period 4)", "4", "a comma or a closing parenthesis belongs before '4'"),
    ("bsp:5%, dasgd", ",", "a protocol belongs where ',' stands", "separated by blanks"),
    ("bsp; dasgd", ";", "a protocol belongs where ';' stands", "separated by blanks"),
    ("bsp:5% -> dasgd", "-", "a protocol belongs where '-' stands", "separated by blanks"),
]


@pytest.mark.parametrize(
    ("text", "marked", "said"), [(t, m, s) for t, m, *s in WRONG], ids=[t for t, *_ in WRONG]
)
def test_a_wrong_plan_says_what_and_where(text: str, marked: str, said: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)
    message, line, marks = str(caught.value).rsplit("\n", 2)
    assert all(part in message for part in said), message
    assert line == "  " + text
    assert "".join(c for c, mark in zip(line, marks, strict=False) if mark == "^") == marked
    assert text[caught.value.position :].startswith(marked)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_plan(text: str) -> None:
    with pytest.raises(PlanError, match="at least one protocol of bsp, local"):
        parse(text)


def test_bounds() -> None:
    with pytest.raises(PlanError, match=f"at most {MAX_TEXT} characters; got 5000"):
        parse(" " * 4997 + "bsp")
    ends = " ".join(f"bsp:{unit}u" for unit in range(MAX_PHASES - 1))
    assert len(phases(parse(f"{ends} bsp"))) == MAX_PHASES
    with pytest.raises(PlanError, match=f"at most {MAX_PHASES} protocols"):
        parse(f"{ends} bsp:99u bsp")
    with pytest.raises(PlanError, match="too long"):
        parse("local(" + "9" * 41 + ")")
    with pytest.raises(PlanError, match="whole period"):
        parse(f"local(-{'9' * 39})")


def test_a_long_plan_is_quoted_around_the_fault() -> None:
    text = " ".join(f"local(period={unit + 1}):{unit}u" for unit in range(20)) + " bsq"
    with pytest.raises(PlanError) as caught:
        parse(text)
    _, line, marks = str(caught.value).split("\n")
    assert len(line) < 80
    assert line[marks.index("^") : marks.rindex("^") + 1] == "bsq"


def test_phases_of_every_nesting() -> None:
    expected = [(BSP(), 0.1), (LocalSGD(), 400), (DaSGD(), None)]
    assert phases(Switch(BSP(), Switch(LocalSGD(), DaSGD(), 400), 0.1)) == expected
    assert phases(Switch(Switch(BSP(), LocalSGD(), 0.1), DaSGD(), 400)) == expected
    assert phases(BSP()) == [(BSP(), None)]


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("bsp", 1),
        ("bsp:0% local", 1),
        ("bsp:100% local", 1),
        ("bsp:1000u local", 1000),
        ("bsp:99u local:10% dasgd", 1000),
        ("bsp:10% local:101u dasgd", 1000),
        ("bsp:5% local:10% dasgd", 4),  # no unit between them, but the order is right
    ],
)
def test_check_accepts(text: str, total: int) -> None:
    check(parse(text), total)


@pytest.mark.parametrize(
    ("text", "total", "said"),
    [
        ("bsp:1001u local", 1000, "bsp:1001u is beyond the end of the job, which has 1000 units"),
        ("bsp:100u local:10% dasgd", 1000, "local would have no turn: it ends at 10%"),
        ("bsp:10% local:100u dasgd", 1000, "local would have no turn: it ends at 100u"),
        ("bsp:90% local:100u dasgd", 1000, "the protocol before it at 90%, in a job of 1000 units"),
        ("bsp", 0, "at least one unit; got total=0"),
    ],
)
def test_check_refuses(text: str, total: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check(parse(text), total)


def test_check_refuses_switches_in_the_wrong_order() -> None:
    with pytest.raises(PlanError, match="ends at 50%, the protocol before it at 80%"):
        check(Switch(BSP(), Switch(LocalSGD(), DaSGD(), 0.5), 0.8), 1000)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_check_agrees_with_where_a_switch_happens(total: int, share: float) -> None:
    unit = next(u for u in range(total + 1) if u / total >= share)
    check(Switch(BSP(), Switch(LocalSGD(), DaSGD(), share), unit - 1), total) if unit else None
    with pytest.raises(PlanError, match="no turn"):
        check(Switch(BSP(), Switch(LocalSGD(), DaSGD(), share), unit), total)


def test_a_users_own_protocol_has_its_word() -> None:
    @dataclass(frozen=True)
    class Gossip(Protocol):
        word: ClassVar[str] = "gossip"
        peers: int
        bound: float = math.inf

        def run(self, w: Worker) -> Program:
            yield w.gradient()

    assert words()["gossip"] is Gossip
    assert parse("bsp:5% gossip(2)") == Switch(BSP(), Gossip(2), 0.05)
    assert parse("gossip(2, inf)") == Gossip(2)
    assert to_text(Gossip(2, 3.0)) == "gossip(peers=2,bound=3)"
    with pytest.raises(PlanError, match="gossip needs peers"):
        parse("gossip")
    del Gossip
    gc.collect()  # or later tests would find its word


def dasgd(period: int, share: float, keep: float, merge: str) -> DaSGD:
    return DaSGD(period, int(share * period), keep, merge)


leaves = st.one_of(
    st.just(BSP()),
    st.builds(LocalSGD, st.integers(1, 10**9)),
    st.builds(
        dasgd,
        st.integers(1, 100),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(MERGES),
    ),
    st.builds(SSP, st.one_of(st.integers(0, 10**9), st.just(math.inf)), st.sampled_from(RATES)),
    st.builds(ASP, st.sampled_from(RATES)),
)
ends = st.one_of(
    st.lists(st.floats(0, 1), max_size=5, unique=True),
    st.lists(st.integers(0, 10**12), max_size=5, unique=True),
).map(sorted)


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[Protocol, float | int | None]]:
    """Phases in order, with increasing ends of one kind or, alternating, of both."""
    positions = draw(ends)
    if draw(st.booleans()):
        positions = [p for pair in zip(positions, draw(ends), strict=False) for p in pair]
        by_kind = [[p for p in positions if isinstance(p, kind)] for kind in (int, float)]
        if any(len(set(kind)) < len(kind) or kind != sorted(kind) for kind in by_kind):
            positions = by_kind[0][:1]
    return [(draw(leaves), end) for end in [*positions, None]]


def nested_right(parts: list[tuple[Protocol, float | int | None]]) -> Protocol:
    return reduce(lambda then, part: Switch(part[0], then, part[1]), reversed(parts[:-1]), parts[-1][0])


def nested_left(parts: list[tuple[Protocol, float | int | None]]) -> Protocol:
    made, at = parts[0]
    for leaf, end in parts[1:]:
        made, at = Switch(made, leaf, at), end
    return made


@given(plans())
@example([(DaSGD(keep=5e-324), 5e-324), (BSP(), 1.0), (BSP(), None)])
@example([(DaSGD(keep=-0.0, delay=0), -0.0), (BSP(), None)])
def test_round_trip(parts: list[tuple[Protocol, float | int | None]]) -> None:
    protocol = nested_right(parts)
    text = to_text(protocol)
    assert phases(protocol) == parts
    assert parse(text) == protocol
    assert to_text(parse(text)) == text
    assert to_text(nested_left(parts)) == text


pieces = st.sampled_from(
    "bsp local dasgd ssp asp ( ) , = : % u period delay keep merge mix delta bound lr staleness".split()
    + "inf - + 0 1 2 .5 1e9 1e999".split()
    + ["100%", ":5%", ":7u", "٣", "é", "\0", " ", "\t"]
)


@given(st.one_of(st.text(), st.lists(pieces, max_size=20).map("".join)))
@example("local(" + "9" * 3990 + ")")
@example("bsp:" + "9" * 3900 + "% local")
@example("bsp:1e9999% local")
@example("local(٣)")
def test_any_text_is_a_protocol_or_a_plan_error(text: str) -> None:
    try:
        protocol = parse(text)
    except PlanError:
        return
    assert parse(to_text(protocol)) == protocol
