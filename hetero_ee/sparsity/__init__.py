"""Activation sparsity: skipping FFN neurons that contribute little to a token."""
