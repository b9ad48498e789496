"""Runs the decoder: executors, devices and GPU segments."""
