"""Stands in for the compiled kernels of Mamba-1, which mamba_ssm imports and Mamba-3 does not use."""
