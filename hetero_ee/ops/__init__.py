"""Implement the operations of each device: plain torch, the CPU kernels, the GPU kernels."""
