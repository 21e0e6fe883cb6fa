"""Learning: one file per algorithm and the parts they share."""
