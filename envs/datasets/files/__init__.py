"""Shared file types of the formats: arrays, HDF5, npz, Parquet, videos."""
