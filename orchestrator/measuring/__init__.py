"""Jobs that measure: host profiles, rows of a study, a short all-reduce."""
