"""Running the decoder: executors, devices and what a GPU runs."""
