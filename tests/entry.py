"""The command line in this process, for tests whose subject is not the process."""

from __future__ import annotations

import pytest

from burnish import cli


def exit_code(*words: str) -> int:
    """Run `burnish` with these words; returns the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["burnish", *words])
        patch.setenv("HYDRA_FULL_ERROR", "0")
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)
