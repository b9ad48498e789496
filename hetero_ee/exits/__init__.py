"""Early exits: which rows may stop at a boundary, and what they would say there."""
