"""This computer: processor, memory, disk and what the system says of them."""
