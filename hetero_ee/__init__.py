"""hetero_ee: runs large language models on a PC whose GPU memory is too small for them.

Names are imported on first use, so that `import hetero_ee` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_ee.calibration.job import CalibrationOutcome as CalibrationOutcome
    from hetero_ee.calibration.job import CalibrationRequest as CalibrationRequest
    from hetero_ee.calibration.run import CalibrationSettings as CalibrationSettings
    from hetero_ee.config import Progress as Progress
    from hetero_ee.decoding.async_tokens import AsyncTokens as AsyncTokens
    from hetero_ee.decoding.conversation import Conversation as Conversation
    from hetero_ee.decoding.conversation import Messages as Messages
    from hetero_ee.decoding.conversation import Reply as Reply
    from hetero_ee.decoding.logprobs import TokenLogprobs as TokenLogprobs
    from hetero_ee.decoding.loop import DecodingLoop as DecodingLoop
    from hetero_ee.decoding.loop import Stepped as Stepped
    from hetero_ee.decoding.result import FinishReason as FinishReason
    from hetero_ee.decoding.result import GeneratedToken as GeneratedToken
    from hetero_ee.decoding.result import GenerationResult as GenerationResult
    from hetero_ee.decoding.result import TokenOrigin as TokenOrigin
    from hetero_ee.engine import Engine as Engine
    from hetero_ee.errors import CheckpointError as CheckpointError
    from hetero_ee.errors import DamagedStoreError as DamagedStoreError
    from hetero_ee.errors import DeviceLostError as DeviceLostError
    from hetero_ee.errors import DeviceMemoryError as DeviceMemoryError
    from hetero_ee.errors import DiskFullError as DiskFullError
    from hetero_ee.errors import HeteroError as HeteroError
    from hetero_ee.errors import ModelError as ModelError
    from hetero_ee.errors import StoreError as StoreError
    from hetero_ee.errors import UsageError as UsageError
    from hetero_ee.models.spec import ModelSpec as ModelSpec
    from hetero_ee.options.sampling import ChatChanges as ChatChanges
    from hetero_ee.options.sampling import Sampling as Sampling
    from hetero_ee.options.sampling import SamplingChanges as SamplingChanges
    from hetero_ee.options.sampling import SamplingParams as SamplingParams
    from hetero_ee.planning.limits import Limits as Limits
    from hetero_ee.planning.placement import Placement as Placement
    from hetero_ee.planning.plan import Plan as Plan
    from hetero_ee.planning.request import EngineOptions as EngineOptions
    from hetero_ee.planning.request import FindProfile as FindProfile
    from hetero_ee.planning.request import PlanRequest as PlanRequest
    from hetero_ee.profiling.profile import HardwareProfile as HardwareProfile
    from hetero_ee.runtime.devices.timeline import Span as Span
    from hetero_ee.runtime.devices.traffic import TextTraffic as TextTraffic
    from hetero_ee.runtime.executors.executor import Executor as Executor
    from hetero_ee.sparsity.job import PredictorOutcome as PredictorOutcome
    from hetero_ee.sparsity.job import SparsityOutcome as SparsityOutcome
    from hetero_ee.speculation.drafting import Drafting as Drafting
    from hetero_ee.speculation.statistics import DraftStatistics as DraftStatistics
    from hetero_ee.speculation.statistics import ExitStatistics as ExitStatistics
    from hetero_ee.text.chat_template import Message as Message
    from hetero_ee.text.prompt import Prompt as Prompt
    from hetero_ee.text.prompt import PromptList as PromptList
    from hetero_ee.text.prompt import TokenArray as TokenArray
    from hetero_ee.text.tokenizer import Tokenizer as Tokenizer
    from hetero_ee_profiles.hardware import DeviceTimes as DeviceTimes

__version__ = "0.1.0"

_NAMES = {
    "hetero_ee.calibration.job": ("CalibrationOutcome", "CalibrationRequest"),
    "hetero_ee.calibration.run": ("CalibrationSettings",),
    "hetero_ee.config": ("Progress",),
    "hetero_ee.decoding.async_tokens": ("AsyncTokens",),
    "hetero_ee.decoding.conversation": ("Conversation", "Messages", "Reply"),
    "hetero_ee.decoding.logprobs": ("TokenLogprobs",),
    "hetero_ee.decoding.result": ("FinishReason", "GeneratedToken", "GenerationResult", "TokenOrigin"),
    "hetero_ee.options.sampling": ("ChatChanges", "Sampling", "SamplingChanges", "SamplingParams"),
    "hetero_ee.decoding.loop": ("DecodingLoop", "Stepped"),
    "hetero_ee.engine": ("Engine",),
    "hetero_ee.errors": (
        *("CheckpointError", "DamagedStoreError", "DeviceLostError", "DeviceMemoryError", "DiskFullError"),
        *("HeteroError", "ModelError", "StoreError", "UsageError"),
    ),
    "hetero_ee.models.spec": ("ModelSpec",),
    "hetero_ee.planning.limits": ("Limits",),
    "hetero_ee.planning.placement": ("Placement",),
    "hetero_ee.planning.plan": ("Plan",),
    "hetero_ee.profiling.profile": ("HardwareProfile",),
    "hetero_ee.runtime.devices.timeline": ("Span",),
    "hetero_ee.runtime.devices.traffic": ("TextTraffic",),
    "hetero_ee.runtime.executors.executor": ("Executor",),
    "hetero_ee.runtime.opening": ("PlanRequest",),
    "hetero_ee.planning.request": ("EngineOptions", "FindProfile", "PlanRequest"),
    "hetero_ee.sparsity.job": ("PredictorOutcome", "SparsityOutcome"),
    "hetero_ee.speculation.drafting": ("Drafting",),
    "hetero_ee.speculation.statistics": ("DraftStatistics", "ExitStatistics"),
    "hetero_ee.text.chat_template": ("Message",),
    "hetero_ee.text.prompt": ("Prompt", "PromptList", "TokenArray"),
    "hetero_ee.text.tokenizer": ("Tokenizer",),
    "hetero_ee_profiles.hardware": ("DeviceTimes",),
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [*sorted(_HOME_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hetero_ee' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
