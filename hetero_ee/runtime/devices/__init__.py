"""Devices and links between them: interfaces, and real and emulated implementations."""
