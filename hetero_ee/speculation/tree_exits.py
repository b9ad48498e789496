"""Draft trees in mode specee: the paths of a tree exit early, each as one hyper-token (merged mapping).

A step grows a tree of drafts after a sequence's last token and runs it from exit layer to exit layer. There each path
from the root to a leaf is judged once, however many nodes it has. If the predictor is sure of the best path, the whole
head chooses a token after each of its nodes, and those that agree with the path are emitted. Their nodes stay pending,
like other tokens that exit. Paths that the predictor gives up leave the tree, so that deeper layers, on the CPU in a
split model, run fewer rows. A tree that never exits is verified as in exact mode. Source: SpecEE (arXiv 2504.08850),
section 6.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile

import numpy as np
import torch

from hetero_ee.decoding.loop import Take
from hetero_ee.decoding.requests import Request, step, taken
from hetero_ee.decoding.result import EXIT, GeneratedToken, TokenOrigin
from hetero_ee.runtime.choice import all_finite
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftStep
from hetero_ee.speculation.early_exit import EarlyExitMode, EarlyExits, states_of
from hetero_ee.speculation.exits.features import N_CANDIDATES
from hetero_ee.speculation.exits.merged_mapping import path_confidences
from hetero_ee.speculation.pending import PendingToken, advance, batch_of, captured_states
from hetero_ee.speculation.policies.exit_head import ExitHead
from hetero_ee.speculation.policies.specee import SpecEE
from hetero_ee.speculation.sources.source import TreeSource
from hetero_ee.speculation.statistics import ExitCounts
from hetero_ee.speculation.tree_grower import TreeGrower

GIVEN_UP = 0.1  # share of the best path's confidence below which a path leaves the tree


class TreeExitMode(EarlyExitMode):
    """An EarlyExitMode whose steps run trees of drafts, if a single sequence is decoded and its source makes one."""

    def __init__(self, executor: Executor, exits: EarlyExits, counts: ExitCounts, clock: Callable[[], float]) -> None:
        super().__init__(executor, exits, counts, clock)
        assert exits.rule is not None and isinstance(exits.policy, SpecEE), "trees are for mode specee"
        self._heads, self._rule = exits.policy.heads, exits.rule
        self._grower = TreeGrower(executor, exits.rule, self._sampler, exits.tree_width, N_CANDIDATES)

    def advance(self, requests: Sequence[Request]) -> list[Take]:
        """See Mode. The switch, which times both ways, decides whether a single sequence gets trees."""
        switch, start_s = self._exits.switch, self._clock()
        if len(requests) > 1:
            return super().advance(requests)
        grown = self._grown(requests[0]) if switch is None or switch.drafts else None
        tokens = None if grown is None else self._through(grown)
        takes = super().advance(requests) if tokens is None else [partial(list, tokens)]
        if switch is not None:
            switch.ended(self._clock() - start_s, 1 if tokens is None else len(tokens))
        return takes

    def _grown(self, request: Request) -> DraftStep | None:
        """Draft a tree for the request and return it as a step, or None if nothing drafts a tree for it."""
        candidates, n_pending = self._exits.candidates, len(self._pending_of(request))
        source = None if candidates is None else candidates.source
        room = min(self._exits.max_pending + 1 - n_pending, request.tokens_left) - 1
        if candidates is None or room < 1 or request.constraint is not None or not isinstance(source, TreeSource):
            return None
        grown = DraftStep(request, room, [PendingToken.last_of(request)])
        with candidates.surviving():
            self._grower.grow(grown, source)
        return grown if grown.origins else None

    def _through(self, tree: DraftStep) -> list[GeneratedToken]:
        """Run a tree through the layers until a path exits, and return the tokens that this emits.

        Once the whole head has refused a path, no deeper layer judges.
        """
        n_drafted, tokens = len(tree.tokens), None
        for exit_layer in self._judge.active_layers(tree.request):
            self._run(tree, exit_layer)
            tokens = self._judged_paths(tree, exit_layer, self._heads[exit_layer])
            if tokens is not None:
                break
        tokens = tokens or self._verified(tree)
        self._rule.settle(n_drafted, len(tokens), n_drafted)
        return tokens

    def _learn(self, tree: DraftStep, index: int, token_id: int) -> None:
        """Let the stop rule learn which of the tokens judged after tokens[index] was right."""
        for judged_id, confidence in tree.judged.get(index, ()):
            self._rule.audit(confidence, judged_id == token_id)

    def _run(self, tree: DraftStep, to_layer: int) -> None:
        advance(self._executor, [*self._pending_of(tree.request), *tree.tokens], to_layer)

    def _judged_paths(self, tree: DraftStep, exit_layer: int, head: ExitHead) -> list[GeneratedToken] | None:
        """Judge the tree's paths and prune it. Return the tokens of a path that exits, none if the whole head refuses
        it, or None if no path exits."""
        paths = tree.paths()
        if head.later is None or not tree.origins:
            return None
        nodes = sorted({index for path in paths for index in path[:-1]})
        ids = [[token_id for token_id, _ in tree.judged[index]] for index in nodes]
        places = [
            [
                (nodes.index(index), ids[nodes.index(index)].index(tree.tokens[child].token_id))
                for index, child in pairwise(path)
            ]
            for path in paths
        ]
        hidden = states_of([tree.tokens[index] for index in nodes])
        candidates = torch.tensor([each[:N_CANDIDATES] for each in ids])
        found = path_confidences(self._executor, head.end, head.later, hidden, candidates, places)
        self._counts.n_judged[exit_layer] += len(paths)
        confidences = np.nan_to_num(found, nan=0.0)
        best = int(confidences.argmax())
        if confidences[best] >= head.later_threshold:
            return self._exited(tree, paths[best], exit_layer, head)
        limit = GIVEN_UP * confidences[best]
        kept = {index for path, each in zip(paths, confidences, strict=True) if each >= limit for index in path}
        self._prune(tree, sorted(kept))
        return None

    def _prune(self, tree: DraftStep, kept: Sequence[int]) -> None:
        """Keep these tokens of the tree, in the cache too."""
        if len(kept) < len(tree.tokens):
            slots = [tree.tokens[index].slot for index in kept]
            self._executor.keep_path(tree.request.kv_sequence, slots[0], slots)
            tree.keep(kept)

    def _exited(self, tree: DraftStep, path: Sequence[int], exit_layer: int, head: ExitHead) -> list[GeneratedToken]:
        """Emit the tokens of a path with which the whole head agrees at this exit layer."""
        request, nodes = tree.request, path[:-1]
        histories = [
            [*request.token_ids, *(tree.tokens[at].token_id for at in path[1 : n + 1])] for n in range(len(nodes))
        ]
        chosen = self._sampler.drafted(
            self._executor,
            states_of([tree.tokens[index] for index in nodes]),
            head.end,
            [(request, history) for history in histories],
            is_verified=False,
        )
        pairs = zip(path[1:], chosen, strict=True)
        agreed = [*takewhile(lambda pair: tree.tokens[pair[0]].token_id == pair[1].token_id, pairs)]
        tokens = list[GeneratedToken]()
        for _, drafted in agreed:
            if not request.finished:
                token = taken(request, drafted.token_id, self._clock())
                tokens.append(replace(token, origin=TokenOrigin(EXIT, exit_layer, len(tokens), len(tree.origins))))
        if tokens:
            for index, drafted in zip(nodes[: len(agreed) + 1], chosen, strict=False):  # also the first that disagrees
                self._learn(tree, index, drafted.token_id)
            self._end(tree, path[: len(tokens)], exit_layer)
        return tokens

    def _verified(self, tree: DraftStep) -> list[GeneratedToken]:
        """Run the tree through all layers, and emit the tokens on the path that the full model's logits choose."""
        request, n_layers = tree.request, self._executor.spec.n_layers
        self._run(tree, n_layers)
        logits = self._executor.to_logits(states_of(tree.tokens))
        tokens, path = list[GeneratedToken](), list[int]()
        child: int | None = 0
        while child is not None and not request.finished:
            if path and not all_finite(logits[child]):  # full mode would fail here: it gets a step of its own
                break
            path.append(child)
            tokens.append(step(request, logits[child], self._clock()))
            self._learn(tree, child, tokens[-1].token_id)
            child = tree.child(child, tokens[-1].token_id)
        self._end(tree, path, n_layers)
        passed = self._pending.pop(request.kv_sequence)
        if self._exits.candidates is not None:
            normed = self._executor.final_norm(states_of(passed))
            self._exits.candidates.observe(batch_of(passed), normed, *captured_states(passed))
        return tokens

    def _end(self, tree: DraftStep, path: Sequence[int], depth: int) -> None:
        """Keep a path of the tree, after whose nodes tokens were emitted, as pending tokens of this depth."""
        request = tree.request
        self._prune(tree, path)
        for token in tree.tokens:
            self._counts.add_token(depth)
            self._judge.given_out(request, depth, states_of([token])[0])
        self._counts.add_step(depth)
        self._pending[request.kv_sequence] = [*self._pending_of(request), *tree.tokens]
