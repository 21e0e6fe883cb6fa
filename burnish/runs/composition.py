"""`burnish eval compose=[a,b]`: find weights of a composition and compare it with its members.

<out>/policy/            the composition, a policy directory
<out>/eval/*.json        episodes of the composition and every member, on seeds that the search did not use
<out>/composition.json   weights, search, estimate, comparisons
<out>/composition.md     the same as tables
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algos.gpc import Search, Trial, WeightEstimate, estimate_weights, search_weights
from algos.training.run_directory import new_folder
from burnish.config.saved import describe_part
from burnish.console import Counting, output, table
from burnish.runs.evaluation import play
from burnish.runs.locate import Located, check_folder_to_fill, dated_folder, locate
from burnish.runs.tasks import require_task_of, task_of
from envs.datasets import read_dataset
from envs.evaluation.comparison import Comparison, compare, format_interval
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.fit import require_dataset_of, with_task_observations
from envs.rollouts.fleet import LOCAL
from policies.composition.compose import AnyComposition, compose
from policies.errors import ConfigError
from policies.policy import Policy
from policies.storage.atomic_write import write_text
from policies.storage.policy_folder import save_policy

if TYPE_CHECKING:
    from rich.table import Table

    from burnish.config.evaluate import EvalConfig

_log = logging.getLogger(__name__)

ESTIMATE = "estimate"
"""Value of `weights`: estimate them from demonstrations."""
PAGE, FACTS, POLICY = "composition.md", "composition.json", "policy"


@dataclass(frozen=True)
class Section:
    """A table of the report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def shown(self) -> Table:
        return table(self.title, self.columns, self.rows)

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join([f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


@dataclass(frozen=True)
class CompositionResult:
    """Result of a composition.

    Attributes:
        policy: The composition with the given or found weights.
        search: Rollouts of the search; None: given or estimated weights.
        estimate: Estimate from demonstrations, all levels together first; empty without demonstrations.
        evaluation: The composition on fresh episodes.
        members: Its members on the same episodes, by name.
        comparisons: Composition - member.
        path: Output folder.
    """

    policy: AnyComposition
    search: Search | None
    estimate: Sequence[WeightEstimate]
    evaluation: Evaluation
    members: dict[str, Evaluation]
    comparisons: dict[str, Comparison]
    path: Path

    def sections(self) -> Iterator[Section]:
        names = tuple(self.members)
        if self.search is not None:
            yield _search_section(names, self.search)
        if self.estimate:
            yield _estimate_section(names, self.estimate)
        yield _result_section(self)

    def __str__(self) -> str:
        """Return the tables as text, and the comparisons."""
        compared = (f"composition - {name}: {one}" for name, one in self.comparisons.items())
        return "\n".join([*(section.markdown() for section in self.sections()), *compared])

    __repr__ = __str__  # the episodes are arrays of thousands of numbers


def compose_and_compare(config: EvalConfig) -> CompositionResult:
    """Compose the policies of `config.compose`, find weights, evaluate on fresh episodes, write results.

    Raises:
        ConfigError: If the configuration is inconsistent.
    """
    located = _located_members(config)
    target = dated_folder("compose") if config.out is None else Path(config.out)
    check_folder_to_fill(target)
    members = {name: member.load() for name, member in located.items()}
    lead = next(iter(located.values()))
    env = config.env if config.env is not None else task_of(lead, " Give env=<name>.")
    for member in located.values():
        require_task_of(member, env, "compose", allow_other_task=config.allow_other_task)
    policy = _initial_composition(config, list(members.values()))
    estimate = _estimate(config, policy, env)
    search = None
    if config.weights is None:
        search = _search(config, policy, env)
        policy = policy.with_weights(*search.best)
        _log.info("the search found weights=%s.", list(search.best))  # what follows may fail
    elif config.weights == ESTIMATE:
        policy = policy.with_weights(*estimate[0].weights)
    evaluation = play("composition", policy, env, config)
    by_member = {name: play(name, member, env, config) for name, member in members.items()}
    comparisons = {name: compare(own, evaluation) for name, own in by_member.items()}
    result = CompositionResult(policy, search, estimate, evaluation, by_member, comparisons, target)
    try:
        if config.out is None:
            result = replace(result, path=new_folder(target))
        _write(config, result, located, env)
    except OSError:  # what was played is not lost
        output().print(str(result), markup=False)
        raise
    return result


def _located_members(config: EvalConfig) -> dict[str, Located]:
    paths = config.compose
    if not isinstance(paths, list) or len(paths) < 2:
        raise ConfigError(f"compose needs a list of two or more policies, compose=[a,b]; got {paths}.")
    if config.policy is not None or config.baseline is not None:
        raise ConfigError("compose=[a,b] compares with every member; leave policy and baseline out.")
    if not (config.weights in (None, ESTIMATE) or isinstance(config.weights, list)):
        kinds = f"a list with one per member, weights=[0.5,0.5], or weights={ESTIMATE}"
        raise ConfigError(f"weights must be {kinds}; got {config.weights}.")
    if config.weights == ESTIMATE and config.dataset is None:
        raise ConfigError(f"weights={ESTIMATE} needs dataset=<held-out demonstrations>.")
    _refuse_unused(config)
    if config.weights is None and config.search.overlaps(config.first_seed, config.episodes):
        raise ConfigError(
            f"first_seed={config.first_seed} must start other episodes than those of the search "
            f"(search.first_seed={config.search.first_seed}). Choose other seeds."
        )
    members: dict[str, Located] = {}
    for path in paths:
        member = locate(str(path), "compose")
        label = member.label
        members[label if label not in members else f"{label} ({len(members) + 1})"] = member
    return members


def _refuse_unused(config: EvalConfig) -> None:
    unused = {
        "search": ("weights are given", config.weights is not None),
        "estimate": ("there is no dataset to estimate from", config.dataset is None),
        "temperature": (f"operator={config.operator} has none", config.operator != "or"),
    }
    for name, (reason, is_unused) in unused.items():
        if is_unused and config.changed([name]):
            raise ConfigError(f"{name} has no effect here: {reason}. Leave it out.")


def _initial_composition(config: EvalConfig, members: list[Policy]) -> AnyComposition:
    weights = config.weights
    if weights is None or weights == ESTIMATE:
        weights = config.search.weights(len(members), config.operator)[0]
    settings = {key: getattr(config, key) for key in ("operator", "temperature", "sampler")}
    return compose(members, weights, **settings)


def _estimate(config: EvalConfig, policy: AnyComposition, env: Any) -> list[WeightEstimate]:
    if config.dataset is None:
        return []
    dataset = with_task_observations(env, read_dataset(config.dataset, **config.reader))
    require_dataset_of(env, dataset, allow_other_task=config.allow_other_task)
    return estimate_weights(policy, dataset, config.estimate)


def _search(config: EvalConfig, policy: AnyComposition, env: Any) -> Search:
    settings = config.search
    candidates = len(settings.weights(len(policy.fields), config.operator))
    rounds = (candidates, *(min(candidates, n) for n in settings.keep))
    total = sum(n * episodes for n, episodes in zip(rounds, settings.episodes, strict=True))
    done = 0
    with Counting("searching weights", total) as counting:

        def run(view: Policy, first_seed: int, episodes: int) -> Evaluation:
            protocol = replace(config, first_seed=first_seed, episodes=episodes)
            return evaluate(
                view,
                env,
                protocol,
                num_workers=config.num_workers,
                fleet=config.fleet or LOCAL,
                on_progress=lambda n, _: counting.show(done + n),
            )

        def count(trial: Trial) -> None:
            nonlocal done
            done += len(trial.evaluation.rows)

        return search_weights(policy, settings, run, on_trial=count)


# -- report ---------------------------------------------------------------------------------------------


def _search_section(names: Sequence[str], search: Search) -> Section:
    rows = []
    for trial in search.trials:
        is_behind = trial.round == search.trials[-1].round and trial.weights != search.best
        behind = _difference(search.compare_with_best(trial)) if is_behind else ""
        result, count = _headline(trial.evaluation), str(len(trial.evaluation.rows))
        rows.append((str(trial.round + 1), *_numbers(trial.weights), count, *result, behind))
    head = ("round", *names, "episodes", search.trials[0].evaluation.quantity, "95 %", "winner − this")
    return Section("Search", head, tuple(rows))


def _estimate_section(names: Sequence[str], estimate: Sequence[WeightEstimate]) -> Section:
    rows = []
    for one in estimate:
        intervals = zip(one.weights, one.low, one.high, strict=True)
        weights = [f"{w:.2f} ({low:.2f} to {high:.2f})" for w, low, high in intervals]
        errors = [f"{one.error[i][i]:.4f}" for i in range(len(names))]
        rows.append(("all" if one.t is None else f"{one.t:.2f}", *weights, *errors))
    head = ("sampling time", *names, *(f"error of {name}" for name in names))
    return Section("Estimate from demonstrations (weights with 95 % intervals)", head, tuple(rows))


def _result_section(result: CompositionResult) -> Section:
    rows: list[tuple[str, ...]] = [("composition", "", *_headline(result.evaluation), "", "")]
    for name, weight in zip(result.members, result.policy.composition.weights, strict=True):
        comparison = result.comparisons[name]
        own = (*_numbers([weight]), *_headline(result.members[name]))
        rows.append((name, *own, _difference(comparison), comparison.verdict))
    head = ("policy", "weight", result.evaluation.quantity, "95 %", "composition − this", "")
    return Section(f"Fresh episodes ({len(result.evaluation.rows)}, the same for all)", head, tuple(rows))


def _headline(evaluation: Evaluation) -> tuple[str, str]:
    return format_interval(evaluation.quantity, evaluation.summary()[evaluation.quantity])


def _difference(comparison: Comparison) -> str:
    mean, interval = format_interval(comparison.quantity, asdict(comparison.difference))
    return f"{mean} ({interval})"


def _numbers(weights: Iterable[Any]) -> tuple[str, ...]:
    return tuple(f"{w:g}" if isinstance(w, float) else json.dumps(w) for w in weights)


# -- files ----------------------------------------------------------------------------------------------


def _write(config: EvalConfig, result: CompositionResult, members: dict[str, Located], env: Any) -> None:
    target, composition = result.path, asdict(result.policy.composition)
    (target / "eval").mkdir(parents=True, exist_ok=True)
    write_text(target / "eval" / "composition.json", result.evaluation.to_json() + "\n")
    for number, evaluation in enumerate(result.members.values()):
        write_text(target / "eval" / f"member-{number}.json", evaluation.to_json() + "\n")
    facts = {
        "members": list(members),
        "composition": composition,
        "weights_from": _origin(config),
        "search": [
            {"round": trial.round, "weights": trial.weights, **trial.evaluation.summary()}
            for trial in (result.search.trials if result.search else ())
        ]
        or None,
        "estimate": [asdict(one) for one in result.estimate],
        "evaluation": result.evaluation.summary(),
        "comparisons": {name: asdict(one) for name, one in result.comparisons.items()},
    }
    write_text(target / FACTS, json.dumps(facts, indent=1) + "\n")
    title = f"# Composition of {', '.join(members)}"
    operator, weights = composition["operator"], json.dumps(composition["weights"])
    about = f"`operator={operator}`, weights {weights}: {_origin(config)}."
    page = [title, "", about, "", *(section.markdown() for section in result.sections())]
    write_text(target / PAGE, "\n".join(page))
    provenance = {"name": "composition", "members": ", ".join(members), "weights_from": _origin(config)}
    save_policy(result.policy, target / POLICY, provenance={**provenance, "env": describe_part("env", env)})


def _origin(config: EvalConfig) -> str:
    if config.weights is None:
        return "searched by rollouts"
    return "estimated from demonstrations" if config.weights == ESTIMATE else "given"
