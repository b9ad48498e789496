"""What proposes draft tokens without the later layers."""
