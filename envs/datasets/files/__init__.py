"""Shared file types of the formats: HDF5, npz, Parquet, videos."""
