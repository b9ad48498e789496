"""What decides where a token exits that is given out there, without the layers behind."""
