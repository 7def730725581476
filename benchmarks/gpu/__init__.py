"""The GPU programme: correctness of the Triton kernels, ceilings, decode steps, a profile. benchmarks/gpu.sh runs it.

__main__.py    the order of the parts, their limits of time, and the report
selfcheck.py   the kernels against float32 on fresh random numbers
synthetic.py   programs with random weights
reference.py   plain twins of single kernels
tune.py        which division of a product is fastest on this GPU
"""
