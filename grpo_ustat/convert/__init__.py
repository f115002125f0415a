"""Rollouts that other frameworks wrote, as one Parquet file that `mse pool=FILE` takes."""
