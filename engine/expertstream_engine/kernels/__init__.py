"""Compiled code of the CPU: kernels over bytes of weights, worker threads, and the schedules of a layer."""
