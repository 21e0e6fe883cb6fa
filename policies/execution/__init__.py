"""Action chunks on a robot: executor, replanning, observation history."""
