"""Files of one checkpoint: the exported policy, the state to resume from, and their checksums."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from algos.training.serialization import from_plain, to_plain
from policies.errors import CheckpointError
from policies.policy import Policy
from policies.storage.atomic_write import atomic_file, sync_tree
from policies.storage.checksums import CHECKSUMS, is_intact, write_checksums
from policies.storage.policy_folder import save_policy

STATE_FORMAT = 1
_STATE_FILE = Path("training_state") / "state.pt"
_UNREADABLE = (  # raised by `torch.load` on damaged files
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError),
    *(AttributeError, TypeError, IndexError),
)


def write_checkpoint(
    folder: Path, policy: Policy, training_state: Mapping[str, Any], *, provenance: Mapping[str, Any]
) -> None:
    """Write a checkpoint to a new folder, flushed to disk.

    Args:
        folder: Where.
        policy: The exported policy.
        training_state: Resume state; see `algos.training.serialization`.
        provenance: Facts for the model card.

    Raises:
        CheckpointError: If the state cannot be serialised; nothing is written.
    """
    state = to_plain({"format": STATE_FORMAT, **training_state}, "training_state")
    folder.mkdir()
    save_policy(policy, folder / "policy", provenance=provenance)
    (folder / _STATE_FILE).parent.mkdir()
    with atomic_file(folder / _STATE_FILE) as file:
        torch.save(state, cast(IO[bytes], file))
    write_checksums(folder)
    sync_tree(folder)


def is_copy(folder: Path, checkpoint: Path) -> bool:
    """Say whether a folder has the checksums of a checkpoint."""
    sums = [one / CHECKSUMS for one in (folder, checkpoint)]
    return all(path.is_file() for path in sums) and sums[0].read_bytes() == sums[1].read_bytes()


def read_training_state(folder: Path) -> dict[str, Any]:
    """Return the training state of a checkpoint, on the CPU.

    Raises:
        CheckpointError: If it is missing, damaged, or of another format.
    """
    path = folder / _STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: this checkpoint can be run but not resumed. Remove it to continue "
            "from the one before."
        )
    try:
        if not is_intact(folder, _STATE_FILE):
            raise OSError(f"its SHA-256 is not that of {CHECKSUMS}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} is damaged ({reason}). Remove its checkpoint to continue from the one before."
        ) from None
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} must have format {STATE_FORMAT}; got {found}.")
    return from_plain(state)
