"""Too little memory, however Python and the libraries put it. Imports nothing that takes memory itself."""

import errno

# Of ImportError, OSError and RuntimeError: by the loader of shared objects, torch's allocator, Python's threads.
REFUSALS = ("failed to map segment", "annot allocate memory", "can't allocate memory", "can't start new thread")


def is_refusal_of_memory(error: BaseException) -> bool:
    """Whether the error, or one that it came of, says that there was no memory."""
    seen = set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or getattr(link, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(link, ImportError | OSError | RuntimeError) and any(text in str(link) for text in REFUSALS):
            return True
        link = link.__cause__ or link.__context__
    return False
