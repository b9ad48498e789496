"""Early-exit decoding: what exits, what is full mode's, and what the cache holds."""

import random
from collections.abc import Iterator, Sequence

import pytest
from torch import Tensor

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Continuation, Ending, Prompts, Request
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.errors import UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.early_exit import EarlyExits, score_early
from hetero_ee.speculation.statistics import ExitCounts
from tests.drafted_generation import generate_early
from tests.executor_support import Model, model_of, on_kernels
from tests.kv_contents import read_back

PROMPTS = [[5, 9, 2, 40], [7, 7, 1], [100, 3, 8, 60, 2, 11]]
N_NEW = 24


class Scripted:
    """A policy whose tokens exit where the script says: (sequence, position of the token that is given out) -> layers
    after which it is; also keeps what each exit was chosen from. The judge of every call is itself."""

    def __init__(self, depths: dict[tuple[int, int], int], n_layers: int) -> None:
        self._depths, self._n_layers = depths, n_layers
        self.told: list[tuple[int, int]] = []

    def judging(self, executor: Executor, sampler: DraftSampler) -> "Scripted":
        self._executor = executor
        return self

    def begin(self, text: Request) -> None:
        pass

    def exit_layers(self, text: Request) -> Sequence[int]:
        return range(1, self._n_layers)

    def judge(self, exit_layer: int, hidden: Tensor, texts: Sequence[Request]) -> list[int | None]:
        rows = self.logits(exit_layer, hidden)
        wanted = [self._depths.get((text.index, len(text.token_ids))) for text in texts]
        return [int(row.argmax()) if depth == exit_layer else None for row, depth in zip(rows, wanted, strict=True)]

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        return self._executor.to_logits(hidden)

    def may_exit(self, text: Request) -> bool:
        return True

    def given_out(self, text: Request, depth: int, hidden: Tensor) -> None:
        self.told.append((text.index, depth))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama", "int4", tmp_path_factory.mktemp("model"))


@pytest.fixture
def executor(model: Model) -> Iterator[Executor]:
    executor = on_kernels(model)
    yield executor
    executor.close()


def early(
    executor: Executor,
    policy: Scripted,
    prompts: Prompts,
    counts: ExitCounts | None = None,
    max_pending: int = 8,
    **params: object,
) -> list[GeneratedToken]:
    exits = EarlyExits(policy, max_pending)
    sampling = SamplingParams(max_new_tokens=N_NEW).changed(**params)
    ending = Ending(frozenset(), executor.cache.max_tokens)
    return list(generate_early(executor, prompts, sampling, ending, lambda ids: "", lambda: 0.0, exits, counts))


def by_text(tokens: Sequence[GeneratedToken]) -> list[list[int]]:
    n_texts = 1 + max(token.sequence for token in tokens)
    return [[token.token_id for token in tokens if token.sequence == number] for number in range(n_texts)]


def script(seed: int, n_layers: int, share: float) -> dict[tuple[int, int], int]:
    draw = random.Random(seed)
    places = [(text, position) for text in range(len(PROMPTS)) for position in range(64)]
    return {place: draw.randrange(1, n_layers) for place in places if draw.random() < share}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_exits_it_is_full_mode(executor: Executor, temperature: float) -> None:
    policy = Scripted({}, executor.spec.n_layers)
    ending = Ending(frozenset(), executor.cache.max_tokens)
    sampling = SamplingParams(max_new_tokens=N_NEW, temperature=temperature)
    full = list(generate(executor, PROMPTS, sampling, ending, lambda ids: "", lambda: 0.0))
    assert by_text(early(executor, policy, PROMPTS, temperature=temperature)) == by_text(full)


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_one_token_at_a_time(executor: Executor, seed: int) -> None:
    """The definition: each text alone, and after every token everything before it through all layers at once."""
    n_layers = executor.spec.n_layers
    depths = script(seed, n_layers, 0.7)
    counts = ExitCounts()
    found = by_text(early(executor, Scripted(depths, n_layers), PROMPTS, counts, max_pending=1 + seed))
    statistics = counts.statistics(n_layers)
    assert statistics.n_tokens == len(PROMPTS) * (N_NEW - 1)
    assert statistics.n_exited > 0
    n_forced = 0
    for number, prompt in enumerate(PROMPTS):
        tokens, waiting = list(prompt), 0
        for index, token_id in enumerate(found[number]):
            depth = n_layers if index == 0 else depths.get((number, len(tokens)), n_layers)
            if waiting >= 1 + seed:
                depth, n_forced = n_layers, n_forced + 1
            waiting = waiting + 1 if depth < n_layers else 0
            assert token_id == said_after(executor, tokens, depth), (number, index)
            tokens.append(token_id)
    assert n_forced or seed


def said_after(executor: Executor, token_ids: Sequence[int], depth: int) -> int:
    """The likeliest token after a text whose last token passes so many layers, all others passing every one."""
    from hetero_ee.kv.batch import Batch

    sequence = executor.cache.open_new()
    try:
        hidden = executor.run(Batch.of_sequence(sequence, 0, list(token_ids)), None, range(depth))
        return int(executor.to_logits(hidden[-1:])[0].argmax())
    finally:
        executor.cache.close(sequence)


def test_the_cache_holds_what_is_whole(executor: Executor, model: Model) -> None:
    """A text that is gone on with finds the keys and values of full mode, or none."""
    n_layers, prompt = executor.spec.n_layers, PROMPTS[0]
    sequence = executor.cache.open_new()
    depths = {(0, position): 1 for position in range(20, 40)}
    tokens = early(executor, Scripted(depths, n_layers), Continuation(sequence, prompt), max_pending=100)
    whole = executor.cache.length(sequence)
    assert set(executor.cache.lengths(sequence)) == {whole}
    assert len(prompt) <= whole < len(prompt) + N_NEW - 1
    again = on_kernels(model)
    fresh = again.cache.open_new()
    from hetero_ee.kv.batch import Batch

    token_ids = [*prompt, *(token.token_id for token in tokens)]
    again.hidden(Batch.of_sequence(fresh, 0, token_ids[:whole]))
    for layer in range(n_layers):
        ours, theirs = (
            read_back(each.cache, layer, number, 0, whole) for each, number in ((executor, sequence), (again, fresh))
        )
        assert all(bool((a == b).all()) for a, b in zip(ours, theirs, strict=True))
    again.close()


def test_closing_the_iterator_frees_the_memory(executor: Executor) -> None:
    exits = EarlyExits(Scripted(script(1, executor.spec.n_layers, 0.7), executor.spec.n_layers), 8)
    ending = Ending(frozenset(), executor.cache.max_tokens)
    tokens = generate_early(executor, PROMPTS, SamplingParams(), ending, lambda ids: "", lambda: 0.0, exits)
    for _ in range(20):
        next(tokens)
    tokens.close()
    assert executor.cache.sequences == ()


def test_scores_are_what_tokens_are_chosen_from(executor: Executor) -> None:
    n_layers = executor.spec.n_layers
    depths = {(0, position): depth for (text, position), depth in script(3, n_layers, 0.6).items() if text == 0}
    tokens = early(executor, Scripted(depths, n_layers), PROMPTS[:1])
    token_ids = [*PROMPTS[0], *(token.token_id for token in tokens)]
    counts = ExitCounts()
    exits = EarlyExits(Scripted(depths, n_layers), 8)
    scored = list(score_early(executor, token_ids, len(PROMPTS[0]), exits, counts))
    assert [int(logits.argmax()) for logits, _ in scored] == token_ids[len(PROMPTS[0]) :]
    assert [depth for _, depth in scored[1:]].count(n_layers) == counts.statistics(n_layers).depths[n_layers]
    assert executor.cache.sequences == ()


def test_a_text_without_a_prompt_is_refused(executor: Executor) -> None:
    exits = EarlyExits(Scripted({}, executor.spec.n_layers), 8)
    with pytest.raises(UsageError, match="are the prompt; expected from 1"):
        list(score_early(executor, [1, 2, 3], 3, exits, ExitCounts()))
