"""The roots of the family of errors: hetero_ee.errors has the others, and this package raises these two itself."""


class HeteroError(Exception):
    """Base of the family; catching it catches every deliberate refusal."""


class UsageError(HeteroError, ValueError):
    """A value the caller chose can't be used: sampling settings, prompt, context size, a flag."""
