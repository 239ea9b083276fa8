"""Jobs that are run in order to measure: each host alone, and the rows of a study."""
