"""Names of the files that make up a Hugging Face model, of which only safetensors are ever read as weights."""

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them has to be there
SMALL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
MAX_SMALL_FILE_BYTES = 64 * 2**20
