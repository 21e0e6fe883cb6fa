"""Speed of the simulators against their official programs."""
