"""How good recorded episodes are, in the units in which policies are judged."""

from __future__ import annotations

from envs.datasets.episodes import EpisodeDataset


def quality(dataset: EpisodeDataset) -> dict[str, float]:
    """Return `episodes` and the means of what was recorded: `return`, `success`; empty if nothing was.

    Rewards that are all 0 count as not recorded. Empty too with `masks`: recordings that go on behind the end
    of the task are no episodes of it.
    """
    if "masks" in dataset.extras:
        return {}
    found = {}
    if bool(dataset.rewards.any()):
        found["return"] = float(dataset.returns.mean())
    if dataset.success is not None:
        found["success"] = float(dataset.success.double().mean())
    return {"episodes": dataset.num_episodes, **found} if found else {}
