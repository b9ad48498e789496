"""Tools that a model may call: what is asked, how a template writes calls, and what of a reply is one."""
