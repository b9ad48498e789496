"""hetero_ee: large language models on a PC whose GPU memory is too small for them.

Names are resolved on first use, so that `import hetero_ee` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_ee.decoding.conversation import Conversation
    from hetero_ee.decoding.reply import Reply
    from hetero_ee.decoding.result import GeneratedToken, GenerationResult
    from hetero_ee.decoding.sampling import SamplingParams
    from hetero_ee.engine import Engine
    from hetero_ee.errors import (
        CheckpointError,
        DamagedStoreError,
        DeviceLostError,
        DeviceMemoryError,
        DiskFullError,
        HeteroError,
        ModelError,
        StoreError,
        UsageError,
    )
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee.profiling.profile import HardwareProfile
    from hetero_ee.speculation.statistics import DraftStatistics
    from hetero_ee.text.chat_template import Message

__version__ = "0.1.0"

_HOME_OF = {
    "Conversation": "hetero_ee.decoding.conversation",
    "DraftStatistics": "hetero_ee.speculation.statistics",
    "HardwareProfile": "hetero_ee.profiling.profile",
    "Limits": "hetero_ee.planning.limits",
    "Plan": "hetero_ee.planning.plan",
    "Message": "hetero_ee.text.chat_template",
    "Reply": "hetero_ee.decoding.reply",
    "Engine": "hetero_ee.engine",
    "GeneratedToken": "hetero_ee.decoding.result",
    "GenerationResult": "hetero_ee.decoding.result",
    "SamplingParams": "hetero_ee.decoding.sampling",
    "ModelSpec": "hetero_ee.models.spec",
    "HeteroError": "hetero_ee.errors",
    "UsageError": "hetero_ee.errors",
    "ModelError": "hetero_ee.errors",
    "CheckpointError": "hetero_ee.errors",
    "DamagedStoreError": "hetero_ee.errors",
    "DeviceLostError": "hetero_ee.errors",
    "DeviceMemoryError": "hetero_ee.errors",
    "DiskFullError": "hetero_ee.errors",
    "StoreError": "hetero_ee.errors",
}

__all__ = [
    "CheckpointError",
    "Conversation",
    "DamagedStoreError",
    "DeviceLostError",
    "DeviceMemoryError",
    "DiskFullError",
    "DraftStatistics",
    "Engine",
    "GeneratedToken",
    "GenerationResult",
    "HardwareProfile",
    "HeteroError",
    "Limits",
    "Message",
    "ModelError",
    "ModelSpec",
    "Plan",
    "Reply",
    "SamplingParams",
    "StoreError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hetero_ee' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
