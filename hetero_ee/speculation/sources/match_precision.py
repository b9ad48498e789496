"""MatchPrecision: how often the token behind a repeated n-gram is the one that stood behind it before."""

PRIOR_TOKENS = 8.0  # tokens that the first belief weighs
PRIOR_ORDER = 4.0  # order of which one in two is believed to be right: low, as computed drafts are there instead
DECAY = 0.998  # of the counts of an order at each token: half is forgotten after 350


class MatchPrecision:
    """By the order of the longest n-gram found, 1 to max_order. At first it is n / (n + PRIOR_ORDER) for order n."""

    def __init__(self, max_order: int) -> None:
        self._right = [0.0] * max_order
        self._seen = [0.0] * max_order

    def add(self, order: int, was_right: bool) -> None:
        """A token behind a match of this order came out."""
        place = order - 1
        self._right[place] = DECAY * self._right[place] + was_right
        self._seen[place] = DECAY * self._seen[place] + 1

    def chance(self, order: int) -> float:
        """That the token behind such a match is right: the mean of a Beta posterior. Longer matches count as the
        longest that is told apart."""
        order = min(order, len(self._seen))
        right = PRIOR_TOKENS * order / (order + PRIOR_ORDER) + self._right[order - 1]
        return right / (PRIOR_TOKENS + self._seen[order - 1])
