"""Devices and links as the executors see them: real, emulated, and the seams between."""
