"""Four models and four machines of those that are shipped: enough for tests whose cases are pairs of both."""

from hetero_ee_profiles.data_sheets import data_sheets

SHAPES = ("tinyllama-1.1b", "llama-2-7b", "llama-2-13b", "llama-3-8b")
MACHINES = ("rtx-3060-12gb", "rtx-4060-laptop-8gb", "rtx-4070-12gb", "rtx-4090-24gb")
DATA_SHEETS = tuple(sheet for sheet in data_sheets() if sheet.name in MACHINES)
