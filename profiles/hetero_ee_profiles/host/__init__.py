"""Facts about this computer: processor, memory, disk and operating system."""
