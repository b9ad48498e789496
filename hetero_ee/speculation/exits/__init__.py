"""Early exits: at which layers a token may exit, and what it would be there."""
