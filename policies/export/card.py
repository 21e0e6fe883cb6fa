"""README of an exported folder: usage and parity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.runner import NOT_HISTORIES

_OPENING = {
    "whole": (
        "`policy.onnx` maps observations and noise to `act_steps` = {act_steps} actions, and to the\n"
        "whole plan that they begin, in physical units. Normaliser, network and the whole sampler are\n"
        "inside; opset {opset}."
    ),
    "step": (
        "`encoder.onnx` maps observations to what the network is conditioned on, `step.onnx` is one\n"
        "evaluation of the network, and `loop.json` is what the sampler does around its evaluations;\n"
        "`runner.py` runs the three. Opset {opset}."
    ),
}

_ONNX = """`runner.py` needs numpy and onnxruntime, nothing else:

```python
import numpy as np
from runner import Runner

runner = Runner(".", seed=0)
newest = {newest}
action = runner.act(newest)  # -> (Da,), once per control step, within the limits
runner.reset()               # where an episode begins
```

It keeps the last `obs_steps` observations, draws the noise, decides anew after `act_steps` actions and clips
them to `low` and `high`. `python runner.py` checks this folder on this machine."""

_GRAPH = """The graph by itself:

```python
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession("policy.onnx")
sample = np.load("sample.npz")
feed = {node.name: sample[node.name] for node in session.get_inputs()}
action = session.run(None, feed)[0]          # equals sample["action"]
```"""


def card_of(facts: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Return the README."""
    opening = _OPENING[facts["graph"]].format(act_steps=facts["act_steps"], opset=report["opset"])
    inputs = [(f"`{name}`", one["shape"], one["units"]) for name, one in facts["inputs"].items()]
    parity = [(int(row["batch"]), f"{row['max_abs_difference']:.1e}") for row in report["parity"]]
    sections = [
        "# Exported policy",
        f"{opening}{_made_for(facts)}",
        "`signature.json` has the names of observations and actions, the action limits and the control\n"
        "rate, or null where they are not known. The graph does not clip actions.",
        table(("input", "shape", "units"), inputs),
        _ONNX.replace("{newest}", _newest(facts["inputs"])),
        *([_GRAPH] if facts["graph"] == "whole" else []),
        f"Largest difference to the original on random inputs (tolerance {report['tolerance']:.0e}):",
        table(("batch", "difference"), parity),
        "Median latency, one thread, on the machine that exported:",
        table(*latency_table(report["latency"])),
    ]
    return "\n\n".join(sections) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def latency_table(rows: Sequence[Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a latency table, in milliseconds."""
    names = [name for name in (rows[0] if rows else {"eager_ms": 0}) if name != "batch"]
    header = ["batch", *(f"{name.removesuffix('_ms')} [ms]" for name in names)]
    return header, [[str(int(row["batch"])), *(f"{row[name]:.2f}" for name in names)] for row in rows]


def _made_for(facts: Mapping[str, Any]) -> str:
    task, rate = facts["task"], facts["control_hz"]
    parts = [] if task is None else [f"made for the task `{task}`"]
    parts += [] if rate is None else [f"one action every {1e3 / rate:g} ms"]
    text = ", ".join(parts)
    return f"\n{text[0].upper()}{text[1:]}." if text else ""


def _newest(inputs: Mapping[str, Any]) -> str:
    """Return the expression of an observation of zeros, as `Runner.act` takes it."""
    lines = []
    for name in inputs.keys() - {"noise"}:
        shape = tuple(inputs[name]["shape"][1 if name in NOT_HISTORIES else 2 :])
        lines.append(f'    "{name}": np.zeros({shape}, np.{inputs[name]["dtype"]}),')
    return "\n".join(["{", *sorted(lines), "}"])
