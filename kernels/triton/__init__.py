"""The ops as Triton kernels, for CUDA devices; each module holds kernels and their launchers.

Rules of a module here:

- A kernel that is launched is called ``_…_kernel`` and is in ``COMPILE_CASES`` of its module, so
  that it is compiled ahead of time for every target and its registers and spills are known.
- A kernel loads, casts to float32, computes, and casts back: Triton's interpreter, which runs the
  kernels without a GPU, cannot compute in bfloat16.
- A launcher checks shapes and dtypes once and waits for nothing. The device of its tensors is the
  current one. Its order of sums is set by shapes and by lengths the host gives, never by values.

Kernels of mixtures of experts, of latent attention and of quantised weights belong here too, as
modules of their own beside the models that need them.
"""
