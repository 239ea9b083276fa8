"""What came of a run, from nothing but its collected folder."""
