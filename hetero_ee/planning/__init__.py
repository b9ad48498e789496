"""Planning: a placement of every weight and expected times, from a model, a hardware profile and the user's limits."""
