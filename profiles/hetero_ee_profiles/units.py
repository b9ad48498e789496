"""Binary units of memory: MiB and GiB in bytes."""

MIB, GIB = 2**20, 2**30
