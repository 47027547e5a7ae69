// Kernels are launched so that one may begin before the one ahead of it has ended, where the device can do that.

// From here on the next kernel may begin, once every block of this one has come here or ended.
__device__ __forceinline__ void let_the_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns when the kernel ahead, and so every one before it, has ended and what it wrote can be read. Until then a
// kernel reads only what no kernel writes, and writes nothing. Every kernel calls it: the next one trusts in that.
__device__ __forceinline__ void wait_for_the_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// How a kernel begins that has nothing to do ahead of its turn.
__device__ __forceinline__ void in_turn() {
    let_the_next_begin();
    wait_for_the_last();
}

