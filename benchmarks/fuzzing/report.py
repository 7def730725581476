"""The verdict: each demand with what was seen, the requests that failed, and how to send one of them again."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from fuzzing.campaign import Campaign
from fuzzing.judge import BACK, SAME, SECRET, SERVED, STATUS, WHOLE

MAX_LATENCY_S = 1.0
MAX_GROWTH = 0.02
MOST_SHOWN = 12  # requests beside a slow answer


class Demand(NamedTuple):
    """``held`` None: it could not be judged."""

    name: str
    held: bool | None
    seen: str


def demands(campaign: Campaign) -> list[Demand]:
    """Everything that is asked of the server, with the measured answer."""
    good, worker = campaign.good, campaign.worker
    growth = worker.growth()
    counted = [
        Demand(name, not campaign.num_problems[name], f"{campaign.num_problems[name]} broke it")
        for name in (STATUS, WHOLE, SERVED, SECRET, SAME, BACK)
    ]
    return [
        *counted,
        Demand(
            "no wrong byte for the good client",
            None if not good.counts["right"] else not good.counts["wrong"],
            f"{good.counts['wrong']} of {sum(good.counts.values())} wrong, {good.counts['refused']} refused",
        ),
        _latency(campaign),
        Demand(
            f"memory flat to {MAX_GROWTH:.0%} from the second minute",
            None if growth is None else growth <= MAX_GROWTH,
            "not measured: shorter than 3 minutes, or not on this machine" if growth is None else f"{growth:+.2%}",
        ),
        Demand(
            "no page in use at the end",
            campaign.pages_left == 0,
            "no answer" if campaign.pages_left is None else f"{campaign.pages_left} in use",
        ),
        Demand(
            "the same worker throughout",
            len(worker.pids) == 1 and not campaign.ended_early,
            campaign.ended_early or f"process {', then '.join(map(str, worker.pids))}",
        ),
    ]


def _latency(campaign: Campaign) -> Demand:
    good = campaign.good
    name = f"its worst latency under {MAX_LATENCY_S:g} s"
    if not good.latencies:
        return Demand(name, None, "none measured")
    worst = max(took for took, _ in good.latencies)
    median = statistics.median(took for took, _ in good.latencies)
    seen = f"{worst:.3f} s, median {median:.3f} s (the client itself was late by up to {good.late_s:.3f} s)"
    return Demand(name, worst < MAX_LATENCY_S, seen)


def slowest(campaign: Campaign, count: int = 5) -> list[str]:
    """The good client's slowest answers, with the generated requests that were under way then."""
    lines = []
    for took, begin in sorted(campaign.good.latencies, reverse=True)[:count]:
        beside = campaign.beside(begin, begin + took)
        more = f" and {len(beside) - MOST_SHOWN} more" if len(beside) > MOST_SHOWN else ""
        lines.append(f"{took:.3f} s beside {', '.join(map(str, beside[:MOST_SHOWN])) or 'nothing'}{more}")
    return lines


def exit_status(held: list[Demand]) -> int:
    """0: all held. 1: one did not. 3: none failed, but one could not be judged."""
    if any(demand.held is False for demand in held):
        return 1
    return 3 if any(demand.held is None for demand in held) else 0


def table(campaign: Campaign) -> str:
    """What was done, and the demands, for people."""
    rate = campaign.sent / campaign.lasted_s if campaign.lasted_s else 0.0
    rows = [
        f"{campaign.sent} requests of seed {campaign.seed} in {campaign.lasted_s:.0f} s ({rate:.0f} a second)",
        "  kinds     " + _counts(campaign.kinds),
        "  answers   " + _counts(campaign.outcomes),
        f"  repeats   {campaign.repeats_compared} compared",
        *(f"  slowest   {line}" for line in slowest(campaign)),
    ]
    words = {True: "held", False: "BROKEN", None: "not judged"}
    found = demands(campaign)
    width = max(len(demand.name) for demand in found)
    return "\n".join([*rows, *(f"{d.name:<{width}}  {words[d.held]:<10}  {d.seen}" for d in found)])


def failures(campaign: Campaign, command: str, most: int = 20) -> str:
    """The first requests that failed, of each demand ``most``, with the ``command`` that sends one again."""
    lines = []
    for name in campaign.num_problems:
        some = [problem for problem in campaign.problems if problem.demand == name][:most]
        lines.append(f"{name}: {campaign.num_problems[name]} requests did not, the first {len(some)}:")
        lines += [f"  --replay {p.index:<6} {p.kind}, {p.route}: {p.what}" for p in some]
    lines += campaign.good.problems[:most]
    return "\n".join([*lines, f"again: {command} --replay K"]) if lines else ""


def as_json(campaign: Campaign) -> dict[str, Any]:
    """The same for programs."""
    found = demands(campaign)
    good = campaign.good
    samples = [round(rss / 2**20, 1) for _, rss in campaign.worker.samples]
    return {
        "seed": campaign.seed,
        "requests": campaign.sent,
        "lasted_s": round(campaign.lasted_s, 1),
        "kinds": dict(campaign.kinds),
        "answers": dict(campaign.outcomes),
        "repeats_compared": campaign.repeats_compared,
        "good": {**good.counts, "worst_latency_s": round(max(good.latencies, default=(0.0, 0.0))[0], 4)},
        "memory_mb": samples[:: max(1, len(samples) // 20)],
        "demands": {demand.name: {"held": demand.held, "seen": demand.seen} for demand in found},
        "problems": [problem.__dict__ for problem in campaign.problems],
        "passed": exit_status(found) == 0,
    }


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))
