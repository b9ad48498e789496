"""Early exits: maps that estimate a token's final hidden state, predictors that judge it, and their calibration."""
