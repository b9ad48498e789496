"""Operations of each device: plain torch, the CPU kernels, the GPU kernels."""
