"""Measurements of the package: speed against peers, studies of learning, simulators, size and layout."""
