"""What is known of the machine by measuring it."""
