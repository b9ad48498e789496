"""Names of files and folders of stores. Imports nothing, since shell completion and `doctor` use them."""

STORES_FOLDER = "stores"  # in the cache folder
MANIFEST_FILE = "manifest.json"
PARTIAL_SUFFIX = ".partial"  # of a store that is being written
REMOVED_SUFFIX = ".removed"  # of a store that is being removed
