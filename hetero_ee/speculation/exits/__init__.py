"""Early exits: where a token may exit, and its estimated final state there."""
