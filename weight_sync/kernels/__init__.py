"""Batched copy, digest and quantize kernels; a CPU form stands beside each CUDA one."""
