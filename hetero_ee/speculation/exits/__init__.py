"""Early exits: the layers where a token may exit, and the estimate of its final hidden state at such a layer."""
