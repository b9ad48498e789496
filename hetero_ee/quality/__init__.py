"""Quantization error measured on text: comparisons of two models, and weights rounded for the inputs they receive."""
