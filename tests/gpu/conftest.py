"""Triton's interpreter needs a process of its own: tests below interpreted/ are collected only there, or where there is
a GPU to run them on. test_interpreted.py runs them for everybody else."""

from tests.gpu_support import can_run_kernels

collect_ignore_glob = [] if can_run_kernels() else ["interpreted/*"]
