"""From a resolved configuration to a run: locating policies, building, launching."""
