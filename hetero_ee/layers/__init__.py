"""Compute the decoder's layers, each written once in terms of the operations that devices provide."""
