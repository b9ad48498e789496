"""GPUs: which ones exist and how long their operations take."""
