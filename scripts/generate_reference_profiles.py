"""Writes the shipped hardware profiles from their data sheets; a test checks that they are up to date.

python scripts/generate_reference_profiles.py
"""

from pathlib import Path

from hetero_ee_profiles.data_sheets import DATA_SHEETS, derived_profile
from hetero_ee_profiles.records import write_record

FOLDER = Path(__file__).parent.parent / "profiles" / "hetero_ee_profiles" / "reference_profiles"
DATE = "2026-11-21"  # of the rule and the figures in it

if __name__ == "__main__":
    for sheet in DATA_SHEETS:
        write_record(derived_profile(sheet, DATE), FOLDER / f"{sheet.name}.json")
