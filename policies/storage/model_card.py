"""The model card of a policy directory; its front matter is indexed by the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies.policy_config import PART_GROUPS

CARD = "README.md"
_NAMES = {"success": "success rate", "return": "return", "d4rl_score": "D4RL score"}


def render_card(
    description: Mapping[str, Any],
    num_parameters: int,
    evaluations: Sequence[Mapping[str, Any]] = (),
    *,
    repository: str | None = None,
    licence: str | None = None,
) -> str:
    """Return README.md for a config.json and outputs of `burnish eval`; `repository` is on the hub."""
    facts = description["provenance"]
    name, task = _plain(facts.get("name", "policy")), task_of(facts)
    where = "<this directory>" if repository is None else f"hub://{repository}"
    made = "The task that it was made for is not recorded." if task is None else f"It was made for `{task}`."
    lines = [
        *_front_matter(description, evaluations, name, licence),
        *(f"# {name}", "", f"{_kind(description)} ({num_parameters:,} parameters) made with burnish.", ""),
        *_parts(description),
        *(f"| {_plain(key)} | {_cell(value)} |" for key, value in sorted(facts.items())),
        "",
        *_results(evaluations),
        *(_use_of_world(where, task) if _is_world(description) else _use(description, where, made)),
    ]
    return "\n".join(lines) + "\n"


def _use(description: Mapping[str, Any], where: str, made: str) -> Iterator[str]:
    yield from ("```python", "import burnish", "", f'policy = burnish.load_policy("{where}")')
    yield (
        f"actions = policy.act(observations)  # (B, {description['obs_steps']}, {description['obs_dim']}) -> "
        f"(B, {description['act_steps']}, {description['action_dim']})"
    )
    yield from ("```", "", "## Intended use", "")
    yield f"{made} It maps physical observations of that task to physical actions, and knows nothing of"
    yield "observations that its data did not contain. It does not limit actions: whoever commands a machine"
    yield "with it must."


def _use_of_world(where: str, task: str | None) -> Iterator[str]:
    yield from ("```sh", f"burnish eval policy=<policy> env=world env.model={where}", "```", "")
    yield from ("## Intended use", "")
    yield f"It imagines the task `{task}`, and knows nothing of states and actions that its data did not"
    yield "contain. Judge what was trained in it by the task itself."


def _is_world(description: Mapping[str, Any]) -> bool:
    return any(wrapper.get("name") == "world" for wrapper in description.get("wrappers", ()))


def task_of(facts: Mapping[str, Any]) -> str | None:
    """Return the task of a policy from its provenance, if recorded."""
    env = facts.get("env")
    name = env.get("name") if isinstance(env, Mapping) else facts.get("task")
    return None if name is None else _plain(name)


def _front_matter(
    description: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]], name: str, licence: str | None
) -> list[str]:
    facts = description["provenance"]
    tags = ["robotics", "burnish", _process(description)]
    tags += ["imitation-learning"] if facts.get("dataset") else []
    tags += ["reinforcement-learning"] if facts.get("algo") not in (None, "bc") else []
    entries: dict[str, Any] = {"library_name": "burnish", "pipeline_tag": "robotics", "tags": tags}
    if licence is not None:
        entries["license"] = licence
    if evaluations:
        entries["model-index"] = [{"name": name, "results": [_indexed(one) for one in evaluations]}]
    return ["---", *(f"{key}: {json.dumps(value)}" for key, value in entries.items()), "---"]  # JSON is YAML


def _indexed(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation in the format of the hub's results index."""
    summary = evaluation["summary"]
    env = _plain(summary["env"])
    names = {key: f"{name}, {summary['episodes']} episodes" for key, name in _NAMES.items() if key in summary}
    metrics = [{"type": key, "name": name, "value": summary[key]["value"]} for key, name in names.items()]
    task = {"type": "reinforcement-learning", "name": "episodes in simulation"}
    return {"task": task, "dataset": {"type": env, "name": env}, "metrics": metrics}


def _parts(description: Mapping[str, Any]) -> Iterator[str]:
    parts = description["parts"]
    yield from ("| | |", "|---|---|")
    yield from (f"| {group} | {_cell(parts[group])} |" for group in PART_GROUPS if group in parts)
    yield f"| observation | {description['obs_steps']} × {description['obs_dim']} |"
    for camera, (height, width, _) in description.get("images", {}).items():
        yield f"| camera {_cell(camera)} | {height} × {width} |"
    yield (
        f"| action chunk | predicts {description['horizon']}, executes {description['act_steps']}, "
        f"{description['action_dim']} wide |"
    )


def _results(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not evaluations:
        return
    yield from ("## Results", "", "| task | quantity | mean | 95 % interval | episodes | protocol |")
    yield "|---|---|---|---|---|---|"
    for evaluation in evaluations:
        summary = evaluation["summary"]
        for key in (key for key in _NAMES if key in summary):
            found = summary[key]
            interval = f"{_number(found['low'])} to {_number(found['high'])}" if "low" in found else "–"
            protocol = _plain(evaluation["protocol_hash"])[:12]
            yield (
                f"| {_plain(summary['env'])} | {_NAMES[key]} | {_number(found['value'])} | {interval} | "
                f"{summary['episodes']} | `{protocol}` |"
            )
    yield ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _kind(description: Mapping[str, Any]) -> str:
    if _is_world(description):
        return f"A learned world ({_process(description)})"
    if "members" not in description:
        return f"A {_process(description)} policy"
    how, count = description["composition"], len(description["members"])
    return f"A composition of {count} policies (`{how['operator']}`, weights `{json.dumps(how['weights'])}`)"


def _process(description: Mapping[str, Any]) -> str:
    return _plain(description["parts"]["process"]["name"])


def _plain(value: Any) -> str:
    """Return a one-line text without Markdown or YAML markup."""
    return re.sub(r"[^\w .,:;@/+()=-]", " ", str(value))[:200].strip()


def _cell(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[\w .,:;@/+()=-]{1,200}", value):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return "`" + re.sub(r"[`|\s]+", " ", json.dumps(value))[:500] + "`"
