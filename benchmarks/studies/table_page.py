"""The page of `benchmarks.studies.table`: what every method reaches, by budget, and what it costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from envs.evaluation.intervals import (
    Interval,
    bootstrap_iqm,
    bootstrap_mean,
    conditional_value_at_risk,
    paired_difference,
)

BUDGETS = {
    "avoid": (("step", 30_000, "30,000 environment steps"), ("step", 450_000, "450,000 environment steps"),
              ("cpu_s", 60, "one minute of a core"), ("cpu_s", 180, "three minutes of a core")),
    "lift-varied": (("step", 30_000, "30,000 environment steps"),
                    ("step", 60_000, "60,000 environment steps"),
                    ("cpu_s", 300, "five minutes of a core"), ("cpu_s", 600, "ten minutes of a core")),
    "walker2d-expert": (("step", 100_000, "100,000 gradient steps"),
                        ("cpu_s", 180, "three minutes of a core")),
    "hopper-medium": (("step", 4_000, "4,000 gradient steps"), ("step", 100_000, "100,000 gradient steps"),
                      ("cpu_s", 60, "one minute of a core"), ("cpu_s", 180, "three minutes of a core")),
}  # fmt: skip
"""Budgets at which methods are compared: a cost, its limit, and how the page calls it."""

NEAR = 0.05
"""Of the budget: how far a checkpoint may be from the share that a column names."""

OF_A_RUN = ("seed", "name", "dataset", "init", "directory")
"""Keys in which the runs of a method differ."""


def settings_digest(configuration: Mapping[str, Any]) -> str:
    """Return the digest of a composed configuration, without what differs between the runs of a method."""
    kept = {key: value for key, value in configuration.items() if key not in OF_A_RUN}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Rows:
    """The runs of one method on one task, in the order of their seeds."""

    task: str
    name: str
    runs: Sequence[Mapping[str, Any]]

    @property
    def quantity(self) -> str:
        return quantity_of(self.runs[0])

    @property
    def after(self) -> np.ndarray:
        """Episodes of the last checkpoint (S, E): successes, or scores of D4RL, of which an expert has 1."""
        return np.array([values(run, run["after"]) for run in self.runs])

    @property
    def before(self) -> np.ndarray:
        """Episodes of the clones (S, E)."""
        return np.array([values(run, run["before"]) for run in self.runs])

    def at(self, cost: str, limit: float) -> np.ndarray | None:
        """Return the episodes (S, E) of the last checkpoint within a budget.

        A run that ended within the budget counts as it ended; the clone that it begins with counts where
        there is no checkpoint within it. None if a seed ended within a third of the steps: the method was not
        made for them. None too if a seed has neither a checkpoint nor a clone.
        """
        found = []
        for run in self.runs:
            within = [point for point in run["points"] if point[cost] <= 1.05 * limit]
            if 3 * run["points"][-1][cost] < limit and cost == "step":
                return None
            if not within and not run["is_init"]:
                return None
            found.append(values(run, within[-1] if within else run["before"]))
        return np.array(found)

    def at_share(self, share: float) -> np.ndarray | None:
        """Return the episodes (S, E) after a share of the method's own budget; None if none is near."""
        found = []
        for run in self.runs:
            places = _places(run)[1:]
            nearest = int(abs(places - share).argmin())
            if abs(places[nearest] - share) > NEAR:
                return None
            found.append(values(run, run["points"][nearest]))
        return np.array(found)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return shares of the budget and means of the episodes, both (S, P), from 0 on.

        A method that does not begin with the clone begins at 0, as actors that know nothing.
        """
        rates = [
            [np.mean(values(run, run["before"])) * run["is_init"]]
            + [np.mean(values(run, point)) for point in run["points"]]
            for run in self.runs
        ]
        return np.array([_places(run) for run in self.runs]), np.array(rates)

    def area(self) -> np.ndarray:
        """Return the mean over the budget, per seed (S,): the area under its curve."""
        shares, rates = self.curve()
        return ((rates[:, 1:] + rates[:, :-1]) / 2 * np.diff(shares)).sum(axis=1)

    def kept_modes(self) -> float | None:
        """Return the share of the clone's ways that the last checkpoint still takes, mean over seeds."""
        if "mode" not in self.runs[0]["after"]:
            return None
        ways = ([_ways(run[when]) for when in ("before", "after")] for run in self.runs)
        return float(np.mean([len(before & after) / len(before) for before, after in ways]))


def _places(run: Mapping[str, Any]) -> np.ndarray:
    """Return the shares of the steps that a run took at which it was played, and 0.

    Few checkpoints stand for several of the shares that were asked for.
    """
    steps = np.array([0, *(point["step"] for point in run["points"])], np.float64)
    return steps / steps[-1]


def quantity_of(run: Mapping[str, Any]) -> str:
    """Return what a run is judged by: success, or return."""
    return str(run.get("quantity", "success"))


def values(run: Mapping[str, Any], episodes: Mapping[str, Any]) -> np.ndarray:
    """Return successes (E,), or scores of D4RL, divided by 100."""
    found = np.array(episodes[quantity_of(run)], np.float64)
    if quantity_of(run) == "success":
        return found
    random, expert = run["protocol"]["env"]["reference_scores"]
    return (found - random) / (expert - random)


def _ways(episodes: Mapping[str, Sequence[float]]) -> set[int]:
    return {
        int(mode)
        for mode, success in zip(episodes["mode"], episodes["success"], strict=True)
        if success and mode >= 0
    }


def improvement(before: np.ndarray, after: np.ndarray) -> Interval:
    """Return how probably an episode goes better than its pair; equal ones count half."""
    return bootstrap_mean((after > before) + 0.5 * (after == before))


def rows_of(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Rows]]:
    """Return the rows by task; methods in the order of their success.

    Raises:
        SystemExit: If the runs of a method have different settings, or a file contradicts itself.
    """
    tasks: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for run in found:
        tasks.setdefault(run["task"], {}).setdefault(run["algo"], []).append(run)
        if problem := next(contradictions(run), None):
            raise SystemExit(f"{run['task']}-{run['algo']}-seed{run['seed']}: {problem}")
    table = {}
    for task, methods in tasks.items():
        rows = [
            Rows(task, name, sorted(runs, key=lambda run: int(run["seed"]))) for name, runs in methods.items()
        ]
        for row in rows:
            if len({run["settings_sha256"] for run in row.runs}) > 1:
                raise SystemExit(f"{task}-{row.name}: seeds were trained with different settings")
        table[task] = sorted(rows, key=lambda row: -row.after.mean())
    return table


def contradictions(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a file says twice and not alike."""
    if run["settings_sha256"] != settings_digest(run["configuration"]["tune"]):
        yield "the digest of its settings is not that of its configuration"
    if run["points"][-1][quantity_of(run)] != run["after"][quantity_of(run)]:
        yield "its last point is not its last checkpoint"


# -- page -----------------------------------------------------------------------------------------------

INTRODUCTION = """`python -m benchmarks.studies.table <task>`: every method begins with clones of the
same seeds, {seeds}, and plays the same 100 episodes, at its last checkpoint. Settings were chosen in the
studies of each task, on other seeds and other episodes, with unequal care: most trials went into the methods
that needed them; [tuning](tuning.md) has those that were recorded. One process and one thread per run; a
*core minute* is a minute of processor time, without data and clone. {intervals}

Cells are success, or for walking robots the return in percent of an expert's, 0 being that of random actions
(score of D4RL). *Worst*: the lowest seed, or the worst tenth of all scores. *P(better)*: probability that an
episode goes better than the clone's, equal ones count half. *Best on the way*: of up to eleven
checkpoints, per seed. *Area*: mean over the budget; without a clone it begins at 0. *Ways*: share of the
clone's ways to succeed that are still taken. *ms*: one decision of the exported policy. *MB*: largest
memory of the process in training. *Trained by*: keys of `burnish train`, beside init, dataset and
seed. The columns sort by a click on the site."""

BRACKETS = """In brackets: how probably an episode of the best goes better than one of theirs. A method counts
by its last checkpoint within the budget, to 5 %, of up to eleven that are played, or else by its clone.
Compared on the seeds that all methods have. Left out is a method that was made for less than a third of the
steps, or that has neither a checkpoint within the budget nor a clone."""

LEARNED = {
    "avoid": """**What was learned.** With few steps, methods that reuse what they have seen win. TRQAM
is ahead of the others at half of them, for 11 minutes of a core where most take 2 to 4; QAM, for 6, DSRL on
a diffusion and RLPD end as high, on few of the clone's ways; DQC keeps 63 % of them, and ends at 91 %.
`residual`, which never trains the clone, is ahead at a tenth, keeps 92 % of its ways, and ends at 90 %.
EXPO, which edits chunks, ends beside IDQL, at 86 %, on 56 % of the ways where IDQL keeps 36. FamO2O ends
between 54 and 92 %, by the seed, and FQL spends these steps on a student that is as good as the clone.
On-policy methods take fifteen times the steps and mostly less processor time, and the best of them decide
by one or two evaluations of a network: PPO on a mixture, ReinFlow on MIP. DPPO comes close and keeps twice
their share of ways. The last checkpoint is not always the best: FPO's seeds have 75 % at their best and 33
at the end, below the clone; FPO++, its successor, ends below its best, and AWM hardly rises after a third, so
look at evaluations on the way. Gaussian PPO, from the weakest clone, ends where its seed takes it.""",
    "hopper-medium": """**What was learned.** Settings decide more than methods. TD3+BC at its
published settings, made for ten times the rows, ends where its clone was, as PRDC does, and IQL below it; all
three were at 60 to 67 % on the way. With settings for few rows (`study_`: those of `td3_bc_few_rows` and
`prdc_few_rows`, critics with normalised layers, a longer horizon, less weight of values, averaged weights;
chosen on this file with other seeds) PRDC ends at 106 to 110 % on every seed, TD3+BC at 107 to 109 % on four
of five, and all far above their clone. From clones of flows and diffusions IQL gains most, within two minutes
of a core; TD3+BC and PRDC take more than twice that, gain less, and are best before their end; A2PR ends
between 39 and 87 %, by the seed.""",
    "lift-varied": """**What was learned so far.** Fifteen noisy demonstrations make clones of about half
success. DSRL, which learns the start noise of a frozen clone, is ahead from 30,000 steps on and ends at 98 %
after 60,000, with no seed below 94 %, for seven minutes of a core; in its first tenth it gains nothing. DQC
and IDQL, which choose among chunks and keep learning from the demonstrations, reach 84 and 83 % within
30,000 steps and three minutes of a core, with a worst seed of 73 and 70 %; at a tenth of them IDQL is below
its clones and DQC well above. RLPD begins without a clone and is at 88 % after 60,000. FQL's student ends
between 50 and 91 %, by the seed, with the cheapest decision but RLPD's. DPPO takes 200,000 steps and ten
minutes to 92 %, with no seed below 85 %.""",
    "walker2d-expert": """**What was learned so far.** A hundred episodes of an expert with noise on its
actions: their clone is good, and TD3+BC gains one to three points. At published settings it first loses most
of what the clone has, and ends as high; with settings for few rows it stays at the clone's level or above
it.""",
}
"""By task, what its rows say together."""

ENOUGH = 5  # seeds of every method, before methods are put in an order

SUMMARY = """Best methods by budget, on seeds and episodes that no setting was chosen on, and those that are
not clearly behind ([how, and what each costs](results/table.md)):"""

COLUMNS = (
    *("method", "curve", "seeds", "clone", "10 %", "50 %", "last", "IQM", "worst", "best on the way"),
    *("area", "P(better)", "ways", "steps", "gradient steps", "core min", "ms", "MB", "trained by"),
)


def report(page: str) -> Path:
    """Write the page and its curves."""
    found = pages.kept(page, advice="name a task first")
    table = rows_of(found)
    seeds = sorted({run["seed"] for run in found})
    head = INTRODUCTION.format(seeds=f"{seeds[0]} to {seeds[-1]}", intervals=pages.INTERVALS)
    lines = ["# One table", "", head]
    for task, rows in table.items():
        lines += ["", f"## {task}", "", *(order(rows) or [under_way(rows)]), ""]
        lines += pages.table(COLUMNS, [cells(row) for row in rows])
        lines += ["", LEARNED[task]] if task in LEARNED else []
        lines += [part for told in made_anew(rows) for part in ("", told)]
        for row in rows:
            picture = sparkline(*row.curve(), float(row.before.mean()))
            (pages.RESULTS / page / f"{row.task}-{row.name}.svg").write_text(picture)
    orders = {task: best for task, rows in table.items() if (best := budgets(rows))}
    summary = [line for task, best in orders.items() for line in ("", f"`{task}`:", "", *best)]
    pages.replace_block("docs/results.md", "table", [SUMMARY, *summary])
    lines += ["", f"Commits: {pages.commits(found)}. {processors(found)}"]
    return pages.write(page, [*lines, *pages.origin(page, found[0])])


def processors(found: Sequence[Mapping[str, Any]]) -> str:
    """Name the processors of a page."""
    return f"Processors: {', '.join(sorted({run['environment']['processor'] for run in found}))}."


def cells(row: Rows) -> list[str]:
    """Return the cells of a method."""
    runs, after = row.runs, row.after
    best = row.curve()[1][:, 1:].max(axis=1)
    better, kept = improvement(row.before, after), row.kept_modes()
    name = row.name if runs[0]["is_init"] else f"{row.name} (no clone)"
    actor = [max(run["gradient_steps"].values(), default=0) for run in runs]
    curve = f"![](table/{row.task}-{row.name}.svg)"
    early = ["–" if found is None else rate(found) for found in map(row.at_share, (0.1, 0.5))]
    return [
        name, curve, f"{len(runs)}", around(row, row.before),
        *early, around(row, after), pages.percent(bootstrap_iqm(after)), rate(worst(row)),
        rate(best), rate(row.area()), f"{better.value:.2f} ({better.low:.2f}–{better.high:.2f})",
        "–" if kept is None else f"{100 * kept:.0f} %",
        f"{np.mean([run['points'][-1]['step'] for run in runs]):,.0f}", f"{np.mean(actor):,.0f}",
        f"{np.mean([run['points'][-1]['cpu_s'] for run in runs]) / 60:.1f}",
        f"{np.median([run['decision_ms'] for run in runs]):.2f}", f"{max(run['peak_mb'] for run in runs)}",
        trained_by(runs[0]),
    ]  # fmt: skip


def trained_by(run: Mapping[str, Any]) -> str:
    """Write the overrides of a run and of its clone; rows of earlier code name their experiments alone."""
    own, base = run.get("settings") or [f"experiment={run['experiment']}"], run["base"]
    clone = " ".join([f"experiment={base}"] if isinstance(base, str) else base)
    return f"`{' '.join(own)}`" + (f" from `{clone}`" if run["is_init"] else "")


def made_anew(rows: Sequence[Rows]) -> list[str]:
    """Say for which methods data or clones of the same seeds were made anew; nothing where all share them."""
    sets: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for row in on_common_seeds(rows):
        base = row.runs[0]["base"]
        clone = _base_name([f"experiment={base}"] if isinstance(base, str) else base)
        for what, key in (("the data", "dataset"), (f"the clones of {clone}", "base_sha256")):
            digests = (run[key] for run in row.runs)
            same = tuple(one["sha256"] if isinstance(one, Mapping) else one for one in digests)
            sets.setdefault(what, {}).setdefault(same, []).append(row.name)
    said = [
        f"{what}, for {'; for '.join(', '.join(names) for names in found.values())}"
        for what, found in sets.items()
        if len(found) > 1
    ]
    return [f"Made more than once, from the same seeds: {'. Also '.join(said)}."] if said else []


def _base_name(base: Sequence[str]) -> str:
    first, *more = base
    is_plain = not first.startswith("experiment=")
    return "a plain actor" if is_plain else f"`{' '.join([first.removeprefix('experiment='), *more])}`"


def worst(row: Rows) -> np.ndarray:
    """Return the successes of the lowest seed, or the worst tenth of all scores."""
    if row.quantity == "success":
        lowest: np.ndarray = row.after[row.after.mean(axis=1).argmin()]
        return lowest
    return np.array(conditional_value_at_risk(row.after).value)


def around(row: Rows, found: np.ndarray) -> str:
    """Write the mean of episodes (S, E) with its interval."""
    return pages.success(found) if row.quantity == "success" else pages.percent(bootstrap_mean(found))


def rate(found: Any) -> str:
    """Write a mean in percent."""
    return f"{100 * np.mean(found):.0f} %"


def on_common_seeds(rows: Sequence[Rows]) -> list[Rows]:
    """Return the rows with the seeds that all of them have."""
    common = set.intersection(*({run["seed"] for run in row.runs} for row in rows))
    kept = ([run for run in row.runs if run["seed"] in common] for row in rows)
    return [Rows(row.task, row.name, runs) for row, runs in zip(rows, kept, strict=True) if runs]


def order(rows: Sequence[Rows]) -> list[str]:
    """Return who is best under which budget, and what that means; nothing before all have enough seeds."""
    found = budgets(rows)
    return [*found, "", BRACKETS] if found else []


def under_way(rows: Sequence[Rows]) -> str:
    """Say why methods are in no order: how many seeds they have, the fewest and the most."""
    if len(rows) == 1:
        return "One method so far."
    counts = sorted({len(row.runs) for row in rows})
    found = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Methods have {found} of {ENOUGH} seeds; they are put in no order before all have them."


def budgets(rows: Sequence[Rows]) -> list[str]:
    """Return a line per budget: the best method, and those that are not clearly worse, on common seeds.

    There is none of one method, and none before all have `ENOUGH` seeds in common.
    """
    rows = on_common_seeds(rows)
    return list(_budgets(rows)) if len(rows) > 1 and len(rows[0].runs) >= ENOUGH else []


def _budgets(rows: Sequence[Rows]) -> Iterator[str]:
    for cost, limit, called in BUDGETS[rows[0].task]:
        known = [(row.name, at) for row in rows if (at := row.at(cost, limit)) is not None]
        if not known:
            continue
        name, best = max(known, key=lambda one: one[1].mean())
        near = [
            f"{other} {rate(theirs)} ({improvement(theirs, best).value:.2f})"
            for other, theirs in known
            if other != name and paired_difference(theirs, best).low <= 0
        ]
        others = f"; not clearly behind: {', '.join(near)}" if near else "; clearly ahead of all others"
        yield f"- **{called}**: {name}, {around(rows[0], best)}{others}."


def sparkline(shares: np.ndarray, rates: np.ndarray, clone: float, width: int = 110, height: int = 30) -> str:
    """Return a small picture: success of every seed over the budget, their mean in bold, the clone dashed."""

    def line(shares: np.ndarray, values: np.ndarray, style: str) -> str:
        x, y = 2 + shares * (width - 4), 2 + (1 - values.clip(0, 1)) * (height - 4)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        return f'<polyline fill="none" {style} points="{points}"/>'

    seed = 'stroke="#7aa6d8" stroke-width="0.7" opacity="0.7"'
    faint = [line(*one, seed) for one in zip(shares, rates, strict=True)]
    mean, dashed = shares.mean(axis=0), 'stroke="#999" stroke-width="0.7" stroke-dasharray="2 2"'
    level = line(mean, np.full_like(mean, clone), dashed)
    thick = line(mean, rates.mean(axis=0), 'stroke="#1f6fc4" stroke-width="1.8"')
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, level, *faint, thick, "</svg>", ""])
