"""DaSGD's analysis, first order: when does an average hide behind local steps?

Symbols, as in the paper: m workers, n_p parameters, BW a link's bandwidth, B_l local batch, FLOP
floating-point operations of a sample (forward and backward), FLOPS a device's rate; t_p seconds of one local
update, t_c seconds of one average, d the delay, τ the period.
"""

from __future__ import annotations

from math import floor, isfinite


def computing(batch: float, flop: float, flops: float, efficiency: float = 1.0) -> float:
    """t_p = B_l·FLOP / FLOPS, in seconds ("the FLOP counts of the operation multiplied by local batch size
    divided by the computation speed"). efficiency: the share of FLOPS that is reached; the paper has 1."""
    return batch * flop / (flops * efficiency)


def transferring(workers: int, parameters: float, bandwidth: float, width: int = 4) -> float:
    """t_c = m·n_p / BW, in seconds ("the number of parameters multiplied by the number of workers divided
    by bandwidth"). bandwidth: bytes per second. width: bytes of a parameter. Everybody's parameters pass one
    link: PALEO's forms for trees, butterflies and rings (`offbeat.virtual.collectives`) are below it."""
    return workers * parameters * width / bandwidth


def delay(t_c: float, t_p: float) -> int:
    """The smallest whole d with t_c < d·t_p, at least 1 ("the delay needs to be increased moderately" with
    the workers). Strict, as in the paper.

    Raises ValueError for times that cannot be."""
    if not (isfinite(t_c) and isfinite(t_p) and t_c >= 0 and t_p > 0):
        raise ValueError(f"a delay needs 0 <= t_c and 0 < t_p, in seconds; got t_c={t_c!r}, t_p={t_p!r}")
    found = max(floor(t_c / t_p), 1)
    while t_c >= found * t_p:  # the quotient may have been rounded either way
        found += 1
    return found


def period(delay: int) -> int:
    """τ = d + 1 ("the number of local steps is set as the number of delay steps plus 1 […] to obtain higher
    accuracy and fast convergence rate")."""
    return delay + 1


def exposed(t_c: float, t_p: float, delay: int, period: int) -> float:
    """Seconds of communication in one step that no computation hides: max(0, t_c − d·t_p) / τ. With d = 0
    LocalSGD's t_c / τ, and with τ = 1 mini-batch SGD's t_c."""
    return max(0.0, t_c - delay * t_p) / period
