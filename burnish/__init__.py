"""Generative robot policies from demonstrations to a robot: cloning, RL fine-tuning, evaluation, export.

The whole path::

    import burnish

    demos = burnish.collect(env="avoid", episodes=50, out="avoid.hdf5")
    base = burnish.clone(demos, env="avoid")
    tuned = burnish.train("experiment=avoid_dppo", init=base)
    print(burnish.evaluate(tuned, baseline=base).comparison)
    burnish.report(tuned)
    burnish.export(tuned, out="exported")
    policy = burnish.load_policy(tuned)

Names are imported at first use, so that `import burnish` stays fast.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

from burnish.name_clashes import require_graphics_library, require_own_packages

if TYPE_CHECKING:
    from burnish.api import (
        clone,
        collect,
        compose,
        convert_data,
        download_data,
        evaluate,
        export,
        import_policy,
        inspect_data,
        open_loop,
        rank,
        report,
        train,
        train_seeds,
    )
    from burnish.runs.locate import load_policy
    from policies.storage.hub import from_pretrained, push_to_hub, save_pretrained
    from policies.storage.policy_folder import save_policy

__all__ = [
    "__version__",
    "clone",
    "collect",
    "compose",
    "convert_data",
    "download_data",
    "evaluate",
    "export",
    "from_pretrained",
    "import_policy",
    "inspect_data",
    "load_policy",
    "open_loop",
    "push_to_hub",
    "rank",
    "report",
    "save_policy",
    "save_pretrained",
    "train",
    "train_seeds",
]

try:
    __version__ = metadata.version("burnish")
except metadata.PackageNotFoundError:  # checkout without installation
    __version__ = "0+checkout"

_OUTSIDE_API = {  # all other names are in `burnish.api`
    "load_policy": "burnish.runs.locate",
    "save_policy": "policies.storage.policy_folder",
    "from_pretrained": "policies.storage.hub",
    "push_to_hub": "policies.storage.hub",
    "save_pretrained": "policies.storage.hub",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use.

    Raises:
        ImportError: If another project's package shadows one of ours, or `MUJOCO_GL` names a library that is
            not installed; see `burnish.name_clashes`.
    """
    if name not in __all__:
        raise AttributeError(f"module 'burnish' has no attribute '{name}'")
    require_own_packages()
    require_graphics_library()
    return getattr(importlib.import_module(_OUTSIDE_API.get(name, "burnish.api")), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
