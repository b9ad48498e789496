"""Recognition of too little memory, as Python or libraries report it. Imports nothing that needs memory itself."""

import errno

SAYING = (ImportError, OSError, RuntimeError, SystemError)
# By the loader of shared objects, torch's allocator, Python's threads; last by Python's own imports, which lose a
# MemoryError on its way (Python 3.11 within 45 MB).
REFUSALS = (
    *("failed to map segment", "annot allocate memory", "can't allocate memory", "can't start new thread"),
    *("without exception set", "without setting an exception"),
)


def is_refusal_of_memory(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, reports too little memory."""
    seen = set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or getattr(link, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(link, SAYING) and any(text in str(link) for text in REFUSALS):
            return True
        link = link.__cause__ or link.__context__
    return False
