"""Own kernels: C++ on CPUs (cpu/), Triton on GPUs (gpu/), and their twins in plain torch (reference.py).

Each output of a product is one chain of additions in a fixed order: a row's result does not depend on the other rows of
the call, nor on the number of threads.
"""
