"""From a resolved configuration to a run: locate policies, build, launch."""
