"""Weights of other programs, one file per `source=`."""
