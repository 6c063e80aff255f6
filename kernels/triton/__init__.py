"""The ops as Triton kernels, for CUDA devices; each module holds kernels and their launchers."""
