"""Facts about this computer: processor, memory, disk, operating system."""
