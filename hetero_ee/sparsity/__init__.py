"""Activation sparsity: which neurons of an FFN a token does without."""
