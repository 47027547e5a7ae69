"""CUDA kernels of the ops: their sources, and how they are compiled, cut and launched."""
