"""The models, machines and ways to decode that the SpecEE benchmark compares, opened by the public engine."""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_ee import Engine
from hetero_ee.config import cache_folder, data_folder, demo_model_folder
from hetero_ee.errors import UsageError
from hetero_ee.evaluation.open_mode import EngineMode, Variant
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.resolve import resolve_model
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.request import EngineOptions
from hetero_ee.profiling.machine_profile import Wanted, machine_profile
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.opening import DRAFT_HEAD_FOLDER
from hetero_ee.text.chat_prompt import chat_ids, open_template
from hetero_ee.text.chat_template import Message
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_profile
from tests.real_model import smollm2_file

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from draft_prompts import KINDS, PromptSource, read_passages
from stories import SEPARATOR

HARDWARE = "rtx-4060-laptop-8gb"
MEASURED, EMULATED, REPLAYED = "measured", "emulated", "replayed"
TREE_WIDTH, TREE_TOKENS = 4, 12
N_CONTEXT_WORDS, N_CHOICE_WORDS = 24, 6  # of a question which continuation follows
GPU_SHARES = (0.25, 0.5, 0.75)
STREAMED = r"layers\..*=stream"
OPENINGS = (
    "One morning, a rabbit",
    "There was once a little boat that",
    "Anna had a new kite. She",
    "The old man sat on a bench and",
    '"Where is my hat?" asked the bear.',
    "It was very cold outside, so",
    "Two friends were playing in the garden when",
    "Jack wanted to bake a cake for his mom.",
)


@dataclass(frozen=True, slots=True)
class Way(Variant):
    """A mode, with chains or with trees of drafts."""

    has_tree: bool = False

    @property
    def detail(self) -> str:
        return "trees" if self.has_tree else ""


WAYS = (Way("full"), Way("exact"), Way("specee"), Way("exact", has_tree=True), Way("specee", has_tree=True))


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a model runs: this CPU, or an emulated laptop with some of its layers on the GPU."""

    name: str
    label: str
    options: dict[str, Any] = field(default_factory=dict)


def laptops(n_layers: int) -> list[Machine]:
    """Return the emulated laptop with a share of the layers on the GPU, and with all layers streamed."""
    laptop = {"profile": reference_profile(HARDWARE), "emulate": True}
    shares = [
        Machine(
            f"laptop, {share:.0%} of the layers on the GPU", EMULATED, laptop | {"gpu_layers": round(share * n_layers)}
        )
        for share in GPU_SHARES
    ]
    streamed = Machine("laptop, layers streamed to the GPU", EMULATED, laptop | {"override": STREAMED})
    return [*shares, streamed]


@dataclass(frozen=True, slots=True)
class Subject:
    """A calibrated model, its draft head, None without one, and prompts for it."""

    name: str
    file: Path
    draft_head: Path | None
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]  # to make questions of; () for the model's own
    context_tokens: int
    n_layers: int
    calibration: Calibration | None
    profile: HardwareProfile  # of this machine, by which its plans are made

    @property
    def cpu(self) -> Machine:
        return Machine("this CPU", MEASURED, {"profile": self.profile})

    def options(self, machine: Machine, way: Variant) -> EngineOptions:
        """Return the options of an engine. Trees are an option that not every version has."""
        found: Any = {"mode": way.mode, "draft_head": str(self.draft_head or "none"), "threads": 1}
        found |= {"context_tokens": self.context_tokens} | machine.options
        if isinstance(way, Way) and way.mode != "full":
            found["draft_tree"] = TREE_WIDTH if way.has_tree else 1
        if isinstance(way, Way) and way.mode == "specee" and way.has_tree:
            found["draft_length"] = TREE_TOKENS
        return found

    @contextmanager
    def mode(self, machine: Machine, way: Variant) -> Iterator[EngineMode]:
        """Open the model on a machine. Raises: HeteroError: if the way is refused there."""
        with Engine.from_pretrained(self.file, **self.options(machine, way)) as engine:
            if isinstance(way, Way) and way.has_tree and (engine.plan is None or engine.plan.tree_width == 1):
                raise UsageError(f"its plan has no trees of drafts in mode {way.mode}.")
            yield EngineMode(engine, emulates=machine.label == EMULATED)


def subject(name: str, head: Path, texts: Sequence[Path], n_prompts: int, n_new_tokens: int) -> Subject | None:
    """Return the demo model or SmolLM2, calibrated first if it is not; None if SmolLM2 is not installed."""
    file = demo_model_folder() if name == "demo" else smollm2_file()
    if file is None:
        return None
    if name == "demo":
        head = demo_model_folder() / DRAFT_HEAD_FOLDER
    profile = this_profile(file)
    options: EngineOptions = {"threads": 1, "profile": profile, "mode": "full", "draft_head": str(head or "none")}
    with Engine.from_pretrained(file, **options) as engine:
        calibration = calibrated(engine, with_draft=name != "demo")  # the demo model ships calibrated without one
        passages = tuple(read_passages(list(texts), SEPARATOR))
        prompts = tuple(map(tuple, _prompts(engine, passages, n_prompts)))
        n_context = max(256, max(map(len, prompts)) + n_new_tokens + 1)
        return Subject(name, file, head, prompts, passages, n_context, engine.spec.n_layers, calibration, profile)


def this_profile(file: Path) -> HardwareProfile:
    """Measure this machine's CPU once, roughly: a busy machine's profile is not kept from one engine to the next."""
    return machine_profile(
        read_spec(resolve_model(file)),
        Wanted(quick=True, refresh=False, threads=(1,), command="a benchmark"),
        data_folder=data_folder(),
        cache_folder=cache_folder(),
        disk_file=None,
        clock=time.perf_counter,
        open_gpu=lambda model: None,
    )


def calibrated(engine: Engine, *, with_draft: bool) -> Calibration | None:
    """Return the model's calibration, made first if there is none or, with_draft, none for the draft's candidates."""
    assert engine.calibrations is not None, "a converted model has a store"
    found = engine.calibrations.find()
    if found is None or (with_draft and found.drafted is None):
        engine.calibrate(force=True)
    return engine.calibrations.find()


def _prompts(engine: Engine, passages: Sequence[str], n_prompts: int) -> list[list[int]]:
    """Return held-out prompts of five kinds by the chat template, or openings of stories without one."""
    if not engine.has_chat_template:
        return [engine.tokenizer.encode(opening) for opening in OPENINGS[:n_prompts]]
    source = PromptSource(passages or written(engine, 4 * n_prompts), 1, held_out=True)
    texts = [source.prompt(KINDS[number % len(KINDS)]) for number in range(n_prompts)]
    template = open_template(engine.tokenizer, None)
    try:
        return [chat_ids(template, engine.tokenizer, [Message("user", text)]) for text in texts]
    finally:
        template.close()


def written(engine: Engine, n_texts: int, n_tokens: int = 96) -> list[str]:
    """Return texts of the model's own, each sampled after an opening with its own seed."""
    openings = [OPENINGS[number % len(OPENINGS)] for number in range(n_texts)]
    params = SamplingParams(max_new_tokens=n_tokens, temperature=0.8, ignore_eos=True, seed=1)
    results = engine.generate(openings, params)
    return [opening + result.text for opening, result in zip(openings, results, strict=True)]


@dataclass(frozen=True, slots=True)
class Question:
    """A multiple-choice question: a context, its continuations, and the number of the right one."""

    context: str
    choices: tuple[str, ...]
    right: int


def questions(texts: Sequence[str], n_questions: int, *, has_arithmetic: bool, seed: int = 3) -> list[Question]:
    """Return questions which of four continuations follows a text, and, every other one, which result is right."""
    draw, found = random.Random(seed), list[Question]()
    pieces = [words for text in texts if len(words := text.split()) > N_CONTEXT_WORDS + N_CHOICE_WORDS]
    while len(found) < n_questions:
        if has_arithmetic and len(found) % 2:
            found.append(_sum(draw))
            continue
        chosen = draw.sample(range(len(pieces)), 4)
        place = draw.randrange(4)
        n_words = N_CONTEXT_WORDS + N_CHOICE_WORDS
        starts = [draw.randrange(len(pieces[number]) - n_words) for number in chosen]
        windows = [pieces[number][start : start + n_words] for number, start in zip(chosen, starts, strict=True)]
        choices = [" " + " ".join(words[N_CONTEXT_WORDS:]) for words in windows]
        context = windows[place][:N_CONTEXT_WORDS]
        found.append(Question(" ".join(context), tuple(choices), place))
    return found


def _sum(draw: random.Random) -> Question:
    a, b, place = draw.randrange(2, 60), draw.randrange(2, 40), draw.randrange(4)
    wrong = draw.sample([difference for difference in range(-9, 10) if difference and a + b + difference > 0], 4)
    results = [a + b + (0 if number == place else wrong[number]) for number in range(4)]
    return Question(f"Question: What is {a} + {b}?\nAnswer:", tuple(f" {result}" for result in results), place)
