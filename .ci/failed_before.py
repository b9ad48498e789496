"""End with an error unless the last run of pytest named 1 to N failed tests: python .ci/failed_before.py N"""

import json
import sys
from pathlib import Path

file = Path(".pytest_cache/v/cache/lastfailed")
if not file.is_file():
    sys.exit("No test failed, but pytest itself did.")
failed = json.loads(file.read_text())
print(*failed, sep="\n")
if not 1 <= len(failed) <= int(sys.argv[1]):
    sys.exit(f"{len(failed)} tests failed, which is no accident.")
