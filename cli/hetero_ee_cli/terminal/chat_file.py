"""Save a conversation to a readable JSON file, and load it again."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_ee.config.toml_file import expanded
from hetero_ee.errors import UsageError
from hetero_ee_profiles.records import read_record, write_record

if TYPE_CHECKING:
    from hetero_ee.decoding.conversation import Conversation

VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class SavedChat:
    """Content of a chat file: the messages and sampling options of a conversation."""

    version: int
    model: str  # as the user named it; any model can continue the chat
    sampling: dict[str, Any]
    messages: tuple[SavedMessage, ...]

    def __post_init__(self) -> None:
        self.check_version(self.version)

    @staticmethod
    def check_version(version: int) -> None:
        if version != VERSION:
            raise ValueError(f"its version is {version}; this program reads version {VERSION}")


def save_chat(name: str, model: str, conversation: "Conversation") -> Path:
    """Write the conversation to a file and return its path. An earlier chat in the file is replaced.

    Raises:
        UsageError: if the file can't be written, or exists and is not a saved chat.
    """
    file = _file(name, "/save")
    if file.exists():
        try:
            _read(file)
        except UsageError as error:
            raise UsageError(f"{file} exists and is not a saved chat; name another file.") from error
    messages = tuple(SavedMessage(each.role, each.content) for each in conversation.messages)
    try:
        write_record(SavedChat(VERSION, model, asdict(conversation.sampling), messages), file)
    except OSError as error:
        raise UsageError(f"{file} can't be written ({error.strerror}); name another file.") from error
    return file


def load_chat(name: str, conversation: "Conversation") -> SavedChat:
    """Replace the conversation's messages and sampling options by those in a file, and return the file's content.

    Raises:
        UsageError, ModelError: if the file is not a saved chat. The conversation then stays unchanged.
    """
    from hetero_ee.options.sampling import SamplingParams
    from hetero_ee.text.chat_template import Message

    saved = _read(_file(name, "/load"))
    messages = [Message(each.role, each.content) for each in saved.messages]
    conversation.restore(messages, SamplingParams().changed(**saved.sampling))
    return saved


def _file(name: str, command: str) -> Path:
    if not name:
        raise UsageError(f"{command} needs a file; type {command} FILE.")
    return expanded(name, command)


def _read(file: Path) -> SavedChat:
    try:
        return read_record(SavedChat, file)
    except OSError as error:
        raise UsageError(f"{file} can't be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise UsageError(f"{file} is not a saved chat: {error}.") from error
