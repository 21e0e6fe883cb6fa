"""Files that several formats are stored in: HDF5, npz, Parquet, videos."""
