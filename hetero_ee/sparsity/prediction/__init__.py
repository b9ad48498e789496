"""Which neurons of ReLU models are active, before their gate is multiplied: fitted, kept, merged into weights."""
