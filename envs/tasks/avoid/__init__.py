"""The obstacle-avoidance task."""
