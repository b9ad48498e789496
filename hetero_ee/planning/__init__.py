"""Planning: from a model, a hardware profile and the user's limits to a place for every weight, with expected times."""
